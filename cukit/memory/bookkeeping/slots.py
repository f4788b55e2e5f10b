"""Plans the moves of a compaction of buffers of one size, on a grid of slots of that size.

Pages are chosen as in compaction.py: those with anything unmovable stay in use, then the fullest,
until all buffers fit; the buffers on other pages move into free slots of the chosen pages. With
equal sizes any free slot is as good as any other, so nothing is sorted by address and no hole is
searched for: a few passes over boolean arrays compute the plan. kernels_cu/memory/plan_slots.cu
computes the same plan on the GPU, so that the copies start without a round trip to the host.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cukit.memory.bookkeeping.compaction import Ints, Plan
from cukit.memory.slot_grid import MIN_GAIN, Grid

Flags = npt.NDArray[np.bool_]


def plan_slots(grid: Grid, address: Ints, fixed: Ints, fixed_size: Ints) -> Plan | None:
    """Plans a compaction for a pool that can remap pages.

    Args:
        grid: of the only reservation.
        address: [buffers], of the movable buffers, in any order.
        fixed: [spans], which no buffer can move to: immovable and unmapped memory, in any order.
        fixed_size: [spans].

    Returns:
        The plan, with `source` in the order of `address`. None if it would free fewer than
        MIN_GAIN pages, or if a buffer is not at a multiple of its size.
    """
    shift, per_page, length = grid.slot_shift, grid.per_page, grid.slot_bytes
    count, number = grid.num_buffers, grid.num_slots
    offset = address - grid.begin
    if int(np.bitwise_or.reduce(offset)) & (length - 1):
        return None
    slot = offset >> shift
    page = slot >> grid.page_shift
    taken = np.zeros(number, bool)
    taken[slot] = True
    held = np.bincount(page, minlength=grid.num_pages)
    kept = np.zeros(len(held), bool)
    if len(fixed):
        covered = _covered(number, fixed - grid.begin, fixed_size, length)
        taken |= covered
        blocked = np.add.reduce(covered.reshape(-1, per_page), axis=1, dtype=np.int64)
        room = per_page - blocked
        np.greater(blocked, 0, out=kept)
        rank = -held
        rank[kept] -= per_page + 1
        order = rank.argsort(kind="stable")
        room = room[order]
        kept[order] |= room.cumsum() - room < count
    else:
        kept[(-held).argsort(kind="stable")[: -(-count // per_page)]] = True
    left = np.logical_not(kept, out=kept)
    if np.count_nonzero(held[left]) < MIN_GAIN:
        return None
    moving = left[page].nonzero()[0]
    taken.reshape(-1, per_page)[left] = True
    free = np.logical_not(taken, out=taken).nonzero()[0][: len(moving)]
    to = free << shift
    to += grid.begin
    step = np.empty((len(moving), 3), np.int64)
    step[:, 0] = to
    step[:, 1] = address[moving]
    step[:, 2] = length
    target = address.copy()
    target[moving] = to
    return Plan(address, target, [step])


def _covered(number: int, at: Ints, size: Ints, length: int) -> Flags:
    """For each slot, whether any of these spans overlaps it."""
    change = np.zeros(number + 1, np.int64)
    first, last = at // length, -(-(at + size) // length)
    inside = first < number
    np.add.at(change, first[inside], 1)
    np.add.at(change, np.minimum(last[inside], number), -1)
    covered: Flags = change[:-1].cumsum() > 0
    return covered
