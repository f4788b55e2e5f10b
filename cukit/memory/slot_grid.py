"""The grid of a compaction of buffers of one size, and the kernel that plans on it."""

from __future__ import annotations

from functools import cache
from struct import Struct
from typing import NamedTuple

from cukit.core.kernel import KernelSpec

MIN_OCCUPIED = 1 / 16
"""The grid has at most 16 slots per buffer; sparser pools are planned by compaction.py."""

MIN_GAIN = 2
"""Minimum number of pages that must become wholly free. The largest hole then grows too, because a
hole without a wholly free page is smaller than two pages."""


class Grid(NamedTuple):
    """The slots of a reservation."""

    begin: int
    """Address of the first slot."""
    slot_shift: int
    """log2 of the bytes of a slot."""
    page_shift: int
    """log2 of the slots of a page."""
    num_slots: int
    """A multiple of the slots of a page."""
    num_buffers: int

    @property
    def end(self) -> int:
        """The address after the last slot."""
        return self.begin + (self.num_slots << self.slot_shift)

    @property
    def slot_bytes(self) -> int:
        return 1 << self.slot_shift

    @property
    def per_page(self) -> int:
        return 1 << self.page_shift

    @property
    def num_pages(self) -> int:
        return self.num_slots >> self.page_shift


def make_grid(begin: int, end: int, length: int, count: int, page_bytes: int) -> Grid | None:
    """The grid for `count` buffers of `length` bytes between `begin` and `end`, which are multiples
    of `page_bytes`. None unless `length` and `page_bytes` are powers of two, `length` is at most
    `page_bytes`, and enough slots are occupied (MIN_OCCUPIED)."""
    if not length or length & (length - 1) or page_bytes & (page_bytes - 1) or length > page_bytes:
        return None
    slot_shift = length.bit_length() - 1
    num_slots = (end - begin) >> slot_shift
    if count < num_slots * MIN_OCCUPIED:
        return None
    return Grid(begin, slot_shift, page_bytes.bit_length() - 1 - slot_shift, num_slots, count)


# The kernel ---------------------------------------------------------------------------------------

MIN_BUFFERS = 16
"""Moves of fewer buffers are planned by the host: they may need no kernel (device_copy.py)."""
MAX_ROWS = 1 << 16
MAX_WALLS = 1 << 13
MAX_SLOTS = 1 << 17
MAX_PAGES = 1 << 13
MAX_PER_PAGE = 1 << 12
_THREADS = 1024

REQUEST = Struct("7q8x")
"""The first words of the pinned memory: a Grid, the number of rows and that of walls."""


def fits(grid: Grid, num_rows: int, num_walls: int) -> bool:
    """Whether a compaction is within the limits of the kernel and has enough buffers."""
    return (
        grid.num_buffers >= MIN_BUFFERS
        and num_rows <= MAX_ROWS
        and num_walls <= MAX_WALLS
        and grid.num_slots <= MAX_SLOTS
        and grid.num_slots >> grid.page_shift <= MAX_PAGES
        and 1 << grid.page_shift <= MAX_PER_PAGE
    )


@cache
def slot_planner_spec() -> KernelSpec:
    """The kernel; a single thread block plans 2048 buffers in a few microseconds."""
    defines = (
        ("THREADS", _THREADS),
        ("MAX_SLOTS", MAX_SLOTS),
        ("MAX_PAGES", MAX_PAGES),
        ("MAX_PER_PAGE", MAX_PER_PAGE),
        ("MIN_GAIN", MIN_GAIN),
    )
    shared = (2 * MAX_SLOTS // 32 + MAX_PAGES + MAX_PER_PAGE + 1) * 4
    return KernelSpec("memory/plan_slots.cu", "plan_slots", defines, _THREADS, shared)
