"""Plans the moves of a compaction: pure arithmetic on addresses.

First the planner chooses the pages that stay in use: those that hold anything unmovable, then the
fullest, until all movable buffers fit into them (if pages cannot be remapped: the lowest addresses,
so that the hole grows at the end). Buffers on any other page move into holes of the chosen pages:
best fit, largest buffer first. These moves write to free memory only, so one batch copies them all.

Buffers that fit no hole slide down over the gap before them, in address order. Source and target of
a slide overlap, so it is split into steps no longer than the gap.

A pool may have a hundred thousand buffers, and the device copies a thousand in half a millisecond,
the time of a hundred NumPy calls. All work per buffer is therefore array code, in few calls.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cukit.memory.batched_copy import Moves

Ints = npt.NDArray[np.int64]

MIN_GAP = 64 << 10
"""Bytes. A buffer does not slide over a smaller gap."""
MAX_STEPS = 64
"""A buffer that would need more steps does not slide."""
MANY_ALIKE = 32
"""From this number on, buffers of one size are placed by array code."""

MOVABLE, FREE, IMMOVABLE = range(3)
"""Kinds of bytes. Immovable ones do not move, and nothing moves into them."""

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Pieces:
    """The mapped bytes of all reservations. All arrays are [number], in address order. Memory that
    is neither movable nor immovable is free."""

    begin: Ints
    end: Ints
    """Stretches of mapped addresses, each in one reservation. Reservations may be adjacent, but no
    buffer spans two of them."""
    movable: Ints
    movable_size: Ints
    immovable: Ints
    immovable_size: Ints

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]]) -> Pieces:
        """From rows of (address, size, kind, reservation) in address order."""
        address, size, kind, part = np.asarray(rows, np.int64).reshape(-1, 4).T
        end = address + size
        apart = np.ones(len(address) + 1, bool)
        apart[1:-1] = (end[:-1] != address[1:]) | (part[:-1] != part[1:])
        groups = (column[kind == one] for one in (MOVABLE, IMMOVABLE) for column in (address, size))
        return cls(address[apart[:-1]], end[apart[1:]], *groups)

    @cached_property
    def free(self) -> tuple[Ints, Ints]:
        """Addresses and sizes of the free pieces, each as large as possible."""
        return self.free_beside(self.movable)

    def free_beside(self, movable: Ints) -> tuple[Ints, Ints]:
        """`free` with the buffers at these addresses, which need not ascend."""
        low = np.concatenate(
            (self.begin, self.immovable + self.immovable_size, movable + self.movable_size)
        )
        high = np.concatenate((self.end, self.immovable, movable))
        # Once sorted, low[i] and high[i] bound the gaps between used memory and borders.
        low.sort()
        high.sort()
        high -= low
        some = high.nonzero()[0]
        return low[some], high[some]

    def runs(self) -> tuple[Ints, Ints]:
        """Starts and ends of the stretches between immovable pieces."""
        low = np.sort(np.concatenate((self.begin, self.immovable + self.immovable_size)))
        high = np.sort(np.concatenate((self.end, self.immovable)))
        return low[high > low], high[high > low]


class Pages:
    """The pages of some pieces in address order; counts bytes per page."""

    def __init__(self, pieces: Pieces, page_bytes: int) -> None:
        first, last = pieces.begin // page_bytes, -(-pieces.end // page_bytes)
        if len(first) == 1:
            self.number: Ints = np.arange(first[0], last[0])
        else:
            if (first[1:] < last[:-1]).any():  # segments need not be page-aligned
                first[1:] = np.maximum(first[1:], np.maximum.accumulate(last)[:-1])
            counts = np.maximum(last - first, 0)
            before = np.cumsum(counts) - counts
            self.number = np.repeat(first - before, counts) + np.arange(counts.sum())
        """Address / page_bytes."""
        self.page_bytes = page_bytes
        self._bounds = np.concatenate((self.number, self.number + 1)) * page_bytes

    def bytes_of(self, address: Ints, size: Ints) -> Ints:
        """Bytes per page of pieces that are in address order and do not overlap."""
        if not len(address):
            return np.zeros(len(self.number), np.int64)
        total, ends = np.zeros(len(size) + 1, np.int64), np.zeros(len(size) + 1, np.int64)
        size.cumsum(out=total[1:])
        np.add(address, size, out=ends[1:])
        at = address.searchsorted(self._bounds)
        below = total[at] - np.maximum(ends[at] - self._bounds, 0)
        found: Ints = below[len(self.number) :] - below[: len(self.number)]
        return found

    def joined(self, chosen: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """Starts and ends of the runs of chosen pages; at least one page must be chosen."""
        number = self.number[chosen]
        breaks = (number[1:] - number[:-1] != 1).nonzero()[0]
        first = np.concatenate((number[:1], number[breaks + 1]))
        last = np.concatenate((number[breaks], number[-1:]))
        return first * self.page_bytes, (last + 1) * self.page_bytes


@dataclass
class Plan:
    """New addresses of buffers, and the copies that move them there."""

    source: Ints = field(default_factory=lambda: _NONE)
    target: Ints = field(default_factory=lambda: _NONE)
    """Old and new addresses of all buffers."""
    steps: list[Moves] = field(default_factory=list)
    """Batches in order; inside a batch, no destination overlaps a source."""

    @cached_property
    def moved(self) -> Ints:
        """Indices of the moved buffers, ascending."""
        found: Ints = (self.target != self.source).nonzero()[0]
        return found

    @property
    def relocations(self) -> dict[int, int]:
        """New address by old address of the moved buffers."""
        source, target = self.source[self.moved], self.target[self.moved]
        return dict(zip(source.tolist(), target.tolist(), strict=True))

    @cached_property
    def bytes_moved(self) -> int:
        return sum(int(step[:, 2].sum()) for step in self.steps)


def plan_compaction(pieces: Pieces, page_bytes: int, *, remap: bool) -> Plan:
    """Plans a compaction. `remap`: the pool can remap pages, so free pages need not be adjacent."""
    movable = pieces.movable
    unchanged = Plan(movable, movable)
    if not len(movable) or not len(pieces.free[0]):
        return unchanged
    plan = Plan(movable, movable.copy())
    found = _evacuate(pieces, plan.target, page_bytes, remap=remap)
    if len(found.sources):
        step = np.empty((len(found.sources), 3), np.int64)
        step[:, 0], step[:, 1] = plan.target[found.sources], movable[found.sources]
        step[:, 2] = pieces.movable_size[found.sources]
        plan.steps.append(step)
    if found.stuck:
        _slide(pieces, plan.target, plan)
    if not plan.steps:
        return unchanged
    before = _largest_hole_bytes(*pieces.free, page_bytes, remap=remap)
    # Evacuated pages are wholly free, which usually decides without measuring all holes.
    if found.freed <= before:
        after = _largest_hole_bytes(*pieces.free_beside(plan.target), page_bytes, remap=remap)
        if after <= before:
            return unchanged
    return plan


def _largest_hole_bytes(address: Ints, size: Ints, page_bytes: int, *, remap: bool) -> int:
    """Bytes of the largest hole in free memory; with `remap`, of the largest after remapping."""
    best = int(size.max(initial=0))
    if not remap:
        return best
    pages = (address + size) // page_bytes + -address // page_bytes
    return max(best, int(pages[pages > 0].sum()) * page_bytes)


class Evacuation(NamedTuple):
    """The buffers that leave their pages."""

    sources: Ints
    """Their indices."""
    stuck: bool
    """Whether further buffers have to leave their pages but fit no hole."""
    freed: int
    """Bytes of wholly free pages afterwards, if the pages can be remapped; a lower bound."""


def _evacuate(pieces: Pieces, target: Ints, page_bytes: int, *, remap: bool) -> Evacuation:
    """Sets targets in holes of the kept pages for the buffers that are not on kept pages."""
    pages = Pages(pieces, page_bytes)
    kept, freed = _pages_kept(pieces, pages, remap=remap)
    low, high = pages.joined(kept)
    movable = pieces.movable
    inside = low.searchsorted(movable, "right") - 1
    sources = ((inside < 0) | (movable + pieces.movable_size > high[inside])).nonzero()[0]
    if not len(sources):
        return Evacuation(sources, False, 0)
    sizes = pieces.movable_size[sources]
    distinct = [(int(sizes[0]), len(sizes))]
    if sizes.min() != sizes.max():
        order = (-sizes).argsort(kind="stable")
        sources, sizes = sources[order], sizes[order]
        starts = np.flatnonzero(np.append(True, sizes[1:] != sizes[:-1]))
        counts = np.diff(np.append(starts, len(sizes)))
        distinct = list(zip(sizes[starts].tolist(), counts.tolist(), strict=True))
    address, size = _common(*pieces.free, low, high)
    order = size.argsort(kind="stable")
    address, size = address[order], size[order]
    placed = 0
    to = np.empty(len(sources), np.int64)
    fits = np.ones(len(sources), bool)
    while distinct and distinct[0][1] >= MANY_ALIKE:
        length, count = distinct.pop(0)
        found, holes = _take_many(address, size, length, count)
        to[placed : placed + len(found)] = found
        fits[placed + len(found) : placed + count] = False
        placed += count
        if distinct:
            address, size = holes()
    if distinct:
        rest = list(zip(size.tolist(), address.tolist(), strict=True))
        for length, count in distinct:
            taken = _take(rest, length, count)
            to[placed : placed + len(taken)] = taken
            fits[placed + len(taken) : placed + count] = False
            placed += count
    stuck = not fits.all()
    if stuck:
        sources, to, freed = sources[fits], to[fits], 0
    target[sources] = to
    return Evacuation(sources, stuck, freed)


def _common(address: Ints, size: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Addresses and sizes of the intersection of two lists of stretches."""
    end = address + size
    first = high.searchsorted(address, "right")
    counts = np.maximum(low.searchsorted(end) - first, 0)
    of = np.arange(len(address)).repeat(counts)
    run = np.arange(len(of)) - (counts.cumsum() - counts - first).repeat(counts)
    start = np.maximum(address[of], low[run])
    return start, np.minimum(end[of], high[run]) - start


def _pages_kept(pieces: Pieces, pages: Pages, *, remap: bool) -> tuple[npt.NDArray[np.bool_], int]:
    """For each page, whether it stays in use; and the bytes of the other pages if they can be
    remapped."""
    page = pages.page_bytes
    moving = pages.bytes_of(pieces.movable, pieces.movable_size)
    if ((pieces.begin | pieces.end) % page).any():
        room = pages.bytes_of(pieces.begin, pieces.end - pieces.begin)
    else:
        room = np.full(len(pages.number), page)
    whole = room == page
    needed = pieces.movable_size.sum()
    kept = np.zeros(len(room), bool)
    if not remap:
        room -= pages.bytes_of(pieces.immovable, pieces.immovable_size)
        kept |= room.cumsum() - room < needed
        return kept, 0
    rank = -moving
    if len(pieces.immovable):
        immovable = pages.bytes_of(pieces.immovable, pieces.immovable_size)
        room -= immovable
        rank[immovable > 0] -= page + 1
        kept |= immovable > 0
    order = rank.argsort(kind="stable")
    room = room[order]
    kept[order] |= room.cumsum() - room < needed
    return kept, int((whole & ~kept).sum()) * page


def _take_many(
    address: Ints, size: Ints, length: int, count: int
) -> tuple[Ints, Callable[[], tuple[Ints, Ints]]]:
    """`_take` for many blocks of one size: returns their addresses, and a function that returns the
    remaining holes. Holes are sorted by size, then address."""
    first = int(size.searchsorted(length))
    each = size[first:] // length
    upto = each.cumsum()
    holes = int(upto.searchsorted(count)) + 1  # number of holes needed
    each, upto = each[:holes], upto[:holes]
    number = np.arange(len(each)).repeat(each)[:count]
    within = np.arange(len(number)) - (upto - each)[number]
    found = address[first : first + holes][number] + within * length

    def rest() -> tuple[Ints, Ints]:
        used = np.bincount(number, minlength=len(each)) * length
        left_at, left = address.copy(), size.copy()
        left_at[first : first + holes] += used
        left[first : first + holes] -= used
        some = np.flatnonzero(left)
        left_at, left = left_at[some], left[some]
        order = np.lexsort((left_at, left))
        return left_at[order], left[order]

    return found, rest


def _take(holes: list[tuple[int, int]], size: int, count: int) -> list[int]:
    """Addresses for up to `count` blocks of `size` bytes, best fit; `holes` are sorted.

    Each hole is filled before the next one is taken: its remainder is always the best fit.
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
        if gap < MIN_GAP or size > gap * MAX_STEPS:
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
