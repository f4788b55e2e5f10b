"""What a pool holds as arrays: what defragmentation reads.

There may be a hundred thousand blocks, and moving them takes the device less time than Python needs
to look at each of them a few times. So each is looked at once, in C, and of free memory nothing is
looked at: it is what all else leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cukit.memory.bookkeeping.compaction import Ints, Pieces
from cukit.memory.bookkeeping.spans import Span

if TYPE_CHECKING:
    from cukit.memory.bookkeeping.arena import AddressRange

_address, _size = attrgetter("address"), attrgetter("size")


class Holes(NamedTuple):
    """Free memory, whoever freed it. Bytes."""

    free: int
    largest: int
    whole_pages: int
    """What remapping can gather."""

    @property
    def fragmentation(self) -> float:
        """1 - largest free block / free bytes; 0 when nothing is free."""
        return 1 - self.largest / self.free if self.free else 0.0


@dataclass(frozen=True)
class Walk:
    """All that is not free."""

    rows: Ints
    """Of Movables: those that may move, in address order."""
    others: list[Span]
    """What stays where it is, and what is unmapped; in no order."""
    others_at: Ints
    others_size: Ints
    pieces: Pieces
    """All of it as the planner of compaction wants it."""

    @classmethod
    def over(
        cls,
        columns: tuple[Ints, Ints, Ints],
        fixed: list[Span],
        unmapped: list[Span],
        ranges: Sequence[AddressRange],
    ) -> Walk:
        """`columns`: of Movables."""
        rows, movable, movable_size = columns
        others = fixed + unmapped
        at = np.fromiter(map(_address, others), np.int64, len(others))
        size = np.fromiter(map(_size, others), np.int64, len(others))
        wall, wall_size = at[: len(fixed)], size[: len(fixed)]
        if (wall[1:] < wall[:-1]).any():
            order = np.argsort(wall)
            wall, wall_size = wall[order], wall_size[order]
        start = np.array([part.address for part in ranges], np.int64)
        end = start + np.array([part.size for part in ranges], np.int64)
        hole, hole_size = at[len(fixed) :], size[len(fixed) :]
        begin = np.sort(np.concatenate((start, hole + hole_size)))
        end = np.sort(np.concatenate((end, hole)))
        some = end > begin
        pieces = Pieces(begin[some], end[some], movable, movable_size, wall, wall_size)
        return cls(rows, others, at, size, pieces)

    def holes(self, paging: Paging) -> Holes:
        """What is free, whoever freed it."""
        return measure(*self.pieces.free, paging)


@dataclass(frozen=True)
class Paging:
    """How the memory behind an arena is mapped."""

    page_bytes: int
    in_hand_bytes: int
    """Pages that are mapped nowhere."""
    remap: bool
    large_pages: int
    """How many pages a large one has."""
    large_at: Ints
    """Where large ones are mapped."""


def measure(address: Ints, size: Ints, paging: Paging) -> Holes:
    """Of free memory, merged as far as it goes, in address order."""
    page = paging.page_bytes
    first = -(-address // page)
    pages = np.maximum((address + size) // page - first, 0)
    whole = int(pages.sum())
    if len(paging.large_at) and len(pages):
        # Free pages of a large one that is not free as a whole are of no use elsewhere.
        before = np.cumsum(pages) - pages

        def below(number: Ints) -> Ints:
            """How many whole free pages lie below a page."""
            hole = np.maximum(np.searchsorted(first, number, "right") - 1, 0)
            found: Ints = before[hole] + np.clip(number - first[hole], 0, pages[hole])
            return found

        start = paging.large_at // page
        free = below(start + paging.large_pages) - below(start)
        whole -= int(free[free < paging.large_pages].sum())
    return Holes(
        paging.in_hand_bytes + int(size.sum()),
        int(size.max(initial=0)),
        paging.in_hand_bytes + (whole * page if paging.remap else 0),
    )
