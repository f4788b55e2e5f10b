"""What a pool tells the outside: the blocks of its address ranges, and what happened to them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, NamedTuple

BlockState = Literal["live", "pending", "free", "unmapped"]
"""`pending`: freed, but a stream it was used on may not be done with it. `unmapped`: addresses
with no memory behind them, or whose memory is in use at another address."""

Action = Literal[
    "alloc",
    "free",  # requested
    "free_completed",  # the bytes can be given to somebody else
    "segment_alloc",  # addresses reserved (with memory behind them where pages cannot be mapped)
    "segment_free",
    "segment_map",  # pages mapped into a reserved range
    "segment_unmap",
    "oom",  # address: 0, size: what was asked for
    "defragment",  # address: 0, size: bytes moved
]


class Frame(NamedTuple):
    """One line of a call stack."""

    filename: str
    line: int
    name: str


class Block(NamedTuple):
    """Neighbouring bytes of one range with one state."""

    address: int
    size: int
    requested: int
    """What the caller asked for; 0 unless live or pending."""
    state: BlockState
    stream: Hashable
    """The stream that owns a live block or that freed it last; None: any may use it."""
    movable: bool
    """Live, owned by a DeviceBuffer, and not pinned."""
    call_site: tuple[Frame, ...]
    """Who allocated it, innermost call first; empty unless the pool records call sites."""


class Range(NamedTuple):
    """One reservation of contiguous addresses, tiled by its blocks in address order."""

    address: int
    size: int
    page_bytes: int
    blocks: tuple[Block, ...]

    @property
    def mapped(self) -> int:
        """Bytes with memory behind them."""
        return sum(block.size for block in self.blocks if block.state != "unmapped")


class Event(NamedTuple):
    """Something that happened in a pool. Listeners get these in the order in which they did."""

    time: float
    """Seconds, of time.perf_counter()."""
    action: Action
    address: int
    size: int
    """Bytes, rounded as the pool does (`alloc`, `free`)."""
    stream: Hashable
    thread: int
    call_site: tuple[Frame, ...]
