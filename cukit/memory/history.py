"""The latest events of a pool, for plots and snapshots; fragmentation over time."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from cukit.core.scalars import check_integer
from cukit.memory.bookkeeping.blocks import Event, Range
from cukit.memory.pool.memory_pool import MemoryPool, check_pool

MAX_EVENTS = 100_000


class History:
    """Records the latest events of a pool until `close`. A context manager.

    >>> with History(pool) as history:                      # doctest: +SKIP
    ...     train()
    ...     print(picture.timeline_svg(history.timeline()))
    """

    def __init__(self, pool: MemoryPool, max_events: int = MAX_EVENTS) -> None:
        check_pool("History", pool)
        check_integer("History", "max_events", max_events, least=1, most=(1 << 31) - 1)
        self._pool = pool
        self._events: deque[Event] = deque(maxlen=max_events)
        pool.add_listener(self._events.append)

    @property
    def events(self) -> list[Event]:
        """Oldest first."""
        return list(self._events)

    def events_and_ranges(self) -> tuple[list[Event], list[Range]]:
        """The events, and the ranges after the last event.

        If other threads change the pool during each of 1000 attempts, the ranges may be newer.
        """
        for _ in range(1000):
            before = self._latest()
            ranges = self._pool.ranges()
            if self._latest() is before:
                return self.events, ranges
            threading.Event().wait(0.001)  # another thread is busy allocating
        return self.events, ranges

    def timeline(self) -> list[Sample]:
        """The pool after each recorded event, oldest first."""
        return timeline(*self.events_and_ranges(), remaps=self._pool.provider.can_remap)

    def close(self) -> None:
        """Stops recording. Recorded events stay available."""
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
    """Seconds of time.perf_counter()."""
    live: int
    """Live and pending memory."""
    mapped: int
    """Addresses backed by memory: live and free."""
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
    """The pool after each event, computed backwards from the state after the last one.

    Missing earlier events do not change the result. If an event contradicts later events (because
    they are from different pools), the timeline begins after it.

    remaps: whether memory is mapped in pages; if so, reserving addresses takes no memory.
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
"""The events that add memory and remove it, by `remaps`."""


class _State:
    """Free memory while events are undone from the last to the first."""

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
        """Raises KeyError if the event cannot have happened."""
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
    """Disjoint pieces of memory, with adjacent pieces merged, and the size of the largest."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._size: dict[int, int] = {}
        self._sizes: list[int] = []

    @property
    def largest(self) -> int:
        return self._sizes[-1] if self._sizes else 0

    def pieces(self) -> list[tuple[int, int]]:
        """(address, size) in address order."""
        return [(start, self._size[start]) for start in self._starts]

    def add(self, address: int, size: int) -> None:
        """Raises KeyError if the map already contains part of this piece."""
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
        """Raises KeyError unless the map contains all of this piece."""
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
