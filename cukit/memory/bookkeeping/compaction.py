"""Plans the moves of a compaction: pure arithmetic on addresses.

First the planner chooses the pages that stay in use: those that hold anything unmovable, then the
fullest, until all movable buffers fit into them (if pages cannot be remapped: the lowest addresses,
so that the hole grows at the end). Buffers on any other page move into holes of the chosen pages:
best fit, largest buffer first. These moves write to free memory only, so one batch copies them all.

Buffers that fit no hole slide down over the gap before them, in address order. Source and target of
a slide overlap, so it is split into steps no longer than the gap.

There may be a hundred thousand buffers, and the device copies a thousand in half a millisecond, the
time of a hundred NumPy calls. So everything per buffer is array code, with few calls.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from cukit.memory.batched_copy import Moves

Ints = npt.NDArray[np.int64]

LEAST_GAP = 64 << 10
"""Buffers do not slide over gaps of fewer bytes."""
MOST_STEPS = 64
"""Buffers do not slide in more steps."""
MANY_ALIKE = 32
"""This many buffers of one size or more are placed by array code."""

MOVABLE, FREE, WALL = range(3)
"""Kinds of bytes. Walls do not move, and nothing moves into them."""

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Pieces:
    """The mapped bytes of all reservations. All arrays are [number], in address order. Memory that
    is neither movable nor wall is free."""

    begin: Ints
    end: Ints
    """Stretches of mapped addresses, each in one reservation. Reservations may be adjacent, but no
    buffer spans two of them."""
    movable: Ints
    movable_size: Ints
    wall: Ints
    wall_size: Ints

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]]) -> Pieces:
        """From rows of (address, size, kind, reservation) in address order."""
        address, size, kind, part = np.asarray(rows, np.int64).reshape(-1, 4).T
        end = address + size
        apart = np.ones(len(address) + 1, bool)
        apart[1:-1] = (end[:-1] != address[1:]) | (part[:-1] != part[1:])
        groups = (column[kind == one] for one in (MOVABLE, WALL) for column in (address, size))
        return cls(address[apart[:-1]], end[apart[1:]], *groups)

    @cached_property
    def free(self) -> tuple[Ints, Ints]:
        """Addresses and sizes of the free pieces, each as large as possible."""
        return self.free_beside(self.movable)

    def free_beside(self, movable: Ints) -> tuple[Ints, Ints]:
        """`free` with the buffers at these addresses, which need not ascend."""
        starts = self.begin, self.wall + self.wall_size, movable + self.movable_size
        ends = self.end, self.wall, movable
        # Sorted, they pair up to the gaps between walls, buffers and borders.
        low, high = np.sort(np.concatenate(starts)), np.sort(np.concatenate(ends))
        size = high - low
        some = size > 0
        return low[some], size[some]

    def runs(self) -> tuple[Ints, Ints]:
        """Starts and ends of the stretches between walls."""
        low = np.sort(np.concatenate((self.begin, self.wall + self.wall_size)))
        high = np.sort(np.concatenate((self.end, self.wall)))
        return low[high > low], high[high > low]


class Pages:
    """The pages of some pieces in address order; counts bytes per page."""

    def __init__(self, pieces: Pieces, page_bytes: int) -> None:
        first, last = pieces.begin // page_bytes, -(-pieces.end // page_bytes)
        if (first[1:] < last[:-1]).any():  # segments need not be page-aligned
            first[1:] = np.maximum(first[1:], np.maximum.accumulate(last)[:-1])
        counts = np.maximum(last - first, 0)
        before = np.cumsum(counts) - counts
        self.number: Ints = np.repeat(first - before, counts) + np.arange(counts.sum())
        """Address / page_bytes."""
        self.page_bytes = page_bytes
        self._bounds = np.concatenate((self.number, self.number + 1)) * page_bytes

    def bytes_of(self, address: Ints, size: Ints) -> Ints:
        """Bytes per page of pieces that are in address order and do not overlap."""
        if not len(address):
            return np.zeros(len(self.number), np.int64)
        end = address + size
        total, ends = np.zeros(len(end) + 1, np.int64), np.zeros(len(end) + 1, np.int64)
        np.cumsum(size, out=total[1:])
        ends[1:] = end
        at = np.searchsorted(address, self._bounds)
        below = total[at] - np.maximum(ends[at] - self._bounds, 0)
        found: Ints = below[len(self.number) :] - below[: len(self.number)]
        return found

    def joined(self, chosen: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """Starts and ends of the runs of chosen pages."""
        number = self.number[chosen]
        breaks = np.flatnonzero(np.diff(number) != 1)
        first = np.concatenate((number[:1], number[breaks + 1]))
        last = np.concatenate((number[breaks], number[-1:]))
        return first * self.page_bytes, (last + 1) * self.page_bytes


@dataclass
class Plan:
    """New addresses of buffers, and the copies that move them there."""

    moved: Ints = field(default_factory=lambda: _NONE)
    """Indices of the moved buffers, ascending."""
    source: Ints = field(default_factory=lambda: _NONE)
    target: Ints = field(default_factory=lambda: _NONE)
    """Old and new addresses."""
    steps: list[Moves] = field(default_factory=list)
    """Batches in order; inside a batch, no destination overlaps a source."""

    @property
    def relocations(self) -> dict[int, int]:
        """New address by old address."""
        return dict(zip(self.source.tolist(), self.target.tolist(), strict=True))

    @cached_property
    def bytes_moved(self) -> int:
        return sum(int(step[:, 2].sum()) for step in self.steps)


def plan_compaction(pieces: Pieces, page_bytes: int, *, remap: bool) -> Plan:
    """Plans a compaction. `remap`: the pool can remap pages, so free pages need not be adjacent."""
    if not len(pieces.movable) or not len(pieces.free[0]):
        return Plan()
    plan = Plan()
    target = pieces.movable.copy()
    sources, stuck = _evacuate(pieces, target, page_bytes, remap=remap)
    sources = sources[target[sources] != pieces.movable[sources]]
    if len(sources):
        step = np.empty((len(sources), 3), np.int64)
        step[:, 0], step[:, 1] = target[sources], pieces.movable[sources]
        step[:, 2] = pieces.movable_size[sources]
        plan.steps.append(step)
    if stuck:
        _slide(pieces, target, plan)
    if not plan.steps:
        return Plan()
    worth = _worth(*pieces.free_beside(target), page_bytes, remap=remap)
    if worth <= _worth(*pieces.free, page_bytes, remap=remap):
        return Plan()
    plan.moved = np.flatnonzero(target != pieces.movable)
    plan.source, plan.target = pieces.movable[plan.moved], target[plan.moved]
    return plan


def _worth(address: Ints, size: Ints, page_bytes: int, *, remap: bool) -> int:
    """The largest hole in free memory, or the largest that remapping can make of it."""
    best = int(size.max(initial=0))
    if not remap:
        return best
    pages = (address + size) // page_bytes + -address // page_bytes
    return max(best, int(pages[pages > 0].sum()) * page_bytes)


def _evacuate(pieces: Pieces, target: Ints, page_bytes: int, *, remap: bool) -> tuple[Ints, bool]:
    """Sets targets in holes of the kept pages. Returns the buffers that are not on kept pages,
    largest first, and whether one of them fits no hole."""
    pages = Pages(pieces, page_bytes)
    low, high = pages.joined(_pages_kept(pieces, pages, remap=remap))
    inside = np.searchsorted(low, pieces.movable, "right") - 1
    end = pieces.movable + pieces.movable_size
    sources = np.flatnonzero((inside < 0) | (end > high[inside]))
    if not len(sources):
        return sources, False
    sizes = pieces.movable_size[sources]
    if sizes.min() != sizes.max():
        order = np.argsort(-sizes, kind="stable")
        sources, sizes = sources[order], sizes[order]
    starts = np.flatnonzero(np.append(True, sizes[1:] != sizes[:-1]))
    distinct = list(
        zip(sizes[starts].tolist(), np.diff(np.append(starts, len(sizes))).tolist(), strict=True)
    )
    address, size = _common(*pieces.free, low, high)
    order = np.argsort(size, kind="stable")
    address, size = address[order], size[order]
    begin, stuck = 0, False
    while distinct and distinct[0][1] >= MANY_ALIKE:
        length, count = distinct.pop(0)
        found, address, size = _take_many(address, size, length, count)
        target[sources[begin : begin + len(found)]] = found
        begin += count
        stuck |= len(found) < count
    if distinct:
        holes = list(zip(size.tolist(), address.tolist(), strict=True))
        for length, count in distinct:
            taken = _take(holes, length, count)
            target[sources[begin : begin + len(taken)]] = taken
            begin += count
            stuck |= len(taken) < count
    return sources, stuck


def _common(address: Ints, size: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Addresses and sizes of the intersection of two lists of stretches."""
    end = address + size
    first = np.searchsorted(high, address, "right")
    counts = np.maximum(np.searchsorted(low, end) - first, 0)
    of = np.repeat(np.arange(len(address)), counts)
    run = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    start = np.maximum(address[of], low[run])
    return start, np.minimum(end[of], high[run]) - start


def _pages_kept(pieces: Pieces, pages: Pages, *, remap: bool) -> npt.NDArray[np.bool_]:
    """For each page, whether it stays in use."""
    moving = pages.bytes_of(pieces.movable, pieces.movable_size)
    room = pages.bytes_of(pieces.begin, pieces.end - pieces.begin)
    kept = np.zeros(len(room), bool)
    if not remap:
        room -= pages.bytes_of(pieces.wall, pieces.wall_size)
        kept |= np.cumsum(room) - room < moving.sum()
        return kept
    rank = -moving
    if len(pieces.wall):
        walls = pages.bytes_of(pieces.wall, pieces.wall_size)
        room -= walls
        rank[walls > 0] -= pages.page_bytes + 1
        kept |= walls > 0
    order = np.argsort(rank, kind="stable")
    room = room[order]
    kept[order] |= np.cumsum(room) - room < moving.sum()
    return kept


def _take_many(address: Ints, size: Ints, length: int, count: int) -> tuple[Ints, Ints, Ints]:
    """`_take` for many blocks of one size: returns their addresses and the remaining holes. Holes
    are sorted by size, then address."""
    first = int(np.searchsorted(size, length))
    each = size[first:] // length
    upto = np.cumsum(each)
    holes = int(np.searchsorted(upto, count)) + 1  # number of holes needed
    each, upto = each[:holes], upto[:holes]
    number = np.repeat(np.arange(len(each)), each)[:count]
    within = np.arange(len(number)) - (upto - each)[number]
    found = address[first : first + holes][number] + within * length
    used = np.bincount(number, minlength=len(each)) * length
    address, size = address.copy(), size.copy()
    address[first : first + holes] += used
    size[first : first + holes] -= used
    some = np.flatnonzero(size)
    address, size = address[some], size[some]
    order = np.lexsort((address, size))
    return found, address[order], size[order]


def _take(holes: list[tuple[int, int]], size: int, count: int) -> list[int]:
    """Addresses for up to `count` blocks of `size` bytes, best fit; `holes` are sorted.

    Each hole is filled before the next one is taken: its rest is always the best fit.
    """
    found: list[int] = []
    while len(found) < count:
        position = bisect_left(holes, (size,))
        if position == len(holes):
            break
        length, address = holes.pop(position)
        each = min(length // size, count - len(found))
        found += [address + n * size for n in range(each)]
        if each * size < length:
            insort(holes, (length - each * size, address + each * size))
    return found


def _slide(pieces: Pieces, target: Ints, plan: Plan) -> None:
    """Adds slides to a plan after evacuation."""
    movable = np.argsort(target)
    starts = target[movable].tolist()
    sizes = pieces.movable_size[movable].tolist()
    by_run = []
    for start, end in zip(*(bound.tolist() for bound in pieces.runs()), strict=True):
        inside = slice(bisect_left(starts, start), bisect_left(starts, end))
        steps, arrived = _slide_run(start, starts[inside], sizes[inside])
        by_run.append(steps)
        target[movable[inside]] = arrived
    for together in zip_longest(*by_run, fillvalue=()):
        plan.steps.append(np.array([move for step in together for move in step], np.int64))


def _slide_run(
    start: int, addresses: Sequence[int], sizes: Sequence[int]
) -> tuple[list[list[tuple[int, int, int]]], list[int]]:
    """Slides the buffers of one run down, lowest first; returns the steps and the new addresses.

    Destinations ascend and stay below their sources. So a copy can join a step as long as its
    destination ends below the first byte that the step reads.
    """
    steps: list[list[tuple[int, int, int]]] = []
    arrived = []
    free = start
    for address, size in zip(addresses, sizes, strict=True):
        gap = address - free
        if gap < LEAST_GAP or size > gap * MOST_STEPS:
            arrived.append(address)
            free = address + size
            continue
        arrived.append(free)
        for offset in range(0, size, gap):
            length = min(gap, size - offset)
            move = (free + offset, address + offset, length)
            if steps and move[0] + length <= steps[-1][0][1]:
                steps[-1].append(move)
            else:
                steps.append([move])
        free += size
    return steps, arrived
