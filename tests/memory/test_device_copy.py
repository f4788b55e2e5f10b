"""The copies of a defragmentation, with the kernel and the driver's copy replaced."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cukit.memory.batched_copy import MovePlan
from cukit.memory.providers import device_copy
from cukit.memory.providers.device_copy import FEW_MOVES, DeviceCopy

SIZE = 512


class Table:
    """A device table in host memory, with `set` as in CuPy's arrays."""

    nbytes = 0

    def __init__(self) -> None:
        self.data = SimpleNamespace(memset_async=lambda *_: None)
        self.rows = np.zeros((0, 3), np.int64)

    def __getitem__(self, _: slice) -> Table:
        return self

    def set(self, rows: np.ndarray[Any, Any], _: Any) -> None:
        self.rows = rows.copy()


class Stream:
    """Does all work immediately."""

    ptr = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait_event(self, _: Any) -> None: ...


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of moves of each kernel launch; moves are done in order."""
    counts: list[int] = []

    def launch(plan: MovePlan, base: Any, table: Table, progress: Any) -> None:
        counts.append(len(plan.table) - 1)
        np.testing.assert_array_equal(table.rows, plan.table)
        for destination, source, size in plan.moves():
            ctypes.memmove(destination, source, size)

    monkeypatch.setattr(device_copy, "launch_moves", launch)
    monkeypatch.setattr(device_copy, "_MOST_MOVES", 100)
    return counts


def copier() -> DeviceCopy:
    runtime = SimpleNamespace(
        memcpyAsync=lambda destination, source, size, *_: ctypes.memmove(destination, source, size)
    )
    made = DeviceCopy(SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))  # type: ignore[arg-type]
    made._table, made._progress = Table(), Table()
    made._last = SimpleNamespace(record=lambda _: None)
    return made


@pytest.mark.parametrize(
    ("count", "gap", "launched"),
    [
        (FEW_MOVES, 0, []),  # cudaMemcpyAsync
        (FEW_MOVES, SIZE // 2, [FEW_MOVES]),  # they overlap: a slide
        (90, 0, [90]),
        (250, 0, [100, 100, 50]),
        (250, 16, [100, 100, 50]),
    ],
)
def test_moves_arrive(launches: list[int], count: int, gap: int, launched: list[int]) -> None:
    """`gap` 0: moves from one half to the other, in any order; else slides over a gap."""
    memory = np.random.default_rng(0).integers(0, 256, 2 * count * SIZE + 64).astype(np.uint8)
    start = memory.ctypes.data
    start += -start % 16
    number = np.arange(count)
    if gap:
        destination, source = number * SIZE, number * (SIZE + gap) + gap
    else:
        destination = count * SIZE + number * SIZE
        source = np.random.default_rng(1).permutation(count) * SIZE
    before, first = memory.copy(), start - memory.ctypes.data
    moves = np.stack([start + destination, start + source, np.full(count, SIZE)], axis=1)
    copier()(moves, Stream())
    for to, at in zip(destination + first, source + first, strict=True):
        np.testing.assert_array_equal(memory[to : to + SIZE], before[at : at + SIZE])
    assert launches == launched
