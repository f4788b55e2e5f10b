"""Cases of `cukit.memory`: many copies in one launch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cukit.memory import batched_copy
from cukit.registry import get_kernel
from profiling.case import Case, Workload
from profiling.data import array_module, integers

FAMILY = "memory"

KIB = 1 << 10


def cases(small: bool = False) -> list[Case]:
    """Copies to disjoint destinations, as in a cache or a defragmentation, and overlapping
    moves."""
    if small:
        return [scattered_case(4 * KIB, 64 * KIB), slide_case(4 * KIB, 1 * KIB, 64 * KIB)]
    total = 1 << 30
    return [
        *(scattered_case(block, total) for block in (64 * KIB, 1024 * KIB, total, 4 * KIB)),
        *(slide_case(block, gap, total) for block, gap in ((64 * KIB, 4 * KIB), (total, 64 * KIB))),
    ]


def scattered_case(block: int, total: int) -> Case:
    """Copies blocks of one size, scattered in the lower half of the memory, to the upper half."""
    count = total // block
    order = np.random.default_rng(3).permutation(count)
    table = np.stack([total + np.arange(count) * block, order * block, np.full(count, block)], 1)

    def build() -> Workload:
        memory = integers(0, 256, (2 * total,), "uint8")
        expected = get_kernel("batched_copy", platform="cpu")(memory.copy(), table)
        return Workload({"cukit": lambda: lambda: batched_copy(memory, table)}, lambda: expected)

    return _case(f"{count} x {block // KIB} KiB scattered", build, total)


def slide_case(block: int, gap: int, total: int) -> Case:
    """Moves blocks down to close the gaps between them.

    The distance of every move is a multiple of the gap, and the data is periodic with the gap, so a
    move changes no byte and can be repeated in place. Correctness is tested in tests/memory.
    """
    count = total // block
    moves = [(i * block, i * (block + gap) + gap, block) for i in range(count)]

    def build() -> Workload:
        period = integers(0, 256, (gap,), "uint8")
        memory = array_module().tile(period, count * (block // gap + 1) + 1)
        expected = memory.copy()
        return Workload({"cukit": lambda: lambda: batched_copy(memory, moves)}, lambda: expected)

    return _case(f"{count} x {block // KIB} KiB slide over {gap // KIB} KiB", build, total)


def _case(name: str, build: Callable[[], Workload], moved: int) -> Case:
    return Case(FAMILY, "batched_copy", name, "uint8", build, bytes=2 * moved)
