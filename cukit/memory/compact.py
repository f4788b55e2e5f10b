"""Plans how to move buffers so that free memory becomes whole: pure arithmetic on addresses.

First the pages are chosen that stay in use: those that hold anything unmovable, then the fullest,
until what can move has room in them (where pages cannot be remapped: the lowest addresses, so that
the hole grows at the end). Buffers on any other page move into holes of the chosen ones, best fit,
largest buffer first. These moves write to free memory only, so one batch copies them all.

Buffers that fit no hole slide: each one down over the gap before it, in address order. A slide
overlaps itself, so it is cut into steps no longer than the gap.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal, NamedTuple

from cukit.memory.provider import Move

LEAST_GAP = 64 << 10
"""Bytes; a buffer does not slide over less."""
MOST_STEPS = 64
"""Nor in more steps than this."""


class Piece(NamedTuple):
    """Neighbouring bytes as a plan sees them. Walls neither move nor take anything."""

    address: int
    size: int
    kind: Literal["movable", "free", "wall"]
    part: int = 0
    """Of which reservation. Two of them may lie side by side, and still no buffer lies on both."""

    @property
    def end(self) -> int:
        return self.address + self.size


@dataclass
class Plan:
    """Where buffers go, and the copies that bring them there."""

    relocations: dict[int, int] = field(default_factory=dict)
    """New address by old address."""
    steps: list[list[Move]] = field(default_factory=list)
    """Batches, one after the other; inside one, no destination overlaps a source."""

    @property
    def bytes_moved(self) -> int:
        return sum(move.size for step in self.steps for move in step)


def plan_compaction(pieces: Sequence[Piece], page_bytes: int, *, remap: bool) -> Plan:
    """Plans for pieces in address order; unmapped addresses may be left out between them.

    `remap`: free pages need not lie side by side, for the pool can remap them.
    """
    plan = Plan()
    kept = _pages_kept(pieces, page_bytes, remap=remap)
    evacuated, stuck = _evacuate(pieces, kept, page_bytes)
    if evacuated:
        plan.relocations.update(evacuated)
        sizes = {piece.address: piece.size for piece in pieces}
        plan.steps.append([Move(to, at, sizes[at]) for at, to in evacuated.items()])
    if stuck:
        _slide(pieces, plan)
    worth = _whole(pieces, plan.relocations, page_bytes, remap=remap)
    return plan if worth > _whole(pieces, {}, page_bytes, remap=remap) else Plan()


def _whole(
    pieces: Sequence[Piece], relocations: dict[int, int], page_bytes: int, *, remap: bool
) -> int:
    """What a layout is worth: the largest hole there is, or that remapping can make of it."""
    movable = sorted(
        (relocations.get(piece.address, piece.address), piece.size)
        for piece in pieces
        if piece.kind == "movable"
    )
    position = 0
    best = pages = 0
    for start, end in _runs(pieces):
        inside = [(end, 0)]
        while position < len(movable) and movable[position][0] < end:
            inside.insert(-1, movable[position])
            position += 1
        for address, size in inside:
            best = max(best, address - start)
            pages += max(0, address // page_bytes - -(-start // page_bytes))
            start = address + size
    return max(best, pages * page_bytes) if remap else best


def _pages_of(piece: Piece, page_bytes: int) -> Sequence[tuple[int, int]]:
    """Each page that a piece touches, with the bytes of the piece on it."""
    address, size = piece.address, piece.size
    first, last = address // page_bytes, (address + size - 1) // page_bytes
    if first == last:
        return ((first, size),)
    inner = [(page, page_bytes) for page in range(first + 1, last)]
    head = (first + 1) * page_bytes - address
    return [(first, head), *inner, (last, address + size - last * page_bytes)]


def _pages_kept(pieces: Sequence[Piece], page_bytes: int, *, remap: bool) -> set[int]:
    walls: dict[int, int] = defaultdict(int)
    moving: dict[int, int] = defaultdict(int)
    room: dict[int, int] = defaultdict(int)
    counted = {"wall": walls, "movable": moving, "free": defaultdict(int)}
    for piece in pieces:
        count = counted[piece.kind]
        for page, size in _pages_of(piece, page_bytes):
            room[page] += size
            count[page] += size
    order = sorted(room)
    if remap:
        order.sort(key=lambda page: (page not in walls, -moving[page]))
    needed = sum(moving.values())
    kept = set()
    for page in order:
        if needed <= 0 and (not remap or page not in walls):
            break
        kept.add(page)
        needed -= room[page] - walls[page]
    return kept


def _evacuate(
    pieces: Sequence[Piece], kept: set[int], page_bytes: int
) -> tuple[dict[int, int], bool]:
    """Moves into holes of kept pages, and whether a buffer found none."""
    holes: list[tuple[int, int]] = []
    sources = []
    for piece in pieces:
        if piece.kind == "free":
            holes.extend(_clip(piece, kept, page_bytes))
        elif piece.kind == "movable" and any(
            page not in kept for page, _ in _pages_of(piece, page_bytes)
        ):
            sources.append(piece)
    holes.sort()
    sources.sort(key=lambda piece: (-piece.size, piece.address))
    moves: dict[int, int] = {}
    for source in sources:
        position = bisect_left(holes, (source.size,))
        if position == len(holes):
            continue
        size, address = holes.pop(position)
        moves[source.address] = address
        if size > source.size:
            insort(holes, (size - source.size, address + source.size))
    return moves, len(moves) < len(sources)


def _clip(piece: Piece, kept: set[int], page_bytes: int) -> list[tuple[int, int]]:
    """(size, address) of the parts of a hole that lie on kept pages."""
    parts: list[tuple[int, int]] = []
    for page, size in _pages_of(piece, page_bytes):
        if page not in kept:
            continue
        low = max(piece.address, page * page_bytes)
        if parts and sum(parts[-1]) == low:
            parts[-1] = (parts[-1][0] + size, parts[-1][1])
        else:
            parts.append((size, low))
    return parts


def _slide(pieces: Sequence[Piece], plan: Plan) -> None:
    """Adds slides to a plan that has evacuated what it could."""
    origin = {to: at for at, to in plan.relocations.items()}
    buffers = sorted(
        piece._replace(address=plan.relocations.get(piece.address, piece.address))
        for piece in pieces
        if piece.kind == "movable"
    )
    starts = [buffer.address for buffer in buffers]
    by_run = []
    for start, end in _runs(pieces):
        inside = buffers[bisect_left(starts, start) : bisect_left(starts, end)]
        steps, moved = _slide_run(start, inside)
        by_run.append(steps)
        for at, to in moved.items():
            plan.relocations[origin.get(at, at)] = to
    for together in zip_longest(*by_run, fillvalue=()):
        plan.steps.append([move for step in together for move in step])


def _runs(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Start and end of what lies between walls, on one reservation, without a gap."""
    runs: list[tuple[int, int]] = []
    part = None
    for piece in pieces:
        if piece.kind == "wall":
            continue
        if runs and runs[-1][1] == piece.address and piece.part == part:
            runs[-1] = (runs[-1][0], piece.end)
        else:
            runs.append((piece.address, piece.end))
        part = piece.part
    return runs


def _slide_run(start: int, buffers: Sequence[Piece]) -> tuple[list[list[Move]], dict[int, int]]:
    """Slides the buffers of one run down, lowest first.

    Destinations only rise, and stay below their sources. So a step may take in copies as long as
    they end below the first byte that the step reads.
    """
    steps: list[list[Move]] = []
    moved = {}
    free = start
    for buffer in buffers:
        gap = buffer.address - free
        if gap < LEAST_GAP or buffer.size > gap * MOST_STEPS:
            free = buffer.end
            continue
        moved[buffer.address] = free
        for offset in range(0, buffer.size, gap):
            size = min(gap, buffer.size - offset)
            move = Move(free + offset, buffer.address + offset, size)
            if steps and move.destination + size <= steps[-1][0].source:
                steps[-1].append(move)
            else:
                steps.append([move])
        free += buffer.size
    return steps, moved
