"""Stream order: which freed memory a stream may reuse, and when other streams may.

Memory freed on a stream can be reused on that stream immediately, because the new work is queued
after the old. Any other stream must wait until the work before the free is complete. Time on a
stream is counted in epochs: a free happens in the current epoch, and `mark` records an event that
ends the epoch. Memory freed in an epoch is reusable when the event of that epoch, or of a later
one, is complete.

A mark costs a driver call, so marks are made on demand. Marks are made at the free only on streams
on which events cannot be recorded later (Provider.records_late), and for large blocks if several
streams share the pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from cukit.memory.bookkeeping.spans import SizeIndex, Span
from cukit.memory.providers.provider import Provider

MAX_MARKS = 64
MAX_STREAMS = 64
NEVER = 1 << 62


@dataclass(frozen=True)
class CaptureKey:
    """Replaces the key of a stream during a graph capture.

    A graph uses the addresses of its capture in every launch. Memory allocated during a capture is
    therefore private to the graph, freed or not: it carries a CaptureKey in place of the stream's
    key, and is reused only in the same capture on the same stream.
    """

    capture: int
    stream: Hashable


class StreamState:
    """The free memory of one stream, and its epochs. Key None: memory that any stream may use."""

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
        """CACHED spans by exact size, most recently freed last."""
        self.index = SizeIndex()
        """FREE spans."""
        self.epoch = 1
        self.done = 0
        """Memory freed in this epoch or earlier is no longer in use."""
        self.settled = 0
        """Memory freed up to this epoch was made available to all streams."""
        self.dirty = False
        """Memory was freed in the current epoch."""
        self.marks: deque[tuple[int, Any]] = deque()
        self.late = True
        """Marks may be made after the frees (Provider.records_late)."""
        self.mark_from = NEVER
        """Frees of at least this many bytes are marked immediately."""
        self.private = isinstance(key, CaptureKey)
        """Memory of a captured graph; never given to other streams, since every launch uses it."""


class Streams:
    """The states of all streams that have used a pool."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self.shared = StreamState(None)
        self.states: dict[Hashable, StreamState] = {None: self.shared}
        self.most = MAX_STREAMS
        """Above this number of streams, unused ones are dropped."""

    def get(self, key: Hashable) -> StreamState:
        """The state of a stream, created on first use."""
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
        """Drops streams that own no memory, because a program may create any number of streams."""
        for state in self.public():
            if not (state.key in in_use or state.bins or state.index or state.dirty or state.marks):
                del self.states[state.key]
        self.most = max(MAX_STREAMS, 2 * len(self.states))

    def public(self) -> list[StreamState]:
        """All streams except captures and the shared state."""
        return [
            state for state in self.states.values() if state.key is not None and not state.private
        ]

    @property
    def single(self) -> bool:
        """Whether at most one stream uses the pool; a capture counts as a stream."""
        return len(self.states) <= 2

    def mark(self, state: StreamState) -> None:
        """Ends the stream's epoch with an event."""
        event = self._provider.record(state.key)
        state.marks.append((state.epoch, event))
        state.epoch += 1
        state.dirty = False
        if len(state.marks) > MAX_MARKS:
            # A later event also covers the earlier epochs, so every second event is dropped.
            kept = list(state.marks)
            for _, dropped in kept[:-1:2]:
                self._provider.discard(dropped)
            state.marks = deque([*kept[1:-1:2], kept[-1]])

    def poll(self, state: StreamState) -> None:
        """Updates `done` without blocking."""
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
        """Blocks the host until no memory freed on the stream so far is in use."""
        if state.private or self._provider.capture_id(state.key) is not None:
            return
        if state.dirty and not state.late:
            # Freed during a capture of the stream, when no event could be recorded.
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
        """Makes the stream `waiting` wait until memory that `state` freed in `epoch` is unused."""
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
        """Records that the device is idle: no memory freed so far is in use."""
        for state in self.public():
            self._idle(state)

    def _idle(self, state: StreamState) -> None:
        state.done = state.epoch
        state.epoch += 1
        state.dirty = False
        while state.marks:
            self._provider.discard(state.marks.popleft()[1])
