"""Kernels of known time or known bytes, for `profiling.prove_analyzer`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import cukit as ck
from cukit.analyzer.ceiling_probes import COPY_SPEC, WORD_BYTES, copy_grid
from cukit.analyzer.timing import GpuTimer, measure
from cukit.core.device import current_device, require_cupy
from cukit.core.kernel import load_kernel
from cukit.distill.optimizer.adamw import AdamWState
from profiling.data import integers, normal

THREADS = 256

BUSY = r"""
extern "C" __global__ void __launch_bounds__(256) busy(float* x, int rounds) {
  float a = x[threadIdx.x], b = a + 1.0f;
  for (int i = 0; i < rounds; ++i) { a = fmaf(a, 0.5f, b); b = fmaf(b, 0.25f, 0.125f); }
  x[blockIdx.x * 256 + threadIdx.x] = a + b;
}"""
BUSY_RESULT = 0.5
"""The value that `a + b` converges to after about fifty rounds, for any x."""

COPIES_MIB = (8, 16, 64, 512, 2048)

BUSY_US = (3, 10, 30, 100, 10_000)


@dataclass(frozen=True)
class Subject:
    """A kernel to time, its launch arguments, and the bytes that it reads and writes.

    block: None for a kernel of cukit, which has a fixed block size.
    """

    name: str
    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...] | None
    args: tuple[Any, ...]
    bytes: float | None = None

    def __call__(self) -> None:
        if self.block is None:
            self.kernel(self.grid, self.args)
        else:
            self.kernel(self.grid, self.block, self.args)


def copy_subject(mebibytes: int) -> Subject:
    """A copy of the given size by the copy kernel of cukit."""
    source = normal(((mebibytes << 20) // 4,), "float32")
    target = require_cupy("the proof").empty_like(source)
    words = np.int64(source.nbytes // WORD_BYTES)
    return Subject(
        f"copy {mebibytes} MiB",
        load_kernel(COPY_SPEC),
        copy_grid(source.nbytes),
        None,
        (source, target, words),
        2.0 * source.nbytes,
    )


def busy_subject(name: str, rounds: int) -> Subject:
    """The given number of rounds of arithmetic, in a cupy.RawKernel like those of users."""
    cupy = require_cupy("the proof")
    blocks = 4 * current_device().num_sms
    x = cupy.zeros(blocks * THREADS, cupy.float32)
    kernel = cupy.RawKernel(BUSY, "busy")
    return Subject(f"busy {name}", kernel, (blocks,), (THREADS,), (x, np.int32(rounds)))


def busy_rounds(target_us: float, overhead_us: float) -> int:
    """The number of rounds with which the busy kernel takes about `target_us`.

    overhead_us: what a pair of events adds to a measured time.
    """
    timer = GpuTimer(cold=False)

    def time_us(rounds: int) -> float:
        return measure({"": busy_subject("", rounds)}, timer, rounds=1, pause_s=0)[""].median_us

    per_round_us = (time_us(20_000) - time_us(10_000)) / 10_000
    shortest_us = time_us(1) - overhead_us
    return max(1, int((target_us - shortest_us) / per_round_us))


def timed_subjects(rounds: Sequence[int]) -> Iterator[Subject]:
    """The ten kernels, created lazily. rounds: for each time of BUSY_US."""
    for microseconds, each in zip(BUSY_US, rounds, strict=True):
        yield busy_subject(f"{microseconds} us", each)
    for mebibytes in COPIES_MIB:
        yield copy_subject(mebibytes)


@dataclass(frozen=True)
class MemoryBound:
    """A call with known bytes: every input read once, every output written once."""

    call: Callable[[], object]
    bytes: float


def memory_bound() -> dict[str, Callable[[], MemoryBound]]:
    """Factories of memory-bound calls. Each call moves gigabytes, so that data left in L2 before
    it is negligible."""
    return {
        "copy": _copy,
        "rms_norm": _rms_norm,
        "silu_and_mul": _silu_and_mul,
        "embedding": _embedding,
        "cross_entropy": _cross_entropy,
        "adamw": _adamw,
    }


def _copy() -> MemoryBound:
    subject = copy_subject(2048)
    assert subject.bytes is not None
    return MemoryBound(subject, subject.bytes)


def _rms_norm() -> MemoryBound:
    x, weight = normal((1 << 17, 8192), "bfloat16"), normal((8192,), "bfloat16")
    out = x.copy()
    return MemoryBound(partial(ck.rms_norm, x, weight, out=out), 2.0 * x.nbytes + weight.nbytes)


def _silu_and_mul() -> MemoryBound:
    x = normal((1 << 16, 16384), "bfloat16")
    out = x[:, : x.shape[1] // 2].copy()
    return MemoryBound(partial(ck.silu_and_mul, x, out=out), 1.0 * x.nbytes + out.nbytes)


def _embedding() -> MemoryBound:
    """Every row of a table once, in a scattered order."""
    table = normal((1 << 18, 4096), "bfloat16")
    rows = table.shape[0]
    ids = require_cupy("the proof").arange(rows, dtype=np.int64) * 40503 % rows
    out = table.copy()
    moved = 2.0 * table.nbytes + ids.nbytes
    return MemoryBound(partial(ck.embedding, ids, table, out=out), moved)


def _cross_entropy() -> MemoryBound:
    """With the gradient, which overwrites the logits."""
    logits = normal((1 << 14, 1 << 16), "bfloat16")
    targets = integers(0, logits.shape[1], (logits.shape[0],))
    call = partial(ck.cross_entropy, logits, targets, return_grad=True, inplace=True)
    return MemoryBound(call, 2.0 * logits.nbytes + targets.nbytes)


def _adamw() -> MemoryBound:
    """The gradient is read, the bfloat16 parameter written; the float32 master copy and two moments
    are read and written."""
    params, grads = [normal((1 << 27,), "bfloat16")], [normal((1 << 27,), "bfloat16", 1e-3)]
    state = AdamWState.for_params(params)
    call = partial(ck.adamw, params, grads, state, lr=1e-4, step=1)
    return MemoryBound(call, params[0].size * (2.0 + 2.0 + 3 * 8.0))
