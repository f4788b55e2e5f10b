"""The host's part of compactions that a device plans, with CuPy and the kernels replaced."""

from __future__ import annotations

import ctypes
from array import array
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cukit.memory.batched_copy import TILE_BYTES
from cukit.memory.bookkeeping.slots import plan_slots
from cukit.memory.providers import slot_mover
from cukit.memory.providers.cuda_device import CudaDevice
from cukit.memory.providers.slot_mover import SlotMover, num_blocks
from cukit.memory.slot_grid import MAX_ROWS, MAX_WALLS, Grid, make_grid

PAGE, SIZE, BEGIN = 512 << 10, 64 << 10, 3 << 20


class Pinned(np.ndarray):  # type: ignore[type-arg]
    """Like CuPy's pinned memory: more bytes than requested, with the buffer format "b"."""

    @property
    def ptr(self) -> int:
        return int(self.ctypes.data)


class Pointer:
    def __add__(self, offset: int) -> Pointer:
        return self


def words(address: Any, count: Any) -> Any:
    """int64 words at an address."""
    store = (ctypes.c_int64 * max(int(count), 1)).from_address(int(address))
    return np.ctypeslib.as_array(store)[: int(count)]


class Device:
    """Runs the reference in place of the plan kernel, on the same addresses; copies nothing."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.copies: list[tuple[int, int]] = []
        """Thread blocks and moves of each launch."""
        self._moves = 0
        cuda = SimpleNamespace(
            alloc_pinned_memory=lambda size: np.zeros(size + 512, np.int8).view(Pinned),
            Memory=lambda size: None,
            MemoryPointer=lambda memory, offset: Pointer(),
            Event=lambda **_: SimpleNamespace(
                record=lambda stream: self.calls.append("record"),
                synchronize=lambda: self.calls.append("synchronize"),
            ),
        )
        self.cupy: Any = SimpleNamespace(
            cuda=cuda, ndarray=lambda shape, dtype, at: np.zeros(1, dtype)
        )

    def load_kernel(self, spec: Any) -> Any:
        return self.plan if spec.entry == "plan_slots" else self.copy

    def plan(self, blocks: Any, args: Any, *, stream: Any) -> None:
        self.calls.append("plan")
        assert blocks == (1,)
        request_at, rows_at, walls_at, _, _, result_at, targets_at = args
        begin, slot_shift, page_shift, num_slots, count, num_rows, num_walls, _ = map(
            int, words(request_at, 8)
        )
        rows, walls = words(rows_at, num_rows), words(walls_at, 2 * num_walls).reshape(-1, 2)
        there = rows.nonzero()[0]
        assert len(there) == count
        grid = Grid(begin, slot_shift, page_shift, num_slots, count)
        plan = plan_slots(grid, rows[there], walls[:, 0], walls[:, 1])
        self._moves = 0 if plan is None else len(plan.moved)
        words(result_at, 1).view(np.int32)[0] = self._moves
        if plan is not None:
            targets = words(targets_at, num_rows).view(np.int32).reshape(-1, 2)
            targets[: self._moves, 0] = there[plan.moved]
            targets[: self._moves, 1] = (plan.target[plan.moved] - begin) >> slot_shift

    def copy(self, blocks: Any, args: Any, *, stream: Any) -> None:
        self.calls.append("copy")
        self.copies.append((blocks[0], self._moves))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(slot_mover, "load_kernel", made.load_kernel)
    monkeypatch.setattr(slot_mover, "by_value", lambda value: value)
    return made


def request(seed: int, walls: int) -> tuple[Grid, array[int], array[int]]:
    """Buffers in every second slot of 30 pages, in random rows; nine rows are empty."""
    rng = np.random.default_rng(seed)
    count = 30 * PAGE // SIZE // 2
    rows = np.zeros(count + 9, np.int64)
    place = rng.permutation(len(rows))[:count]
    rows[place] = BEGIN + 2 * SIZE * rng.permutation(count)
    wall_at = BEGIN + 2 * SIZE * rng.permutation(count)[:walls] + SIZE
    grid = make_grid(BEGIN, BEGIN + 30 * PAGE, SIZE, count, PAGE)
    assert grid is not None
    sizes = np.full(walls, 512)
    return grid, array("q", rows.tolist()), array("q", np.stack([wall_at, sizes], 1).ravel())


def test_the_host_plans_without_memory_for_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    class DriverError(RuntimeError):
        def __init__(self, status: int) -> None:
            self.status = status

    def moves(status: int) -> Any:
        def fail(*_: Any) -> None:
            raise DriverError(status)

        provider: Any = object.__new__(CudaDevice)
        monkeypatch.setattr(CudaDevice, "current", lambda self: nullcontext())
        monkeypatch.setattr(CudaDevice, "_object_of", lambda self, stream: stream)
        provider._move_slots = fail
        return provider.move_slots(*request(0, 0), None)

    assert moves(2) is None  # cudaErrorMemoryAllocation
    with pytest.raises(DriverError):
        moves(700)


@pytest.mark.parametrize("walls", [0, 3])
def test_uploads_launches_and_readbacks(device: Device, walls: int) -> None:
    mover = SlotMover(device.cupy)
    for seed in range(3):
        grid, rows, wall_words = request(seed, walls)
        del device.calls[:]
        started = mover(grid, rows, wall_words, None)
        assert started is not None
        assert device.calls == ["synchronize", "plan", "record", "copy", "record"]
        moves = started.wait()
        assert moves is not None
        at, fixed = np.array(rows), np.array(wall_words, np.int64).reshape(-1, 2)
        there = at.nonzero()[0]
        plan = plan_slots(grid, at[there], fixed[:, 0], fixed[:, 1])
        assert plan is not None
        np.testing.assert_array_equal(moves[0], there[plan.moved])
        np.testing.assert_array_equal(BEGIN + moves[1] * SIZE, plan.target[plan.moved])
        blocks, moved = device.copies[-1]
        assert blocks * TILE_BYTES >= moved * SIZE
    assert len(mover._idle) == 1, "the memory is reused"


def test_a_second_compaction_before_the_first_is_read(device: Device) -> None:
    mover = SlotMover(device.cupy)
    one, other = (mover(*request(seed, 0), None) for seed in range(2))
    assert one is not None
    assert other is not None
    first, second = one.wait(), other.wait()
    assert first is not None
    assert second is not None
    assert len(mover._idle) == 2
    assert not np.array_equal(first[0], second[0])


def test_a_full_layout_has_no_moves(device: Device) -> None:
    grid, rows, walls = request(0, 0)
    full = [BEGIN + SIZE * n for n in range(len(rows))]
    grid = grid._replace(num_buffers=len(full))
    started = SlotMover(device.cupy)(grid, array("q", full), walls, None)
    assert started is not None
    assert started.wait() is None


@pytest.mark.parametrize(
    ("change", "rows", "walls"),
    [
        ({"num_buffers": 15}, 1, 0),
        ({}, MAX_ROWS + 1, 0),
        ({}, 1, MAX_WALLS + 1),
        ({"num_slots": 1 << 20}, 1, 0),
        ({"page_shift": 13, "num_slots": 1 << 14}, 1, 0),
        ({"page_shift": 0, "num_slots": 1 << 14}, 1, 0),
    ],
)
def test_cases_planned_by_the_host(
    device: Device, change: dict[str, int], rows: int, walls: int
) -> None:
    grid = request(0, 0)[0]._replace(**change)
    mover = SlotMover(device.cupy)
    assert mover(grid, array("q", [BEGIN] * rows), array("q", [BEGIN, SIZE] * walls), None) is None
    assert not device.calls


def test_blocks_for_the_copies() -> None:
    """One thread block per tile of the most bytes that can move, up to a limit."""
    grid, _, _ = request(0, 0)
    tiles = SIZE * (grid.num_buffers - grid.num_buffers // 2) // TILE_BYTES
    assert num_blocks(grid, 0) == tiles
    assert num_blocks(grid, 1) == grid.num_buffers * SIZE // TILE_BYTES
    assert num_blocks(grid._replace(num_buffers=grid.num_slots), 0) == 1
    assert num_blocks(grid._replace(slot_shift=30, num_buffers=99), 1) == slot_mover._MAX_BLOCKS
