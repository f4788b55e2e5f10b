"""A simulated device: lagging streams, little memory, and calls that fail on demand."""

from __future__ import annotations

import ctypes
import random
import signal
import threading
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from cukit.memory import HostProvider, Move
from cukit.memory.batched_copy import Moves
from cukit.memory.bookkeeping.compaction import Ints
from cukit.memory.bookkeeping.slots import plan_slots
from cukit.memory.providers.slot_mover import SlotMoves
from cukit.memory.slot_grid import Grid

KIB = 1 << 10
PAGE = 64 * KIB


class InjectedError(RuntimeError):
    """Raised by the driver call that a test makes fail."""


class Event:
    """An event, complete once its stream has reached it."""

    def __init__(self) -> None:
        self.done = False
        self.discarded = False


class SimulatedProvider(HostProvider):
    """Work on streams runs when the test runs it, or when the host waits for it.

    Every call is checked against the protocol: no address is mapped twice, only mapped pages are
    unmapped, no discarded event is used, no event is recorded on a stream under capture.
    """

    uncaptured = ()
    plans_slots = True

    def __init__(
        self,
        total_bytes: int = 256 * PAGE,
        *,
        page_bytes: int = PAGE,
        large_pages: int = 1,
        can_remap: bool = True,
    ) -> None:
        super().__init__(
            total_bytes, page_bytes=page_bytes, large_pages=large_pages, can_remap=can_remap
        )
        self._thread = threading.local()
        self.queues: dict[Hashable, deque[Callable[[], bool]]] = {}
        self.lagging = False
        """Whether work stays queued until the test runs it; otherwise it runs immediately."""
        self.page_at: dict[int, Any] = {}
        self.segments: dict[int, int] = {}
        self.events: set[Event] = set()
        self.captures: dict[Hashable, int] = {}
        self.early_recorders: set[Hashable] = set()
        self.calls: list[str] = []
        self.fail_in: int | None = None
        """The number of calls before the one that fails; 0: the next call fails."""
        self.fail_with: Callable[[str], BaseException] = InjectedError
        self.interrupting = False
        """Whether the call that `fail_in` selects is interrupted by SIGINT instead of failing."""
        self.progress: random.Random | None = None
        """If set, streams make random progress during calls, as on a device."""
        self.adjacent_bytes = 0
        """If set, reservations within this many bytes are adjacent, as with cudaMalloc, instead of
        separated by gaps."""
        self._block: HostProvider | None = None
        self._addresses: list[tuple[int, int]] = []
        """(address, size) of the unreserved parts of `adjacent_bytes`."""

    # Failure ----------------------------------------------------------------------------------

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.progress is not None:
            for stream in list(self.queues):
                if self.progress.random() < 0.3:
                    self.run_one(stream)
        if self.fail_in is not None:
            self.fail_in -= 1
            if self.fail_in < 0:
                self.fail_in = None
                if not self.interrupting:
                    raise self.fail_with(name)
                signal.raise_signal(signal.SIGINT)

    # Memory -----------------------------------------------------------------------------------

    def reserve(self, size: int) -> int:
        assert size > 0
        assert size % self.page_bytes == 0
        self._called("reserve")
        address = self._reserve_adjacent(size) or super().reserve(size)
        self.segments[address] = size
        return address

    def _reserve_adjacent(self, size: int) -> int:
        """The lowest free range of `size` bytes; 0 if none is left or `adjacent_bytes` is 0."""
        if self.adjacent_bytes and not self._block:
            self._block = HostProvider(
                self.adjacent_bytes, page_bytes=self.page_bytes, can_remap=self.can_remap
            )
            self._addresses = [(self._block.reserve(self.adjacent_bytes), self.adjacent_bytes)]
        for number, (address, left) in enumerate(self._addresses):
            if left >= size:
                self._addresses[number] = address + size, left - size
                if not self.can_remap:
                    self._charge(size)
                return address
        return 0

    def release(self, address: int, size: int) -> None:
        assert self.segments[address] == size
        assert not any(address <= page < address + size for page in self.page_at)
        self._called("release")
        if address in self._reservations:
            super().release(address, size)
        else:
            self._addresses.append((address, size))
            self._join_addresses()
            if not self.can_remap:
                self.used_bytes -= size
        del self.segments[address]

    def _join_addresses(self) -> None:
        joined: list[tuple[int, int]] = []
        for address, size in sorted(self._addresses):
            if joined and sum(joined[-1]) == address:
                joined[-1] = joined[-1][0], joined[-1][1] + size
            else:
                joined.append((address, size))
        self._addresses = joined

    def create_pages(self, count: int) -> list[Any]:
        assert count > 0
        assert self.can_remap
        self._called("create_pages")
        return super().create_pages(count)

    def create_large_pages(self, count: int) -> list[tuple[Any, ...]]:
        assert count > 0
        assert self.can_remap
        self._called("create_large_pages")
        return super().create_large_pages(count)

    def _check_whole(self, pages: Sequence[Any]) -> None:
        """Large pages are mapped, unmapped and destroyed as a whole."""
        for first in self._large.intersection(pages):
            at = list(pages).index(first)
            part = range(first, first + self.large_pages * self.page_bytes, self.page_bytes)
            assert list(pages[at : at + self.large_pages]) == list(part), "a part of a large page"
        parts = self.large_pages * len(self._large.intersection(pages))
        size = self.large_pages * self.page_bytes
        assert parts == sum(any(f <= page < f + size for f in self._large) for page in pages)

    def destroy_pages(self, pages: Sequence[Any]) -> None:
        assert not set(pages) & set(self.page_at.values())
        self._check_whole(pages)
        self._called("destroy_pages")
        super().destroy_pages(pages)

    def map_pages(self, address: int, pages: Sequence[Any]) -> None:
        addresses = self._page_addresses(address, len(pages))
        assert not any(at in self.page_at for at in addresses)
        self._check_whole(pages)
        assert any(
            start <= address and address + len(pages) * self.page_bytes <= start + size
            for start, size in self.segments.items()
        )
        self._called("map_pages")
        super().map_pages(address, pages)
        self.page_at.update(zip(addresses, pages, strict=True))

    def unmap_pages(self, address: int, count: int) -> None:
        addresses = self._page_addresses(address, count)
        assert all(at in self.page_at for at in addresses)
        self._check_whole([self.page_at[at] for at in addresses])
        self._called("unmap_pages")
        super().unmap_pages(address, count)
        for at in addresses:
            del self.page_at[at]

    def _page_addresses(self, address: int, count: int) -> range:
        assert address % self.page_bytes == 0
        return range(address, address + count * self.page_bytes, self.page_bytes)

    def accessible(self, address: int, size: int) -> bool:
        """Whether all these bytes are backed by memory."""
        if not self.can_remap:
            return any(
                start <= address and address + size <= start + length
                for start, length in self.segments.items()
            )
        first = address // self.page_bytes * self.page_bytes
        return all(page in self.page_at for page in range(first, address + size, self.page_bytes))

    def copy(self, moves: Moves, stream: Hashable) -> None:
        self._called("copy")
        self._enqueue_copy(moves, stream)

    def move_slots(
        self, grid: Grid, addresses: array[int], walls: array[int], stream: Hashable
    ) -> SlotMoves | None:
        self._called("move_slots")
        at, fixed = np.array(addresses), np.array(walls, np.int64).reshape(-1, 2)
        rows = at.nonzero()[0]
        plan = plan_slots(grid, at[rows], fixed[:, 0], fixed[:, 1])
        if plan is None:
            return PlannedMoves(self, None)
        self._enqueue_copy(plan.steps[0], stream)
        slots = (plan.target[plan.moved] - grid.begin) >> grid.slot_shift
        return PlannedMoves(self, (rows[plan.moved], slots))

    def _enqueue_copy(self, moves: Moves, stream: Hashable) -> None:
        each = [Move(*row) for row in moves.tolist()]
        written = sorted((move.destination, move.destination + move.size) for move in each)
        for (_, end), (start, _) in pairwise(written):
            assert end <= start, "two destinations overlap"
        for move in each:
            assert move.size > 0
            assert not (move.size | move.source | move.destination) % 512
            for start, end in written:
                apart = end <= move.source or move.source + move.size <= start
                assert apart, "a destination overlaps a source"

        def run() -> bool:
            for move in each:
                assert self.accessible(move.source, move.size)
                assert self.accessible(move.destination, move.size)
            HostProvider.copy(self, moves, stream)
            return True

        self._queue(stream, run)

    # Streams ----------------------------------------------------------------------------------

    def current_stream(self) -> Hashable:
        return getattr(self._thread, "stream", 0)

    @contextmanager
    def on(self, stream: Hashable) -> Iterator[None]:
        """Makes a stream current in this thread."""
        before = self.current_stream()
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def records_late(self, stream: Hashable) -> bool:
        return stream not in self.early_recorders

    def _queue(self, stream: Hashable, operation: Callable[[], bool]) -> None:
        self.queues.setdefault(stream, deque()).append(operation)
        if not self.lagging:
            self.run_all()

    def launch(self, stream: Hashable, work: Callable[[], None]) -> None:
        """Enqueues a kernel."""
        assert stream not in self.captures

        def run() -> bool:
            work()
            return True

        self._queue(stream, run)

    def run_one(self, stream: Hashable) -> bool:
        """Runs the next operation of a stream; returns False if there is none or it must wait."""
        queue = self.queues.get(stream)
        if not queue or not queue[0]():
            return False
        queue.popleft()
        return True

    def run_all(self) -> None:
        """Runs everything queued."""
        while self._run_one_of_each():
            pass
        assert not any(self.queues.values()), "streams wait for each other in a cycle"

    def _run_one_of_each(self) -> int:
        """Runs the next operation of each stream; returns the number of operations."""
        return sum([self.run_one(stream) for stream in list(self.queues)])

    def record(self, stream: Hashable) -> Any:
        assert stream not in self.captures, "recorded on a stream under capture"
        self._called("record")
        event = Event()
        self.events.add(event)

        def run() -> bool:
            event.done = True
            return True

        self._queue(stream, run)
        return event

    def is_done(self, event: Any) -> bool:
        assert not event.discarded
        self._called("is_done")
        return bool(event.done)

    def wait(self, stream: Hashable, event: Any) -> None:
        assert stream not in self.captures, "a stream under capture waits for outside work"
        assert not event.discarded
        self._called("wait")
        self._queue(stream, lambda: event.done)

    def synchronize(self, event: Any) -> None:
        assert not event.discarded
        self._called("synchronize")
        while not event.done:
            assert self._run_one_of_each()

    def discard(self, event: Any) -> None:
        assert not event.discarded
        event.discarded = True
        self.events.remove(event)

    def synchronize_device(self) -> None:
        assert not self.captures, "the host waits during a capture"
        self._called("synchronize_device")
        self.run_all()

    def capturing(self) -> bool:
        return bool(self.captures)

    def capture_id(self, stream: Hashable) -> int | None:
        return self.captures.get(stream)


class PlannedMoves:
    """A compaction planned by the simulated device."""

    def __init__(self, provider: SimulatedProvider, moves: tuple[Ints, Ints] | None) -> None:
        self._provider, self._moves = provider, moves

    def wait(self) -> tuple[Ints, Ints] | None:
        self._provider._called("wait for a plan")
        return self._moves


def fill(address: int, size: int, pattern: int) -> None:
    """Writes a byte pattern that depends on `pattern`."""
    ctypes.memset(address, pattern & 0xFF, size)
    if size >= 8:
        ctypes.c_uint64.from_address(address).value = pattern
        ctypes.c_uint64.from_address(address + size - 8).value = pattern


def holds(address: int, size: int, pattern: int) -> bool:
    """Whether the bytes match `fill`."""
    expected = (ctypes.c_char * size)()
    fill(ctypes.addressof(expected), size, pattern)
    return ctypes.string_at(address, size) == expected.raw
