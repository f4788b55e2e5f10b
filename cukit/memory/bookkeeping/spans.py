"""The pool's own picture of memory: spans that tile an address range, and an index by size.

The spans of a range form a doubly linked list in address order without gaps:

    span.next.address == span.address + span.size

so that neighbours are found, split and merged in constant time. Addresses without memory are spans
too (UNMAPPED): mapping and unmapping pages only changes a span's state.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from cukit.memory.bookkeeping.blocks import Block, BlockState, Frame

if TYPE_CHECKING:
    from cukit.memory.bookkeeping.ties import Tie
    from cukit.memory.pool.buffer import Holder

LIVE, CACHED, FREE, PENDING, UNMAPPED, ELSEWHERE, GONE = range(7)
"""CACHED: free, waiting in its stream's list of exactly this size, not merged with neighbours.
FREE: merged as far as it goes, in the index of its stream. ELSEWHERE: bytes of a page that is
mapped twice, which are used at its other address (stitch.py). GONE: merged into a neighbour, no
longer part of any range. The other states as in blocks.py."""

PUBLIC_STATE: tuple[BlockState, ...] = ("live", "free", "free", "pending", "unmapped", "unmapped")


class Span:
    """Neighbouring bytes of one range with one state."""

    __slots__ = (
        "address",
        "call_site",
        "epoch",
        "holder",
        "next",
        "prev",
        "requested",
        "size",
        "state",
        "stream",
        "tie",
        "uses",
    )

    def __init__(self, address: int, size: int, state: int) -> None:
        self.address = address
        self.size = size
        self.state = state
        self.requested = 0
        self.stream: Hashable = None
        """LIVE: allocated on; free: freed on. None: any stream may have it."""
        self.epoch = 0
        """When it was freed, in epochs of its stream (streams.py)."""
        self.uses: tuple[Hashable, ...] = ()
        """Further streams that work on it."""
        self.holder: Holder | None = None
        """The owner's handle, if the span may be moved."""
        self.tie: Tie | None = None
        """Keeps what notices the end of the object that owns the memory."""
        self.call_site: tuple[Frame, ...] = ()
        self.prev: Span | None = None
        self.next: Span | None = None

    @property
    def end(self) -> int:
        return self.address + self.size

    @property
    def gone(self) -> bool:
        """Whether it was merged into a neighbour."""
        return self.state == GONE

    @property
    def movable(self) -> bool:
        return self.state == LIVE and self.holder is not None and not self.holder.pins

    def block(self) -> Block:
        """What the outside sees of it."""
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
        """Keeps the first `size` bytes; returns the rest, linked behind, alike in all else."""
        rest = Span(self.address + size, self.size - size, self.state)
        rest.stream, rest.epoch = self.stream, self.epoch
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.next = rest
        self.size = size
        return rest

    def swallow_next(self) -> None:
        """Takes over the bytes of the next span, which is no more."""
        gone = self.next
        assert gone is not None
        self.size += gone.size
        self.next = gone.next
        if gone.next is not None:
            gone.next.prev = self
        gone.prev = gone.next = None
        gone.state = GONE

    def isolate(self, address: int, size: int) -> Span:
        """Splits so that `size` bytes at `address`, all inside, are a span; returns that one."""
        span = self if address == self.address else self.split(address - self.address)
        if span.size > size:
            span.split(size)
        return span


Entry = tuple[int, int, Span]
"""Size, address, span."""


class SizeIndex:
    """Free spans by size, then address: best fit is a binary search.

    The sorted entries are cut into chunks, so that adding one among a hundred thousand moves a
    thousand others and not all of them. No chunk is empty.
    """

    MOST_PER_CHUNK = 1024

    def __init__(self) -> None:
        self._chunks: list[list[Entry]] = []
        self._lasts: list[Entry] = []
        """The last entry of each chunk."""

    def replace(self, spans: Sequence[Span]) -> None:
        """Forgets all entries and takes these spans."""
        entries = sorted([(span.size, span.address, span) for span in spans])
        step = self.MOST_PER_CHUNK // 2
        self._chunks = [entries[at : at + step] for at in range(0, len(entries), step)]
        self._lasts = [chunk[-1] for chunk in self._chunks]

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __len__(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)

    def __iter__(self) -> Iterator[Span]:
        """As they are now, whatever happens to the index meanwhile."""
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
        if len(chunk) > self.MOST_PER_CHUNK:
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

    def best_fit(self, size: int) -> Span | None:
        """The smallest span of at least `size` bytes, the lowest of those; it stays inside."""
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
