"""Spans that tile an address range, and an index of spans by size.

The spans of a range form a doubly linked list in address order without gaps:

    span.next.address == span.address + span.size

so neighbours are found, split and merged in constant time. Addresses without memory are spans too
(UNMAPPED): mapping and unmapping pages only changes a span's state.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator, Sequence

from cukit.memory.bookkeeping.blocks import Block, BlockState, Frame
from cukit.memory.bookkeeping.owner_refs import BufferRef, OwnerRef

LIVE, CACHED, FREE, PENDING, UNMAPPED, ALIASED, PACKED, GONE = range(8)
"""CACHED: free, in its stream's list of exactly this size, not merged with neighbours.
FREE: merged with its free neighbours, in the index of its stream.
ALIASED: bytes of a page that is mapped twice, in use at the page's other address (pool/stitch.py).
PACKED: several adjacent unpinned buffers, described by Movables.
GONE: merged into a neighbour; no longer part of any range.
The other states are those of blocks.py."""

PUBLIC_STATE: tuple[BlockState, ...] = (
    "live",
    "free",
    "free",
    "pending",
    "unmapped",
    "unmapped",
    "live",
)
"""The public name of each state except GONE."""

NO_ROW = -1

USER, PERMANENT = "user", "permanent"
"""Pins: by `DeviceBuffer.pin`, and by a graph capture, which keeps the address in the graph."""


class Span:
    """Contiguous bytes of one range with one state."""

    __slots__ = (
        "address",
        "call_site",
        "epoch",
        "holder",
        "next",
        "owner_ref",
        "prev",
        "requested",
        "size",
        "state",
        "stream",
        "uses",
    )

    def __init__(self, address: int, size: int, state: int) -> None:
        self.address = address
        self.size = size
        self.state = state
        self.requested = 0
        self.stream: Hashable = None
        """The stream it was allocated on (LIVE) or freed on. None: any stream may take it."""
        self.epoch = 0
        """The epoch of its stream in which it was freed (streams.py)."""
        self.uses: tuple[Hashable, ...] = ()
        """Other streams that use the span."""
        self.holder: Holder | None = None
        """Set if a DeviceBuffer owns the span, which may then be moved."""
        self.owner_ref: OwnerRef | None = None
        """Reports the destruction of the object that owns the memory."""
        self.call_site: tuple[Frame, ...] = ()
        self.prev: Span | None = None
        self.next: Span | None = None

    @property
    def end(self) -> int:
        return self.address + self.size

    @property
    def gone(self) -> bool:
        """Whether the span was merged into a neighbour."""
        return self.state == GONE

    @property
    def movable(self) -> bool:
        return self.state == LIVE and self.holder is not None and not self.holder.pins

    def block(self) -> Block:
        """The public description of the span."""
        owned = self.state in (LIVE, PENDING)
        return Block(
            self.address,
            self.size,
            self.requested if owned else 0,
            PUBLIC_STATE[self.state],
            self.stream,
            self.movable,
            self.call_site if owned else (),
        )

    def split(self, size: int) -> Span:
        """Keeps the first `size` bytes; returns the rest as a new span with the same state, stream
        and epoch."""
        rest = Span(self.address + size, self.size - size, self.state)
        rest.stream, rest.epoch = self.stream, self.epoch
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.size = size
        return rest

    def swallow_next(self) -> None:
        """Merges the next span into this one; the next span becomes GONE."""
        gone = self.next
        assert gone is not None
        self.size += gone.size
        self.next = gone.next
        if gone.next is not None:
            gone.next.prev = self
        gone.prev = gone.next = None
        gone.state = GONE

    def isolate(self, address: int, size: int) -> Span:
        """Splits off `size` bytes at `address`, all inside the span, and returns them as a span."""
        span = self if address == self.address else self.split(address - self.address)
        if span.size > size:
            span.split(size)
        return span


class Holder:
    """The pool's record of a DeviceBuffer: its span, which may be moved, and its pins.

    While the buffer is packed, the span is outdated: it is part of no range (Movables.unpack).

    A Holder has no reference to the pool, which would otherwise never be collected.
    """

    __slots__ = ("closed", "note", "owner_ref", "pins", "released", "row", "span")

    def __init__(self, span: Span, note: Callable[[Holder], None]) -> None:
        self.span = span
        self.note = note
        """Movables.note: called after the last pin is removed."""
        self.row = NO_ROW
        """The buffer's row in Movables, or NO_ROW."""
        self.pins: list[object] = []
        """USER, PERMANENT, an object per `pinned()`, a PinRef per array."""
        self.owner_ref: BufferRef | None = None
        """Reports the destruction of the buffer."""
        self.closed = False
        self.released = False
        """The memory was freed, or its free is deferred."""

    def unpin(self, pin: object) -> bool:
        """Removes a pin if present; returns whether the memory is to be freed now, because the
        buffer is closed and has no further pin."""
        for place, one in enumerate(self.pins):
            if one is pin:
                del self.pins[place]
                break
        if not self.pins:
            self.note(self)
        return self.closed and self.close()

    def close(self) -> bool:
        """Marks the buffer as closed; returns whether the memory is to be freed now. While pins
        remain, it is not: the last `unpin` then returns True."""
        self.closed = True
        now = not self.pins and not self.released
        self.released |= now
        return now


Entry = tuple[int, int, Span]
"""Size, address, span."""


class SizeIndex:
    """Free spans by size, then address: best fit is a binary search.

    The sorted entries are stored in chunks of about a thousand, so an insertion moves the entries
    of one chunk instead of up to a hundred thousand. No chunk is empty.
    """

    MAX_PER_CHUNK = 1024

    def __init__(self) -> None:
        self._chunks: list[list[Entry]] = []
        self._lasts: list[Entry] = []
        """The last entry of each chunk."""

    def replace(self, spans: Sequence[Span]) -> None:
        """Replaces all entries by these spans."""
        entries = sorted([(span.size, span.address, span) for span in spans])
        step = self.MAX_PER_CHUNK // 2
        self._chunks = [entries[at : at + step] for at in range(0, len(entries), step)]
        self._lasts = [chunk[-1] for chunk in self._chunks]

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __len__(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)

    def __iter__(self) -> Iterator[Span]:
        """Iterates over a copy, so the index may be changed during the iteration."""
        return iter([entry[2] for chunk in self._chunks for entry in chunk])

    def add(self, span: Span) -> None:
        entry = (span.size, span.address, span)
        if not self._chunks:
            self._chunks.append([entry])
            self._lasts.append(entry)
            return
        number = min(bisect_left(self._lasts, entry), len(self._lasts) - 1)
        chunk = self._chunks[number]
        insort(chunk, entry)
        if len(chunk) > self.MAX_PER_CHUNK:
            half = len(chunk) // 2
            self._chunks.insert(number, chunk[:half])
            self._lasts.insert(number, chunk[half - 1])
            del chunk[:half]
            number += 1
        self._lasts[number] = chunk[-1]

    def remove(self, span: Span) -> None:
        key = (span.size, span.address)
        number = bisect_left(self._lasts, key)
        chunk = self._chunks[number]
        position = bisect_left(chunk, key)
        assert chunk[position][2] is span
        del chunk[position]
        if chunk:
            self._lasts[number] = chunk[-1]
        else:
            del self._chunks[number], self._lasts[number]

    def largest(self) -> Span | None:
        """The largest span, highest address first; not removed."""
        return self._lasts[-1][2] if self._lasts else None

    def best_fit(self, size: int) -> Span | None:
        """The smallest span of at least `size` bytes, lowest address first; not removed."""
        number = bisect_left(self._lasts, (size,))
        if number == len(self._lasts):
            return None
        chunk = self._chunks[number]
        return chunk[bisect_left(chunk, (size,))][2]

    def at_least(self, size: int, most: int | None = None) -> list[Span]:
        """All spans of at least `size` bytes, or the first `most` of them, smallest first."""
        number = bisect_left(self._lasts, (size,))
        if number == len(self._lasts):
            return []
        chunk = self._chunks[number]
        found = [entry[2] for entry in chunk[bisect_left(chunk, (size,)) :][:most]]
        for chunk in self._chunks[number + 1 :]:
            if most is not None and len(found) >= most:
                break
            found += [entry[2] for entry in chunk]
        return found[:most]
