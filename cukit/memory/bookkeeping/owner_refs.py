"""Weak references that report the destruction of a block's owner, and their queues.

A destructor written in Python can lose a Ctrl-C: if the signal is handled at the destructor's first
bytecode, KeyboardInterrupt is raised where it cannot propagate, and the free never happens. The
callback of an OwnerRef is `deque.append`, which runs no bytecode.

Popping a reference from a queue is atomic and makes the caller the block's only owner, so a block
can pass from one owner to the next without the pool's lock (pool/cupy_allocator.py). All other
operations of the pool first drain the queues under the lock.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from itertools import repeat
from typing import Any, NamedTuple

MAX_QUEUES = 128
"""The most queues that each serve one stream and size. Every miss scans all of them, so further
sizes share the common queue."""


class OwnerRef(weakref.ref[Any]):
    """Appended to the pool's queue when its referent is destroyed; must stay referenced until
    then."""

    __slots__ = ("target",)

    target: Any
    """What to free: the Span of a block."""


class BufferRef(OwnerRef):
    """The reference to a DeviceBuffer; `target` is its Holder."""

    __slots__ = ()


class PinRef(OwnerRef):
    """The reference to an object that pins a buffer; `target` is the Holder to unpin."""

    __slots__ = ()


class Queue(NamedTuple):
    """References whose owners are destroyed."""

    refs: deque[Any]
    popped: Iterator[Any]
    """Pops the newest: `for ref in popped: break`. Raises IndexError when the queue is empty."""
    append: Callable[[Any], None]
    """Never blocks and runs no bytecode."""


def make_queue() -> Queue:
    refs: deque[Any] = deque()
    return Queue(refs, map(deque.pop, repeat(refs)), refs.append)


class Queues:
    """The queues of a pool. They hold no reference to the pool."""

    def __init__(self) -> None:
        self.common = make_queue()
        """For everything without a queue of its own."""
        self.all = [self.common]
        self.by_stream: dict[Hashable, dict[int, Queue]] = {}

    def of(self, stream: Hashable, size: int) -> Queue:
        """The queue of a stream and size, created if needed; the common queue if there are already
        MAX_QUEUES others. Needs the pool's lock."""
        sizes = self.by_stream.setdefault(stream, {})
        queue = sizes.get(size)
        if queue is not None:
            return queue
        if len(self.all) > MAX_QUEUES:
            return self.common
        queue = make_queue()
        self.all.append(queue)
        sizes[size] = queue
        return queue

    def waiting(self) -> Iterator[Any]:
        """The contents of all queues."""
        for queue in self.all:
            yield from list(queue.refs)
