"""Soak test: `python -m tests.memory.soak --operations 5000000 --provider cuda-vmm`.

Allocates, frees, moves and remaps at random within a tight limit. Every live block has a pattern of
its own, in which no two words are equal. The pattern is checked when the block is freed and after
every defragmentation.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cukit.errors import OutOfMemoryError
from cukit.memory import DeviceBuffer, HostProvider, MemoryPool, MemoryPoolConfig, Provider
from cukit.reference._xp import array_namespace
from tests.memory.invariants import check_invariants

PROVIDERS = ("host", "host-segments", "cuda-vmm", "cuda-malloc")

LARGEST_LOG2 = 18
VALUE_BITS = 61


class Soak:
    """A pool under random use; `limit` is about twice the average live memory."""

    def __init__(self, provider: Provider, limit: int, seed: int) -> None:
        config = MemoryPoolConfig(max_pool_size=limit, defrag_threshold=0.6)
        self.pool = MemoryPool(config, provider)
        self.limit = limit
        self.random = random.Random(seed)
        self.raw: list[tuple[int, int, int]] = []
        self.buffers: list[tuple[DeviceBuffer, int]] = []
        self.operations = 0
        self.refused = 0
        self.checked = 0

    def write(self, address: int, size: int, value: int) -> None:
        words = self._words(address, size)
        words[:] = _pattern(words, value)

    def check(self, address: int, size: int, value: int) -> None:
        self.checked += 1
        words = self._words(address, size)
        same = bool((words == _pattern(words, value)).all())
        assert same, f"{size} bytes at {address:#x} were overwritten"

    def _words(self, address: int, size: int) -> Any:
        return self.pool.provider.array(address, (size // 8,), np.int64, None)

    def step(self) -> None:
        """One operation."""
        self.operations += 1
        draw = self.random.random()
        if draw < 0.34:
            self._allocate()
        elif draw < 0.52:
            self._allocate_buffer()
        elif draw < 0.84 and self.raw:
            position = self.random.randrange(len(self.raw))
            self.raw[position], self.raw[-1] = self.raw[-1], self.raw[position]
            address, size, value = self.raw.pop()
            self.check(address, size, value)
            self.pool.free(address)
        elif self.buffers:
            position = self.random.randrange(len(self.buffers))
            self.buffers[position], self.buffers[-1] = self.buffers[-1], self.buffers[position]
            buffer, value = self.buffers.pop()
            with buffer.pinned() as address:
                self.check(address, buffer.size, value)
            buffer.close()

    def _size(self) -> int:
        if self.random.random() < 0.02:
            return self.random.randrange(1, self.limit // 16)
        return int(2 ** self.random.uniform(3, LARGEST_LOG2))

    def _allocate(self) -> None:
        size, value = self._size(), self.random.getrandbits(VALUE_BITS)
        try:
            address = self.pool.allocate(size)
        except OutOfMemoryError:
            self._free_a_third()
            return
        self.write(address, size, value)
        self.raw.append((address, size, value))

    def _allocate_buffer(self) -> None:
        size, value = self._size(), self.random.getrandbits(VALUE_BITS)
        try:
            buffer = self.pool.allocate_buffer(size)
        except OutOfMemoryError:
            self._free_a_third()
            return
        with buffer.pinned() as address:
            self.write(address, size, value)
        self.buffers.append((buffer, value))

    def _free_a_third(self) -> None:
        """Frees a third of the blocks after a failed allocation; finalizers free the buffers."""
        self.refused += 1
        self.random.shuffle(self.raw)
        self.random.shuffle(self.buffers)
        for address, size, value in self.raw[: len(self.raw) // 3]:
            self.check(address, size, value)
            self.pool.free(address)
        del self.raw[: len(self.raw) // 3]
        for buffer, value in self.buffers[: len(self.buffers) // 3]:
            with buffer.pinned() as address:
                self.check(address, buffer.size, value)
        del self.buffers[: len(self.buffers) // 3]

    def check_all(self) -> None:
        """Checks every live block, and the invariants."""
        for address, size, value in self.raw:
            self.check(address, size, value)
        for buffer, value in self.buffers:
            with buffer.pinned() as address:
                self.check(address, buffer.size, value)
        check_invariants(self.pool)

    def run(self, operations: int, defragment_every: int) -> None:
        """Runs operations, with defragmentations and complete checks in between."""
        for number in range(1, operations + 1):
            self.step()
            if number % defragment_every == 0:
                self.pool.defragment()
                self.check_all()
                if number % (4 * defragment_every) == 0:
                    self.pool.trim()
        self.check_all()


def _pattern(words: Any, value: int) -> Any:
    """The pattern of a block. Its words are all different, so misplaced bytes show."""
    return array_namespace(words).arange(value, value + len(words), dtype=np.int64)


def make_provider(name: str, total_bytes: int) -> Provider:
    """Creates the provider that PROVIDERS names."""
    if name == "cuda-vmm":
        from cukit.memory.providers.cuda_vmm import CudaVirtualMemory

        return CudaVirtualMemory()
    if name == "cuda-malloc":
        from cukit.memory.providers.cuda_malloc import CudaMalloc

        return CudaMalloc()
    return HostProvider(total_bytes, can_remap=name == "host")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=2_000_000)
    parser.add_argument("--provider", default="host", choices=PROVIDERS)
    parser.add_argument("--limit-mib", type=int, default=64)
    parser.add_argument("--every", type=int, default=20_000, help="operations per defragmentation")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    limit = options.limit_mib << 20
    soak = Soak(make_provider(options.provider, 2 * limit), limit, options.seed)
    start = time.perf_counter()
    soak.run(options.operations, options.every)
    seconds = time.perf_counter() - start
    statistics = soak.pool.statistics()
    print(
        f"{soak.operations} operations in {seconds:.1f} s, {soak.checked} blocks checked, "
        f"{soak.refused} refused, {statistics.num_defragments} defragmentations, "
        f"{statistics.bytes_moved >> 20} MiB moved, {statistics.pages_remapped} pages remapped, "
        f"hit rate {statistics.hit_rate:.2f}"
    )


if __name__ == "__main__":
    main()
