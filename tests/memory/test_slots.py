"""Compaction plans for buffers of one size, against the general planner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cukit.commands.compile import DEFAULT_ARCHS
from cukit.core.compiler import compile_kernel
from cukit.core.kernel import NULL, load_kernel
from cukit.memory.batched_copy import plan_batched_copy
from cukit.memory.bookkeeping.compaction import Pieces, plan_compaction
from cukit.memory.bookkeeping.slots import plan_slots
from cukit.memory.bookkeeping.survey import Paging, measure, measure_slots
from cukit.memory.slot_grid import MIN_GAIN, REQUEST, Grid, fits, make_grid, slot_planner_spec
from tests.contract import to_device, to_host
from tests.devices import kernels_only

PAGE = 256 << 10
BEGIN = 7 * PAGE
MOVABLE, FREE, IMMOVABLE = range(3)


def columns(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def pages_in_use(address: np.ndarray, size: int) -> set[int]:  # type: ignore[type-arg]
    return set(((address - BEGIN) // PAGE).tolist()) | set(
        ((address - BEGIN + size - 1) // PAGE).tolist()
    )


@settings(max_examples=200, deadline=None)
@given(
    pages=st.integers(8, 40),
    per_page=st.sampled_from([1, 2, 4, 16]),
    occupied=st.floats(0.1, 0.6),
    walls=st.sampled_from([0.0, 0.02, 0.2]),
    whole=st.booleans(),
    seed=st.integers(0, 1 << 32),
)
def test_as_good_as_the_general_plan(
    pages: int, per_page: int, occupied: float, walls: float, seed: int, *, whole: bool
) -> None:
    """With walls of whole slots, the plan moves the bytes and frees the pages of the general plan.
    No move overwrites data."""
    length = PAGE // per_page
    rng = np.random.default_rng(seed)
    at = BEGIN + length * np.arange(pages * per_page)
    kinds = rng.choice(
        [MOVABLE, FREE, IMMOVABLE], len(at), p=[occupied, 1 - occupied - walls, walls]
    )
    end = BEGIN + pages * PAGE
    movable, wall = at[kinds == MOVABLE], at[kinds == IMMOVABLE]
    wall_at = wall if whole else wall + rng.integers(0, 4, len(wall)) * (length // 8)
    wall_size = np.full(len(wall), length if whole else length // 2)
    shuffled = rng.permutation(movable)
    sizes = np.full(len(movable), length)
    grid = make_grid(BEGIN, end, length, len(movable), PAGE)
    assume(grid is not None)
    plan = plan_slots(grid, shuffled, rng.permutation(wall_at), wall_size)
    pieces = Pieces(columns(BEGIN), columns(end), movable, sizes, wall_at, wall_size)
    general = plan_compaction(pieces, PAGE, remap=True)
    assume(plan is not None)
    np.testing.assert_array_equal(plan.source, shuffled)
    (step,) = plan.steps
    assert set(map(tuple, step.tolist())) == {
        (to, source, length)
        for source, to in zip(shuffled.tolist(), plan.target.tolist(), strict=True)
        if to != source
    }
    taken = set(movable.tolist()) | set(wall.tolist())
    assert not set(step[:, 0].tolist()) & taken
    assert len(set(plan.target.tolist())) == len(movable)
    assert plan.target.min() >= BEGIN
    assert plan.target.max() + length <= end
    before, after = pages_in_use(movable, length), pages_in_use(plan.target, length)
    assert len(after - pages_in_use(wall, length)) <= len(before) - MIN_GAIN
    if not whole:  # the general planner also uses holes that are not slots
        return
    assert plan.bytes_moved == general.bytes_moved
    assert len(after | pages_in_use(wall, length)) == len(
        pages_in_use(general.target, length) | pages_in_use(wall, length)
    )


@pytest.mark.parametrize(
    ("length", "count", "page_bytes"),
    [
        (0, 0, PAGE),  # no buffers, or several sizes
        (3 * PAGE // 8, 3, PAGE),
        (2 * PAGE, 3, PAGE),  # more than a page
        (512, 3, PAGE),  # nearly empty
        (4096, 6, 12288),  # a page size that is not a power of two
    ],
)
def test_layouts_without_a_grid(length: int, count: int, page_bytes: int) -> None:
    assert make_grid(BEGIN, BEGIN + 6 * page_bytes, length, count, page_bytes) is None


@pytest.mark.parametrize(
    "address",
    [
        [0, PAGE + 512, 2 * PAGE],  # not at a multiple of the size
        [0, PAGE],  # would free only one page
    ],
)
def test_cases_left_to_the_general_planner(address: list[int]) -> None:
    at = BEGIN + columns(*address)
    grid = make_grid(BEGIN, BEGIN + 6 * PAGE, PAGE // 2, len(at), PAGE)
    assert grid is not None
    assert plan_slots(grid, at, columns(), columns()) is None


# On the device ------------------------------------------------------------------------------------


def request_of(grid: Grid, num_rows: int, num_walls: int) -> np.ndarray:
    return np.frombuffer(REQUEST.pack(*grid, num_rows, num_walls), np.int64)


def run_kernel(
    device: str, grid: Grid, rows: np.ndarray, walls: np.ndarray
) -> tuple[int, np.ndarray, np.ndarray]:
    """The kernel's result, its table up to the total, and the target slots."""
    request = request_of(grid, len(rows), len(walls))
    wall_rows = walls if len(walls) else np.zeros((1, 2), np.int64)
    table = np.full((len(rows) + 1, 3), -7, np.int64)
    targets = np.full((len(rows), 2), -7, np.int32)
    count, result = np.full(1, -7, np.int32), np.full(1, -7, np.int32)
    arrays = to_device(device, request, rows, wall_rows, table, count, result, targets)
    load_kernel(slot_planner_spec())((1,), tuple(arrays))
    _, _, _, table, count, result, targets = (to_host(one) for one in arrays)
    assert count[0] == max(result[0], 0)
    return int(result[0]), table[: count[0] + 1], targets[: count[0]]


def check_kernel(
    device: str, grid: Grid, rows: np.ndarray, walls: np.ndarray, *, fits: bool = True
) -> int:
    """Compares the kernel with plan_slots; returns the number of moves."""
    number, table, targets = run_kernel(device, grid, rows, walls)
    there = rows.nonzero()[0]
    plan = plan_slots(grid, rows[there], walls[:, 0], walls[:, 1])
    if plan is None:
        assert number == (0 if fits else -1)
        assert table[0, 2] == 0
        return number
    step = plan.steps[0]
    assert number == len(step)
    np.testing.assert_array_equal(table[:-1, :2], step[:, :2])
    np.testing.assert_array_equal(table[:, 2], grid.slot_bytes * np.arange(number + 1))
    np.testing.assert_array_equal(targets[:, 0], there[plan.moved])
    np.testing.assert_array_equal(grid.begin + targets[:, 1] * grid.slot_bytes, step[:, 0])
    return number


def make_rows(
    rng: np.random.Generator, num_slots: int, per_page: int, occupied: float, walls: int
) -> tuple[Grid, np.ndarray, np.ndarray]:
    """Buffers in random slots and rows, about a tenth of the rows empty; in other slots, walls of
    random offsets and sizes, in multiples of 512 bytes."""
    length = PAGE // per_page
    shuffled = rng.permutation(num_slots)
    wall_slots = np.sort(shuffled[:walls])
    wall_at = BEGIN + wall_slots * length + rng.integers(0, length // 512, walls) * 512
    room = BEGIN + (wall_slots + 1) * length - wall_at
    wall_size = -(-room // (512 * rng.integers(1, 5, walls))) * 512
    count = max(1, int(occupied * (num_slots - walls)))
    rows = np.zeros(count + count // 10, np.int64)
    place = np.sort(rng.permutation(len(rows))[:count])
    rows[place] = BEGIN + shuffled[walls : walls + count] * length
    grid = make_grid(BEGIN, BEGIN + num_slots * length, length, count, PAGE)
    assert grid is not None
    return grid, rows, np.stack([wall_at, wall_size], axis=1)


@kernels_only
@pytest.mark.parametrize("per_page", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("walls", [0, 5])
def test_the_kernel_matches_the_reference(device, rng, per_page, walls):
    moved = 0
    for occupied in (0.1, 0.5, 0.9):
        num_slots = max(5 * per_page, 200 // per_page * per_page)
        grid, rows, wall_rows = make_rows(rng, num_slots, per_page, occupied, walls)
        moved += check_kernel(device, grid, rows, wall_rows)
    assert moved > 0 or per_page == 1


@kernels_only
def test_more_rows_and_slots_than_threads(device, rng):
    """Every prefix sum takes several rounds; a wall covers thousands of slots."""
    grid, rows, walls = make_rows(rng, 32768, 4, 0.15, 3)
    clear = rows[(rows < BEGIN + 9000 * grid.slot_bytes) | (rows > BEGIN + 16000 * grid.slot_bytes)]
    walls = np.append(walls, [[BEGIN + 9001 * grid.slot_bytes, 6998 * grid.slot_bytes]], axis=0)
    grid = grid._replace(num_buffers=np.count_nonzero(clear))
    assert fits(grid, len(clear), len(walls))
    assert check_kernel(device, grid, clear, walls) > 1000


@kernels_only
def test_the_kernel_rejects_what_the_reference_rejects(device, rng):
    grid, rows, walls = make_rows(rng, 160, 16, 0.5, 0)
    rows[rows.nonzero()[0][3]] += 512
    assert check_kernel(device, grid, rows, walls, fits=False) == -1
    few = rows * (np.arange(len(rows)) == rows.nonzero()[0][0])
    assert check_kernel(device, grid._replace(num_buffers=1), few, walls) == 0


def move_bytes(device: str, rng: np.random.Generator, blocks: int) -> None:
    """Plans and copies in two launches; checks all bytes of all slots."""
    grid, rows, walls = make_rows(rng, 640, 64, 0.4, 3)
    size = grid.slot_bytes
    before = rng.integers(0, 256, (grid.num_slots, size)).astype(np.uint8)
    (memory,) = to_device(device, before.copy())
    begin = memory.ctypes.data if device != "gpu" else memory.data.ptr
    at = np.where(rows, rows - BEGIN + begin, 0)
    walls[:, 0] += begin - BEGIN
    grid = grid._replace(begin=begin)
    request = request_of(grid, len(at), len(walls))
    table, targets = np.zeros((len(at) + 1, 3), np.int64), np.zeros((len(at), 2), np.int32)
    count, result = np.zeros(1, np.int32), np.zeros(1, np.int32)
    arrays = to_device(device, request, at, walls, table, count, result, targets)
    load_kernel(slot_planner_spec())((1,), arrays)
    copy = load_kernel(plan_batched_copy(ordered=False, planned=True))
    copy((blocks,), (NULL, arrays[3], arrays[4], np.int32(0)), reachable=(memory,))
    plan = plan_slots(grid, at[at > 0], walls[:, 0], walls[:, 1])
    assert plan is not None
    after = to_host(memory)
    slots = (plan.target - begin) // size
    np.testing.assert_array_equal(after[slots], before[(plan.source - begin) // size])
    untouched = np.ones(len(before), bool)
    untouched[slots[plan.moved]] = False
    np.testing.assert_array_equal(after[untouched], before[untouched])


@kernels_only
@pytest.mark.parametrize("blocks", [1, 7, 1000])
def test_the_copies_follow_the_plan(device, rng, blocks):
    """With fewer thread blocks than tiles, and with more."""
    move_bytes(device, rng, blocks)


@pytest.mark.parametrize("arch", DEFAULT_ARCHS)
def test_the_kernel_compiles(tmp_path, monkeypatch, arch):
    monkeypatch.setenv("CUKIT_CACHE_DIR", str(tmp_path))
    info = compile_kernel(slot_planner_spec(), arch).info
    assert info.spill_store_bytes == info.spill_load_bytes == 0


@pytest.mark.parametrize("per_page", [1, 4, 64])
@pytest.mark.parametrize("occupied", [0.07, 0.5, 0.95, 1.0])
def test_the_holes_of_a_grid(rng: np.random.Generator, per_page: int, occupied: float) -> None:
    """measure_slots gives the result of measuring the holes between sorted buffers."""
    grid, rows, _ = make_rows(rng, 320, per_page, occupied, 0)
    address = rows[rows > 0]
    sizes = np.full(len(address), grid.slot_bytes)
    pieces = Pieces(
        columns(BEGIN), columns(grid.end), np.sort(address), sizes, columns(), columns()
    )
    paging = Paging(PAGE, 3 * PAGE, remap=True, large_pages=1, large_at=columns())
    assert measure_slots(grid, address, paging) == measure(*pieces.free, paging)
