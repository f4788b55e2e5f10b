"""GPU work that lags behind the host, so that premature reuse of memory gives wrong values."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from cukit.core.device import require_cupy

_SOURCE = r"""
extern "C" __global__ void fill(unsigned* words, int count, unsigned value, long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        words[i] = value + i;
}

extern "C" __global__ void count_wrong(
    const unsigned* words, int count, unsigned value, unsigned* wrong) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        if (words[i] != value + i) atomicAdd(wrong, 1u);
}
"""

CYCLES = 100_000
"""About 60 us: longer than the host takes to enqueue the next work."""


@functools.cache
def _kernel(name: str) -> Any:
    return require_cupy("a test").RawModule(code=_SOURCE).get_function(name)


def fill(words: Any, value: int, cycles: int = CYCLES) -> None:
    """Waits `cycles` and fills uint32 words with the pattern `value`, on the current stream."""
    _kernel("fill")((8,), (256,), (words, np.int32(words.size), np.uint32(value), np.int64(cycles)))


def count_wrong(words: Any, value: int, wrong: Any) -> None:
    """Adds the number of words that differ from the pattern to `wrong`, on the current stream."""
    _kernel("count_wrong")((8,), (256,), (words, np.int32(words.size), np.uint32(value), wrong))


def words_at(provider: Any, address: int, size: int) -> Any:
    """Memory of a pool as uint32 words."""
    return provider.array(address, (size // 4,), np.uint32, None)


def intact(words: Any, value: int) -> bool:
    """Whether all words match the pattern; waits for the current stream."""
    wrong = require_cupy("a test").zeros(1, np.uint32)
    count_wrong(words, value, wrong)
    return int(wrong[0]) == 0


def in_thread(work: Callable[[], None]) -> None:
    """Runs `work` in a new thread, and raises its exception."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
