"""Plans the moves of a compaction of buffers of one size, on a grid of slots of that size.

The rule is that of compaction.py: pages with anything unmovable stay in use, then the fullest,
until all buffers fit; the buffers of the other pages move into free slots of those. With equal
sizes any free slot is as good as any other, so nothing is sorted by address, no hole is searched,
and the copies start after two dozen NumPy calls. On a device that copies a gigabyte in half a
millisecond, each call counts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cukit.memory.bookkeeping.compaction import Ints, Plan

Flags = npt.NDArray[np.bool_]

LEAST_OCCUPIED = 1 / 16
"""The grid has at most 16 slots per buffer; sparser pools are planned by compaction.py."""

LEAST_GAIN = 2
"""Pages by which the wholly free ones must become more. Then the largest hole grows too: a hole
without whole pages is smaller than two."""


def plan_slots(
    begin: int,
    end: int,
    address: Ints,
    size: Ints,
    fixed: Ints,
    fixed_size: Ints,
    page_bytes: int,
) -> Plan | None:
    """Plans a compaction for a pool that can remap pages.

    Args:
        begin: of the only reservation, a multiple of the page.
        end: of what was ever mapped of it, likewise.
        address: [buffers], of the movable buffers, in any order.
        size: [buffers].
        fixed: [spans], where nothing can move to: walls and unmapped addresses, in any order.
        fixed_size: [spans].
        page_bytes: of a page.

    Returns:
        The plan, with `source` in the order of `address`. None if it would gain next to nothing, or
        unless pages are a power of two, and buffers of one size, a power of two of at most a page,
        at multiples of it.
    """
    count = len(address)
    length = int(size[0]) if count else 0
    if not length or length & (length - 1) or page_bytes & (page_bytes - 1) or length > page_bytes:
        return None
    if np.count_nonzero(size != length):
        return None
    shift = length.bit_length() - 1
    per_page = page_bytes >> shift
    number = (end - begin) >> shift
    if count < number * LEAST_OCCUPIED:
        return None
    offset = address - begin
    if int(np.bitwise_or.reduce(offset)) & (length - 1):
        return None
    slot = offset >> shift
    page = slot >> (per_page.bit_length() - 1)
    taken = np.zeros(number, bool)
    taken[slot] = True
    held = np.bincount(page, minlength=number // per_page)
    kept = np.zeros(len(held), bool)
    if len(fixed):
        walls = _covered(number, fixed - begin, fixed_size, length)
        taken |= walls
        blocked = np.add.reduce(walls.reshape(-1, per_page), axis=1, dtype=np.int64)
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
    if np.count_nonzero(held[left]) < LEAST_GAIN:
        return None
    moving = left[page].nonzero()[0]
    taken.reshape(-1, per_page)[left] = True
    free = np.logical_not(taken, out=taken).nonzero()[0][: len(moving)]
    to = free << shift
    to += begin
    step = np.empty((len(moving), 3), np.int64)
    step[:, 0] = to
    step[:, 1] = address[moving]
    step[:, 2] = length
    target = address.copy()
    target[moving] = to
    return Plan(address, target, [step])


def _covered(number: int, at: Ints, size: Ints, length: int) -> Flags:
    """Which of the slots any of these spans touches."""
    change = np.zeros(number + 1, np.int64)
    first, last = at // length, -(-(at + size) // length)
    inside = first < number
    np.add.at(change, first[inside], 1)
    np.add.at(change, np.minimum(last[inside], number), -1)
    covered: Flags = change[:-1].cumsum() > 0
    return covered
