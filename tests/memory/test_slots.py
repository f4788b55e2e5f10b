"""Compaction plans for buffers of one size, against the general planner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cukit.memory.bookkeeping.compaction import Pieces, plan_compaction
from cukit.memory.bookkeeping.slots import LEAST_GAIN, plan_slots

PAGE = 256 << 10
BEGIN = 7 * PAGE
MOVABLE, FREE, WALL = range(3)


def columns(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def pages_in_use(address: np.ndarray, size: int) -> set[int]:  # type: ignore[type-arg]
    return set(((address - BEGIN) // PAGE).tolist()) | set(
        ((address - BEGIN + size - 1) // PAGE).tolist()
    )


@settings(max_examples=200, deadline=None)
@given(
    slots=st.lists(st.sampled_from([MOVABLE, FREE, FREE, WALL]), min_size=1, max_size=160),
    per_page=st.sampled_from([1, 2, 4, 16]),
    few_walls=st.booleans(),
    whole=st.booleans(),
    seed=st.integers(0, 9),
)
def test_as_good_as_the_general_plan(
    slots: list[int], per_page: int, seed: int, *, few_walls: bool, whole: bool
) -> None:
    """As many pages become free by as many moves; no move writes where anything is."""
    length = PAGE // per_page
    slots += [FREE] * (-len(slots) % per_page)
    if few_walls:
        slots = [FREE if kind == WALL and number % 7 else kind for number, kind in enumerate(slots)]
    end = BEGIN + len(slots) * length
    at = BEGIN + length * np.arange(len(slots))
    kinds = np.array(slots)
    movable, wall = at[kinds == MOVABLE], at[kinds == WALL]
    rng = np.random.default_rng(seed)
    wall_at = wall if whole else wall + rng.integers(0, 4, len(wall)) * (length // 8)
    wall_size = np.full(len(wall), length if whole else length // 2)
    shuffled = rng.permutation(movable)
    sizes = np.full(len(movable), length)
    plan = plan_slots(BEGIN, end, shuffled, sizes, rng.permutation(wall_at), wall_size, PAGE)
    pieces = Pieces(columns(BEGIN), columns(end), movable, sizes, wall_at, wall_size)
    general = plan_compaction(pieces, PAGE, remap=True)
    if plan is None:
        return
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
    assert len(after - pages_in_use(wall, length)) <= len(before) - LEAST_GAIN
    if not whole:  # the general planner also uses holes that are no slots
        return
    assert plan.bytes_moved == general.bytes_moved
    assert len(after | pages_in_use(wall, length)) == len(
        pages_in_use(general.target, length) | pages_in_use(wall, length)
    )


@pytest.mark.parametrize(
    ("address", "size"),
    [
        ([], []),
        ([0, PAGE, 2 * PAGE], [PAGE // 2, PAGE // 2, PAGE // 4]),  # two sizes
        ([0, PAGE + 512, 2 * PAGE], [PAGE // 2] * 3),  # not at a multiple
        ([0, PAGE, 2 * PAGE], [3 * PAGE // 8] * 3),
        ([0, 2 * PAGE, 4 * PAGE], [2 * PAGE] * 3),  # more than a page
        ([0, PAGE], [PAGE // 2] * 2),  # one page becomes free
        ([0, PAGE, 2 * PAGE], [512] * 3),  # nearly empty
    ],
)
def test_what_is_left_to_the_general_planner(address: list[int], size: list[int]) -> None:
    at = BEGIN + columns(*address)
    none = columns()
    assert plan_slots(BEGIN, BEGIN + 6 * PAGE, at, columns(*size), none, none, PAGE) is None


def test_pages_that_are_no_power_of_two_are_left_to_the_general_planner() -> None:
    address = BEGIN + 4096 * np.arange(0, 30, 5, dtype=np.int64)
    size = np.full(len(address), 4096)
    nothing = columns()
    assert plan_slots(BEGIN, BEGIN + 30 * 4096, address, size, nothing, nothing, 12288) is None
