"""Memory of captured graphs.

A graph uses the addresses that it was captured with each time it is launched. So what is allocated
during a capture stays with the graph, freed or not: it carries a CaptureKey in place of a stream,
and memory with such a key is reused only inside the same capture, on the same stream.
"""

from __future__ import annotations

from cukit.memory.bookkeeping.arena import Arena
from cukit.memory.bookkeeping.spans import Span
from cukit.memory.bookkeeping.streams import CaptureKey, Streams


def release_capture(capture: int, streams: Streams, arena: Arena, live: dict[int, Span]) -> None:
    """Gives the free memory of a capture to everybody, and live memory to the stream it was
    captured on. The graph is gone, and its last launch done."""
    keys = [key for key in streams.states if isinstance(key, CaptureKey) and key.capture == capture]
    for span in live.values():
        if span.stream in keys:
            assert isinstance(span.stream, CaptureKey)
            span.stream = streams.get(span.stream.stream).key
    for key in keys:
        state = streams.states[key]
        arena.flush(state)
        for span in state.index:
            # Merging may have made one span of two of the list.
            if not span.gone:
                arena.retag(span, None, 0)
        del streams.states[key]
