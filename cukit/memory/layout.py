"""What a picture of a pool shows: its bytes by kind, in rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cukit.memory.bookkeeping.blocks import Block, Range

KINDS = ("live", "pending", "whole", "part", "unmapped")
"""What a byte is: `whole` is free on a page without a live byte, `part` is free beside one."""

HOLE = 0.008
"""Of a row: how wide addresses without memory, and the gap between two ranges, are drawn."""


class Piece(NamedTuple):
    """Neighbouring bytes drawn as one: how many there are of each kind."""

    start: int
    size: int
    shares: dict[str, int]


def kinds_of(part: Range) -> Iterator[tuple[int, int, str]]:
    """(address, size, kind) of every stretch of a range; neighbours of one kind are one."""
    page = part.page_bytes
    address = size = 0
    kind = ""
    for start, length, found in _stretches(part.blocks, page):
        if found == kind and address + size == start and found != "live":
            size += length
            continue
        if size:
            yield address, size, kind
        address, size, kind = start, length, found
    if size:
        yield address, size, kind


def _stretches(blocks: Sequence[Block], page: int) -> Iterator[tuple[int, int, str]]:
    free_start = free_end = 0
    for block in blocks:
        if block.state == "free":
            if free_end != block.address:
                free_start = block.address
            free_end = block.address + block.size
            continue
        yield from _free(free_start, free_end, page)
        free_start = free_end = 0
        yield block.address, block.size, block.state
    yield from _free(free_start, free_end, page)


def _free(start: int, end: int, page: int) -> Iterator[tuple[int, int, str]]:
    """A stretch of free memory: its whole pages, and what is left on both sides."""
    low, high = -(-start // page) * page, end // page * page
    if low >= high:
        low = high = end
    for first, last, kind in ((start, low, "part"), (low, high, "whole"), (high, end, "part")):
        if first < last:
            yield first, last - first, kind


class Stretch(NamedTuple):
    """Neighbouring bytes of one kind, and where they come in the picture."""

    place: int
    """Bytes from the beginning of the picture."""
    size: int
    kind: str
    address: int


class Layout:
    """All ranges one behind the other, for rows of equally many bytes.

    Addresses without memory are drawn no wider than `HOLE` of a row, else they would fill the
    picture; between two ranges there is a gap.
    """

    def __init__(self, ranges: Sequence[Range], rows: int) -> None:
        ranges = [part for part in ranges if part.mapped]
        self.page_bytes = max((part.page_bytes for part in ranges), default=1)
        mapped = max(sum(part.mapped for part in ranges), self.page_bytes)
        hole = max(int(mapped / rows * HOLE), 1)
        self.stretches: list[Stretch] = []
        place = 0
        for part in ranges:
            place += hole if place else 0
            for address, size, kind in _without_ends(list(kinds_of(part))):
                drawn = min(size, hole) if kind == "unmapped" else size
                self.stretches.append(Stretch(place, drawn, kind, address))
                place += drawn
        self.end = place
        self.row_bytes = max(-(-place // rows), self.page_bytes)
        self._places = [stretch.place for stretch in self.stretches]

    def rows(self) -> Iterator[tuple[int, int]]:
        """(start, end) of each, in bytes from the beginning."""
        for start in range(0, self.end, self.row_bytes):
            yield start, min(start + self.row_bytes, self.end)

    def between(self, start: int, end: int) -> Iterator[Stretch]:
        """What lies there, cut to size."""
        number = max(bisect_right(self._places, start) - 1, 0)
        for place, size, kind, address in self.stretches[number:]:
            first, last = max(place, start), min(place + size, end)
            if place >= end:
                return
            if first < last:
                yield Stretch(first, last - first, kind, address + first - place)

    def pieces(self, start: int, end: int, least: float) -> Iterator[Piece]:
        """What to draw there: nothing is smaller than `least`, but for what stands alone."""
        low, shares = start, dict.fromkeys(KINDS, 0)
        for place, size, kind, _ in self.between(start, end):
            if size >= least or place > low + sum(shares.values()):
                if any(shares.values()):
                    yield Piece(low, sum(shares.values()), shares)
                low, shares = place, dict.fromkeys(KINDS, 0)
            shares[kind] += size
            if sum(shares.values()) >= least:
                yield Piece(low, sum(shares.values()), shares)
                low, shares = place + size, dict.fromkeys(KINDS, 0)
        if any(shares.values()):
            yield Piece(low, sum(shares.values()), shares)


def _without_ends(stretches: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Without the addresses before and behind all memory."""
    while stretches and stretches[-1][2] == "unmapped":
        stretches.pop()
    while stretches and stretches[0][2] == "unmapped":
        stretches.pop(0)
    return stretches


def totals(ranges: Sequence[Range]) -> dict[str, int]:
    """Bytes of each kind."""
    result = dict.fromkeys(KINDS, 0)
    for part in ranges:
        for _, size, kind in kinds_of(part):
            result[kind] += size
    return result


def largest_hole(ranges: Sequence[Range]) -> int:
    """The most free bytes at neighbouring addresses."""
    best = 0
    for part in ranges:
        end = run = 0
        for address, size, kind in kinds_of(part):
            if kind in ("whole", "part"):
                run = run + size if end == address else size
                best, end = max(best, run), address + size
    return best
