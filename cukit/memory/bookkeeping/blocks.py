"""The public description of a pool: the blocks of its address ranges, and its events."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, NamedTuple

BlockState = Literal["live", "pending", "free", "unmapped"]
"""`pending`: freed, but a stream may still use it. `unmapped`: addresses that no memory
backs, or whose memory is in use at another address."""

Action = Literal[
    "alloc",
    "free",  # requested
    "free_completed",  # the bytes can be reused
    "segment_alloc",  # addresses reserved (with memory if pages cannot be mapped)
    "segment_free",
    "segment_map",  # pages mapped into a reserved range
    "segment_unmap",
    "oom",  # address: 0, size: bytes requested
    "defragment",  # address: 0, size: bytes moved
]


class Frame(NamedTuple):
    """One line of a call stack."""

    filename: str
    line: int
    name: str


class Block(NamedTuple):
    """Contiguous bytes of one range with one state."""

    address: int
    size: int
    requested: int
    """Bytes that the caller requested; 0 unless live or pending."""
    state: BlockState
    stream: Hashable
    """The stream that owns a live block, or freed the block last; None: any stream may use it."""
    movable: bool
    """Live, owned by a DeviceBuffer, and not pinned."""
    call_site: tuple[Frame, ...]
    """Stack of the allocation, innermost call first; empty unless the pool records call sites."""


class Range(NamedTuple):
    """One reservation of contiguous addresses, covered by its blocks in address order."""

    address: int
    size: int
    page_bytes: int
    blocks: tuple[Block, ...]

    @property
    def mapped(self) -> int:
        """Bytes backed by memory."""
        return sum(block.size for block in self.blocks if block.state != "unmapped")


class Event(NamedTuple):
    """A change in a pool. Listeners receive events in order."""

    time: float
    """Seconds of time.perf_counter()."""
    action: Action
    address: int
    size: int
    """Bytes; for `alloc` and `free` rounded up by the pool."""
    stream: Hashable
    thread: int
    call_site: tuple[Frame, ...]
    moved: int | None = None
    """If a defragmentation moves the memory: the new address for `free` and `free_completed`, the
    old address for `alloc`; else None."""
