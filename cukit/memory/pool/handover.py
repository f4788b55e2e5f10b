"""Memory that goes from its last owner to the next: CuPy's allocator without the pool's lock.

A program that makes an array of a size that it has dropped before needs none of the pool's books:
the block is live in them before and after, and only its owner changes. When an owner dies, its tie
joins a queue (ties.py): of its stream and size. Whoever takes a tie out of the queue owns the
block, and taking is atomic, so that neither a lock nor the pool's order is needed for it.
Everything else goes the pool's own way, which empties the queues first.

Ctrl-C may strike wherever Python looks for signals: behind calls, at the start of functions, at
jumps back. A tie that a call returned would then be lost before it has a name. So ties are taken by
the step of a loop, between which and the name of the loop's variable Python looks for nothing; and
until the block has its next tie, whatever is raised puts the old one back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from cukit.memory.bookkeeping.ties import Tie
from cukit.memory.uninterrupted import Uninterrupted

if TYPE_CHECKING:
    from cukit.memory.pool.core import PoolCore

MOST_QUEUES = 128
"""Of streams and sizes: a miss looks into all of them. Later ones share the pool's own queue."""


class Queue(NamedTuple):
    """Ties of owners that are gone."""

    ties: deque[Any]
    taken: Iterator[Any]
    """Takes the latest: `for tie in taken: break`. Raises IndexError where nothing is."""
    note: Callable[[Any], None]
    """Adds one. Never blocks, and runs no bytecode."""


def make_queue() -> Queue:
    ties: deque[Any] = deque()
    return Queue(ties, map(deque.pop, repeat(ties)), ties.append)


class Queues:
    """The queues of a pool. They do not keep the pool."""

    def __init__(self) -> None:
        self.common = make_queue()
        """Of all that has no queue of its own."""
        self.all = [self.common]
        self.by_stream: dict[Hashable, dict[int, Queue]] = {}

    def of(self, stream: Hashable, size: int) -> Queue:
        """The queue of a stream and size, made when there are not too many. Under the pool's
        lock."""
        sizes = self.by_stream.setdefault(stream, {})
        queue = sizes.get(size)
        if queue is not None:
            return queue
        if len(self.all) > MOST_QUEUES:
            return self.common
        queue = make_queue()
        self.all.append(queue)
        sizes[size] = queue
        return queue

    def waiting(self) -> Iterator[Any]:
        """All that is in them."""
        for queue in self.all:
            yield from list(queue.ties)


def quick_allocator(
    pool: PoolCore, memory_type: Any, pointer_type: Any, slowly: Callable[[int], Any]
) -> Callable[[int], Any]:
    """An allocator for CuPy: bytes -> a pointer to memory that frees itself.

    memory_type: address, size, owner and device -> CuPy's kind of memory.
    pointer_type: memory and offset -> CuPy's pointer.
    slowly: the same allocator by way of the pool.
    """
    by_stream, device_id = pool._queues.by_stream, pool._device_id
    listeners, counters = pool._listeners, pool._counters
    current_stream, uncaptured, capture_id = (
        pool._current_stream, pool._uncaptured, pool._capture_id,
    )  # fmt: skip

    def allocate(size: int) -> Any:
        tie = None
        note: Any = None
        try:
            key = current_stream()
            ties, taken, note = by_stream[key][size]
            if (
                ties
                and (seen := ties[-1]).target.stream == key
                and (key in uncaptured or capture_id(key) is None)
                and not (seen.target.uses or listeners.active)
            ):
                for tie in taken:  # noqa: B007
                    break
                span = seen.target
                if tie is seen and span.tie is tie:
                    memory = memory_type(span.address, size, pool, device_id)
                    renewed = Tie(memory, note)
                    renewed.target = span
                    span.tie = renewed
                    counters.hits += 1  # no bytecode of it lets another thread in
                    return pointer_type(memory, 0)
        except BaseException as error:
            if tie is not None and tie.target.tie is tie:
                _put_back(note, tie)
            # No such queue, or another thread took the last of it.
            if not isinstance(error, (LookupError, TypeError)):
                raise
        else:
            if tie is not None:  # another thread took the one that was seen
                other, tie = tie, None
                note(other)
        return slowly(size)

    return allocate


def _put_back(note: Callable[[Any], None], tie: Any) -> None:
    with Uninterrupted():
        note(tie)
