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


class Stream:
    ptr = 0


class Copier(DeviceCopy):
    """With arrays in host memory, and a kernel that makes the moves in order and immediately."""

    def __init__(self, runtime: Any) -> None:
        super().__init__(SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))  # type: ignore[arg-type]
        self.launched: list[int] = []
        """The number of moves of each launch."""

    def _prepare(self) -> None:
        def table() -> Any:
            rows = np.zeros((device_copy._MAX_MOVES + 1, 3), np.int64)
            return SimpleNamespace(rows=rows, data=SimpleNamespace(ptr=rows.ctypes.data))

        self._staging, self._table = np.zeros((device_copy._MAX_MOVES + 1, 3), np.int64), table()
        self._upload = self._table.data.ptr, self._staging.ctypes.data
        self._progress = table()
        self._last = SimpleNamespace(record=lambda _: None, synchronize=lambda: None)

    def launch_moves(self, plan: MovePlan, base: Any, table: Any, progress: Any, _: Any) -> None:
        assert base is None
        self.launched.append(len(plan.table) - 1)
        np.testing.assert_array_equal(table.rows[: len(plan.table)], plan.table)
        for destination, source, size in plan.moves():
            ctypes.memmove(destination, source, size)


@pytest.fixture
def copy(monkeypatch: pytest.MonkeyPatch) -> Copier:
    copier = Copier(
        SimpleNamespace(
            memcpyAsync=lambda to, at, size, *_: ctypes.memmove(to, at, size),
            memsetAsync=lambda to, value, size, _: ctypes.memset(to, value, size),
        )
    )
    monkeypatch.setattr(device_copy, "launch_moves", copier.launch_moves)
    return copier


@pytest.mark.parametrize(
    ("count", "max_tiles", "launched"),
    [(90, 1 << 17, [90]), (90, 1, [64, 26]), (250, 1 << 17, [100, 100, 50]), (100, 9, [100])],
)
def test_disjoint_moves(
    copy: Copier,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    max_tiles: int,
    launched: list[int],
) -> None:
    """Moves that are known not to overlap: their table is built in pinned memory if one launch
    suffices. The copier is called twice."""
    monkeypatch.setattr(device_copy, "_MAX_MOVES", 100)
    monkeypatch.setattr(device_copy, "_MAX_TILES", max_tiles)
    for seed in range(2):
        memory = np.random.default_rng(seed).integers(0, 256, 2 * count * SIZE).astype(np.uint8)
        number = np.random.default_rng(seed).permutation(count)
        moves = np.stack([count + np.arange(count), number, np.ones(count, int)], axis=1) * SIZE
        expected = memory.reshape(2, count, SIZE)[0, number].copy()
        start = np.array([memory.ctypes.data, memory.ctypes.data, 0])
        copy(moves + start, Stream(), apart=True)
        np.testing.assert_array_equal(memory.reshape(2, count, SIZE)[1], expected)
    assert copy.launched == 2 * launched


@pytest.mark.parametrize(
    ("count", "gap", "launched"),
    [
        (FEW_MOVES, 0, []),  # cudaMemcpyAsync
        (FEW_MOVES, SIZE // 2, [FEW_MOVES]),  # overlapping moves: a slide
        (90, 0, [90]),
        (250, 0, [100, 100, 50]),
        (250, 16, [100, 100, 50]),
    ],
)
def test_moves_copy_every_byte(
    copy: Copier, monkeypatch: pytest.MonkeyPatch, count: int, gap: int, launched: list[int]
) -> None:
    """`gap` 0: moves from one half to the other, in random order; otherwise slides over a gap."""
    monkeypatch.setattr(device_copy, "_MAX_MOVES", 100)
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
    copy(moves, Stream())
    for to, at in zip(destination + first, source + first, strict=True):
        np.testing.assert_array_equal(memory[to : to + SIZE], before[at : at + SIZE])
    assert copy.launched == launched
