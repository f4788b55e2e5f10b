"""What happened in a pool, kept for pictures and snapshots; fragmentation over time."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from cukit.memory.bookkeeping.blocks import Event, Range
from cukit.memory.pool.memory_pool import MemoryPool

MAX_EVENTS = 100_000


class History:
    """The latest events of a pool, from now until `close`. A context manager.

    >>> with History(pool) as history:                      # doctest: +SKIP
    ...     train()
    ...     print(picture.timeline_svg(history.timeline()))
    """

    def __init__(self, pool: MemoryPool, max_events: int = MAX_EVENTS) -> None:
        self._pool = pool
        self._events: deque[Event] = deque(maxlen=max_events)
        pool.add_listener(self._events.append)

    @property
    def events(self) -> list[Event]:
        """Oldest first."""
        return list(self._events)

    def moment(self) -> tuple[list[Event], list[Range]]:
        """The events, and the ranges as the last of them left them."""
        for _ in range(1000):
            before = self._latest()
            ranges = self._pool.ranges()
            if self._latest() is before:
                return self.events, ranges
            threading.Event().wait(0.001)  # another thread is busy allocating
        return self.events, ranges

    def timeline(self) -> list[Sample]:
        """The pool after each event that is kept, oldest first."""
        return timeline(*self.moment(), remaps=self._pool.provider.can_remap)

    def close(self) -> None:
        """Stops listening. What was kept stays."""
        self._pool.remove_listener(self._events.append)

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _latest(self) -> Event | None:
        return self._events[-1] if self._events else None


class Sample(NamedTuple):
    """A pool at one moment. Bytes."""

    time: float
    """Seconds, of time.perf_counter()."""
    live: int
    """Pending included: nobody else can have it."""
    mapped: int
    """Addresses with memory behind them: live and free."""
    largest_free: int

    @property
    def free(self) -> int:
        return self.mapped - self.live

    @property
    def fragmentation(self) -> float:
        """1 - largest free block / free bytes; 0 when nothing is free."""
        return 1 - self.largest_free / self.free if self.free > 0 else 0.0


def timeline(
    events: Sequence[Event], ranges: Sequence[Range], *, remaps: bool = True
) -> list[Sample]:
    """The pool after each event, worked out backwards from what the last one left.

    It is right however much of the beginning is missing. Where an event contradicts what came after
    it (the events are not of this pool), the line begins after that event.

    remaps: whether memory comes in pages; then reserving addresses takes none.
    """
    state = _State(ranges, remaps)
    samples: list[Sample] = []
    for event in reversed(events):
        samples.append(state.sample(event.time))
        try:
            state.undo(event)
        except KeyError:
            break
    samples.reverse()
    return samples


_MEMORY_ACTIONS = {True: ("segment_map", "segment_unmap"), False: ("segment_alloc", "segment_free")}
"""Which events bring memory and take it away."""


class _State:
    """Free memory by address and by size, on its way back in time."""

    def __init__(self, ranges: Sequence[Range], remaps: bool) -> None:
        self._grows, self._shrinks = _MEMORY_ACTIONS[remaps]
        self._free = FreeMap()
        self._live = self._mapped = 0
        for block in (block for part in ranges for block in part.blocks):
            if block.state == "unmapped":
                continue
            self._mapped += block.size
            if block.state == "free":
                self._free.add(block.address, block.size)
            else:
                self._live += block.size

    def sample(self, time: float) -> Sample:
        return Sample(time, self._live, self._mapped, self._free.largest)

    def undo(self, event: Event) -> None:
        """Raises KeyError where the event cannot have happened."""
        address, size = event.address, event.size
        if event.action == "alloc":
            self._free.add(address, size)
            self._live -= size
        elif event.action == "free_completed":
            self._free.remove(address, size)
            self._live += size
        elif event.action == self._grows:
            self._free.remove(address, size)
            self._mapped -= size
        elif event.action == self._shrinks:
            self._free.add(address, size)
            self._mapped += size


class FreeMap:
    """Disjoint pieces of memory, neighbours merged, and which of them is the largest."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._size: dict[int, int] = {}
        self._sizes: list[int] = []

    @property
    def largest(self) -> int:
        return self._sizes[-1] if self._sizes else 0

    def pieces(self) -> list[tuple[int, int]]:
        """(address, size), in order."""
        return [(start, self._size[start]) for start in self._starts]

    def add(self, address: int, size: int) -> None:
        """Raises KeyError if part of it is in here already."""
        place = bisect_left(self._starts, address)
        end = address + size
        if place < len(self._starts) and self._starts[place] < end:
            raise KeyError(address)
        before = self._starts[place - 1] if place else None
        if before is not None and before + self._size[before] > address:
            raise KeyError(address)
        if place < len(self._starts) and self._starts[place] == end:
            size += self._drop(place)
        if before is not None and before + self._size[before] == address:
            address, size = before, size + self._drop(place - 1)
        self._put(address, size)

    def remove(self, address: int, size: int) -> None:
        """Raises KeyError unless all of it is in here."""
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            raise KeyError(address)
        start = self._starts[place]
        end = start + self._size[start]
        if address + size > end:
            raise KeyError(address)
        self._drop(place)
        if start < address:
            self._put(start, address - start)
        if address + size < end:
            self._put(address + size, end - address - size)

    def _put(self, address: int, size: int) -> None:
        insort(self._starts, address)
        self._size[address] = size
        insort(self._sizes, size)

    def _drop(self, place: int) -> int:
        size = self._size.pop(self._starts.pop(place))
        del self._sizes[bisect_left(self._sizes, size)]
        return size
