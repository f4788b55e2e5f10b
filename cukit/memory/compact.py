"""Plans how to move buffers so that free memory becomes whole: pure arithmetic on addresses.

First the pages are chosen that stay in use: those that hold anything unmovable, then the fullest,
until what can move has room in them (where pages cannot be remapped: the lowest addresses, so that
the hole grows at the end). Buffers on any other page move into holes of the chosen ones, best fit,
largest buffer first. These moves write to free memory only, so one batch copies them all.

Buffers that fit no hole slide: each one down over the gap before it, in address order. A slide
overlaps itself, so it is cut into steps no longer than the gap.

There may be a hundred thousand buffers and the copy takes milliseconds, so whatever looks at each
of them is array code.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cukit.memory.provider import Moves

Ints = npt.NDArray[np.int64]

LEAST_GAP = 64 << 10
"""Bytes; a buffer does not slide over less."""
MOST_STEPS = 64
"""Nor in more steps than this."""

MOVABLE, FREE, WALL = range(3)
"""Kinds of bytes. Walls neither move nor take anything."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """Neighbouring bytes as a plan sees them, in address order; all arrays are [number]."""

    address: Ints
    size: Ints
    kind: Ints
    part: Ints
    """Of which reservation. Two of them may lie side by side, and still no buffer lies on both."""

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]]) -> Pieces:
        """From (address, size, kind, part) of each."""
        table = np.asarray(rows, np.int64).reshape(-1, 4).T
        return cls(*table)

    @property
    def end(self) -> Ints:
        return self.address + self.size


class OnPages(NamedTuple):
    """Pieces cut at the borders of pages, in address order; all arrays are [number]."""

    piece: Ints
    page: Ints
    """Address over the size of a page."""
    address: Ints
    size: Ints


def cut_at_pages(pieces: Pieces, page_bytes: int) -> OnPages:
    """Each page that each piece touches, with the bytes of the piece on it."""
    first, last = pieces.address // page_bytes, (pieces.end - 1) // page_bytes
    counts = last - first + 1
    piece = np.repeat(np.arange(len(counts)), counts)
    page = first[piece] + np.arange(len(piece)) - (np.cumsum(counts) - counts)[piece]
    low = np.maximum(pieces.address[piece], page * page_bytes)
    high = np.minimum(pieces.end[piece], (page + 1) * page_bytes)
    return OnPages(piece, page, low, high - low)


@dataclass
class Plan:
    """Where buffers go, and the copies that bring them there."""

    source: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    target: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """Old and new address of each, in the order of the old ones."""
    steps: list[Moves] = field(default_factory=list)
    """Batches, one after the other; inside one, no destination overlaps a source."""

    @property
    def relocations(self) -> dict[int, int]:
        """New address by old address."""
        return dict(zip(self.source.tolist(), self.target.tolist(), strict=True))

    @property
    def bytes_moved(self) -> int:
        return sum(int(step[:, 2].sum()) for step in self.steps)


def plan_compaction(pieces: Pieces, page_bytes: int, *, remap: bool) -> Plan:
    """Plans for pieces in address order; unmapped addresses may be left out between them.

    `remap`: free pages need not lie side by side, for the pool can remap them.
    """
    if not (pieces.kind == MOVABLE).any():
        return Plan()
    plan = Plan()
    target = pieces.address.copy()
    stuck = _evacuate(pieces, target, page_bytes, remap=remap)
    evacuated = target != pieces.address
    if evacuated.any():
        columns = target[evacuated], pieces.address[evacuated], pieces.size[evacuated]
        plan.steps.append(np.stack(columns, axis=1))
    if stuck:
        _slide(pieces, target, plan)
    moved = target != pieces.address
    worth = _whole(pieces, target, page_bytes, remap=remap)
    if worth <= _whole(pieces, pieces.address, page_bytes, remap=remap):
        return Plan()
    plan.source, plan.target = pieces.address[moved], target[moved]
    return plan


def _whole(pieces: Pieces, target: Ints, page_bytes: int, *, remap: bool) -> int:
    """What a layout is worth: the largest hole there is, or that remapping can make of it."""
    movable = pieces.kind == MOVABLE
    start, end = _runs(pieces)
    # Of all that lies between walls, what no buffer lies on: sorted, starts and ends pair up.
    low = np.sort(np.concatenate([start, (target + pieces.size)[movable]]))
    high = np.sort(np.concatenate([end, target[movable]]))
    best = int((high - low).max(initial=0))
    pages = int(np.maximum(high // page_bytes - -(-low // page_bytes), 0).sum())
    return max(best, pages * page_bytes) if remap else best


def _runs(pieces: Pieces) -> tuple[Ints, Ints]:
    """Starts and ends of what lies between walls, on one reservation, without a gap."""
    chosen = pieces.kind != WALL
    address, end, part = pieces.address[chosen], pieces.end[chosen], pieces.part[chosen]
    breaks = np.flatnonzero((end[:-1] != address[1:]) | (part[:-1] != part[1:])) + 1
    if not len(address):
        return address, end
    return address[np.append(0, breaks)], end[np.append(breaks - 1, len(end) - 1)]


def _evacuate(pieces: Pieces, target: Ints, page_bytes: int, *, remap: bool) -> bool:
    """Moves buffers into holes of pages that are kept; returns whether a buffer found none."""
    cut = cut_at_pages(pieces, page_bytes)
    kind = pieces.kind[cut.piece]
    kept = _pages_kept(cut, kind, remap=remap)
    inside = (kind == FREE) & kept
    piece, page, address, size = (column[inside] for column in cut)
    begins = np.append(True, (piece[1:] != piece[:-1]) | (page[1:] != page[:-1] + 1))[: len(piece)]
    at = np.flatnonzero(begins)
    sizes = np.add.reduceat(size, at) if len(at) else size
    holes = sorted(zip(sizes.tolist(), address[at].tolist(), strict=True))

    leaves = np.zeros(len(target), bool)
    leaves[cut.piece[(kind == MOVABLE) & ~kept]] = True
    sources = np.flatnonzero(leaves)
    sources = sources[np.lexsort((pieces.address[sources], -pieces.size[sources]))]
    distinct, counts = np.unique(pieces.size[sources], return_counts=True)
    begin, stuck = 0, False
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        found = _take(holes, length, count)
        target[sources[begin : begin + len(found)]] = found
        begin += count
        stuck |= len(found) < count
    return stuck


def _pages_kept(cut: OnPages, kind: Ints, *, remap: bool) -> npt.NDArray[np.bool_]:
    """Of each piece on a page, whether that page stays in use."""
    pages, of_page = np.unique(cut.page, return_inverse=True)
    walls, moving, room = (
        np.bincount(of_page, cut.size * chosen, len(pages)).astype(np.int64)
        for chosen in (kind == WALL, kind == MOVABLE, kind != WALL)
    )
    order = np.arange(len(pages))
    if remap:
        order = np.lexsort((pages, -moving, walls == 0))
    before = np.cumsum(room[order]) - room[order]
    kept = np.empty(len(pages), bool)
    kept[order] = (before < moving.sum()) | (remap & (walls[order] > 0))
    return kept[of_page]


def _take(holes: list[tuple[int, int]], size: int, count: int) -> list[int]:
    """Addresses for up to `count` blocks of `size` bytes, best fit; `holes` are sorted.

    What a hole has left is the best fit for the next block, so whole holes are filled at a time,
    and all holes of one size together.
    """
    found: list[int] = []
    while count:
        position = bisect_left(holes, (size,))
        if position == len(holes):
            break
        length = holes[position][0]
        each = length // size
        alike = bisect_left(holes, (length + 1,), position) - position
        taken = holes[position : position + min(alike, -(-count // each))]
        del holes[position : position + len(taken)]
        each = min(each, count)
        blocks = [address + n * size for _, address in taken for n in range(each)][:count]
        found += blocks
        count -= len(blocks)
        filled = [each] * (len(taken) - 1) + [len(blocks) - each * (len(taken) - 1)]
        rests = [
            (length - full * size, address + full * size)
            for (_, address), full in zip(taken, filled, strict=True)
            if full * size < length
        ]
        if len(rests) < 16:
            for rest in rests:
                insort(holes, rest)
        else:
            holes.extend(rests)
            holes.sort()
    return found


def _slide(pieces: Pieces, target: Ints, plan: Plan) -> None:
    """Adds slides to a plan that has evacuated what it could."""
    movable = np.flatnonzero(pieces.kind == MOVABLE)
    movable = movable[np.argsort(target[movable])]
    starts = target[movable].tolist()
    sizes = pieces.size[movable].tolist()
    by_run = []
    for start, end in zip(*(bound.tolist() for bound in _runs(pieces)), strict=True):
        inside = slice(bisect_left(starts, start), bisect_left(starts, end))
        steps, arrived = _slide_run(start, starts[inside], sizes[inside])
        by_run.append(steps)
        target[movable[inside]] = arrived
    for together in zip_longest(*by_run, fillvalue=()):
        plan.steps.append(np.array([move for step in together for move in step], np.int64))


def _slide_run(
    start: int, addresses: Sequence[int], sizes: Sequence[int]
) -> tuple[list[list[tuple[int, int, int]]], list[int]]:
    """Slides the buffers of one run down, lowest first; returns where they arrive, too.

    Destinations only rise, and stay below their sources. So a step may take in copies as long as
    they end below the first byte that the step reads.
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
