"""The layout of a memory map: a pool's bytes by kind, in rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cukit.memory.bookkeeping.blocks import Block, Range

KINDS = ("live", "pending", "whole", "part", "unmapped")
"""Kinds of bytes. `whole`: free, on a wholly free page; `part`: free, on a partly used page."""

HOLE = 0.008
"""Largest width of unmapped addresses, and width of the gap between ranges, as a fraction of a row.
"""


class Piece(NamedTuple):
    """Contiguous bytes drawn as one piece, with the number of bytes of each kind."""

    start: int
    size: int
    shares: dict[str, int]


def kinds_of(part: Range) -> Iterator[tuple[int, int, str]]:
    """(address, size, kind) of every stretch of a range. Adjacent stretches of the same kind are
    merged, except live ones."""
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
    """Splits free memory into whole pages and the partial pages at both ends."""
    low, high = -(-start // page) * page, end // page * page
    if low >= high:
        low = high = end
    for first, last, kind in ((start, low, "part"), (low, high, "whole"), (high, end, "part")):
        if first < last:
            yield first, last - first, kind


class Stretch(NamedTuple):
    """Contiguous bytes of one kind, and their place in the map."""

    place: int
    """Bytes from the start of the map."""
    size: int
    kind: str
    address: int


class Layout:
    """All ranges in order, split into rows of equal size.

    Unmapped addresses are drawn at most `HOLE` of a row wide; to scale, they would fill the map.
    Between two ranges there is a gap of the same width.
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
        """(start, end) of each row, in bytes from the start of the map."""
        for start in range(0, self.end, self.row_bytes):
            yield start, min(start + self.row_bytes, self.end)

    def between(self, start: int, end: int) -> Iterator[Stretch]:
        """The stretches between two places, clipped to them."""
        number = max(bisect_right(self._places, start) - 1, 0)
        for place, size, kind, address in self.stretches[number:]:
            first, last = max(place, start), min(place + size, end)
            if place >= end:
                return
            if first < last:
                yield Stretch(first, last - first, kind, address + first - place)

    def pieces(self, start: int, end: int, least: float) -> Iterator[Piece]:
        """The pieces to draw between two places.

        Each has at least `least` bytes, except before a gap, before a stretch of at least `least`
        bytes, and at the end.
        """
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
    """Drops unmapped stretches at both ends."""
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
    """The largest number of contiguous free bytes."""
    best = 0
    for part in ranges:
        end = run = 0
        for address, size, kind in kinds_of(part):
            if kind in ("whole", "part"):
                run = run + size if end == address else size
                best, end = max(best, run), address + size
    return best
