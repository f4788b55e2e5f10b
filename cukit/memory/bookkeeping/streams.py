"""Which freed memory which stream may use, and when the others may.

Memory freed on a stream can be given to that stream again at once: the work comes later in the same
queue. Any other stream has to wait for the free. Time on a stream is counted in epochs: a free
happens in the current epoch; `mark` records an event that ends it. What was freed in an epoch is
done with when the event of that epoch, or of a later one, is.

Marks cost a driver call, so they are made when somebody asks. Only streams that cannot be asked
later (Provider.records_late), and large blocks where several streams share the pool, are marked
when they are freed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from cukit.memory.bookkeeping.spans import SizeIndex, Span
from cukit.memory.providers.provider import Provider

MOST_MARKS = 64
MOST_STREAMS = 64
NEVER = 1 << 62


@dataclass(frozen=True)
class CaptureKey:
    """Stands in for a stream while that takes part in a graph capture."""

    capture: int
    stream: Hashable


class StreamState:
    """The free memory of one stream, and its epochs. The key None: memory that any may use."""

    __slots__ = (
        "bins",
        "dirty",
        "done",
        "epoch",
        "index",
        "key",
        "late",
        "mark_from",
        "marks",
        "private",
        "settled",
    )

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.bins: dict[int, list[Span]] = {}
        """CACHED spans by exact size, freed last on top."""
        self.index = SizeIndex()
        """FREE spans."""
        self.epoch = 1
        self.done = 0
        """Everything freed in this epoch or earlier is done with."""
        self.settled = 0
        """Up to which epoch free memory was given to everybody."""
        self.dirty = False
        """Something was freed in the current epoch."""
        self.marks: deque[tuple[int, Any]] = deque()
        self.late = True
        """Marks may be made later than the frees (Provider.records_late)."""
        self.mark_from = NEVER
        """Frees of at least this many bytes are marked at once."""
        self.private = isinstance(key, CaptureKey)
        """Never given to others: the graph will use it again when it is launched."""


class Streams:
    """All streams that a pool has seen."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self.shared = StreamState(None)
        self.states: dict[Hashable, StreamState] = {None: self.shared}
        self.most = MOST_STREAMS
        """With more streams than this it is time to forget some."""

    def get(self, key: Hashable) -> StreamState:
        """The state of a stream, made when it is first seen."""
        state = self.states.get(key)
        if state is None:
            state = StreamState(key)
            if not state.private:
                state.late = self._provider.records_late(key)
                state.mark_from = NEVER if state.late else 0
                self.states[key] = state
                if len(self.public()) > 1:
                    for one in self.public():
                        one.mark_from = min(one.mark_from, self._provider.page_bytes)
            self.states[key] = state
        return state

    def forget_unused(self, in_use: set[Hashable]) -> None:
        """Drops streams that own no memory: programs may make new streams without end."""
        for state in self.public():
            if not (state.key in in_use or state.bins or state.index or state.dirty or state.marks):
                del self.states[state.key]
        self.most = max(MOST_STREAMS, 2 * len(self.states))

    def public(self) -> list[StreamState]:
        """All but captures and the memory of nobody."""
        return [
            state for state in self.states.values() if state.key is not None and not state.private
        ]

    @property
    def single(self) -> bool:
        """Whether one stream has the pool for itself."""
        return len(self.states) <= 2

    def mark(self, state: StreamState) -> None:
        """Ends the stream's epoch with an event."""
        event = self._provider.record(state.key)
        state.marks.append((state.epoch, event))
        state.epoch += 1
        state.dirty = False
        if len(state.marks) > MOST_MARKS:
            # A later event says all that an earlier one does, only later: drop every second one.
            kept = list(state.marks)
            for _, dropped in kept[:-1:2]:
                self._provider.discard(dropped)
            state.marks = deque([*kept[1:-1:2], kept[-1]])

    def poll(self, state: StreamState) -> None:
        """Learns without blocking how far the stream is."""
        if state.private or self._provider.capture_id(state.key) is not None:
            return
        if state.dirty and state.late:
            self.mark(state)
        while state.marks and self._provider.is_done(state.marks[0][1]):
            self._reached(state)

    def _reached(self, state: StreamState) -> None:
        epoch, event = state.marks.popleft()
        state.done = max(state.done, epoch)
        self._provider.discard(event)

    def wait_for(self, state: StreamState) -> None:
        """Blocks the host until everything freed on the stream so far is done with."""
        if state.private or self._provider.capture_id(state.key) is not None:
            return
        if state.dirty and not state.late:
            # Freed while the stream was being captured, when nothing could be recorded.
            self._provider.synchronize_device()
            self._idle(state)
            return
        if state.dirty:
            self.mark(state)
        if state.marks:
            self._provider.synchronize(state.marks[-1][1])
            while state.marks:
                self._reached(state)

    def order_behind(self, waiting: Hashable, state: StreamState, epoch: int) -> None:
        """Makes a stream wait for what another one freed in `epoch`."""
        if epoch <= state.done:
            return
        if epoch >= state.epoch:
            self.mark(state)
        for marked, event in state.marks:
            if marked >= epoch:
                self._provider.wait(waiting, event)
                return
        raise AssertionError("an epoch that has ended has a mark, or is done")

    def mark_all_done(self) -> None:
        """The device is idle: nothing freed so far is in use."""
        for state in self.public():
            self._idle(state)

    def _idle(self, state: StreamState) -> None:
        state.done = state.epoch
        state.epoch += 1
        state.dirty = False
        while state.marks:
            self._provider.discard(state.marks.popleft()[1])
