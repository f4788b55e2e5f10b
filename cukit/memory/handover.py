"""Memory that goes from its last owner to the next: CuPy's allocator without the pool's lock.

A program that makes an array where it has just dropped one of the same size needs none of the
pool's books: the block is live in them before and after, and only its owner changes. When an owner
dies, its tie joins the pool's queue (ties.py). Whoever takes a tie out of the queue owns the block,
and taking is atomic, so that neither a lock nor the pool's order is needed for it. Everything else
goes the pool's own way.

Ctrl-C may strike wherever Python looks for signals: behind calls, at the start of functions, at
jumps back. A tie that a call returned would then be lost before it has a name. So ties are taken by
the step of a loop, between which and the name of the loop's variable Python looks for nothing; and
until the block has its next tie, whatever is raised puts the old one back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any

from cukit.memory.interrupts import Uninterrupted
from cukit.memory.ties import Tie

if TYPE_CHECKING:
    from cukit.memory.core import PoolCore


def taken_from(queue: deque[Any]) -> Iterator[Any]:
    """Takes from the left: `for item in taken: break`. Raises IndexError where nothing is."""
    return map(deque.popleft, repeat(queue))


def quick_allocator(
    pool: PoolCore, memory_type: Any, pointer_type: Any, slowly: Callable[[int], Any]
) -> Callable[[int], Any]:
    """An allocator for CuPy: bytes -> a pointer to memory that frees itself.

    memory_type: address, size, owner and device -> CuPy's kind of memory.
    pointer_type: memory and offset -> CuPy's pointer.
    slowly: the same allocator by way of the pool.
    """
    queue, taken = pool._put_aside, taken_from(pool._put_aside)
    note = pool.free_from_finalizer
    listeners, counters, device_id = pool._listeners, pool._counters, pool._device_id
    current_stream, uncaptured, capture_id = (
        pool._current_stream, pool._uncaptured, pool._capture_id,
    )  # fmt: skip

    def allocate(size: int) -> Any:
        tie = None
        try:
            if queue:
                seen = queue[0]
                if (
                    type(seen) is Tie
                    and (span := seen.target).requested == size
                    and span.stream == (key := current_stream())
                    and (key in uncaptured or capture_id(key) is None)
                    and not (span.uses or listeners.active)
                ):
                    for tie in taken:  # noqa: B007
                        break
                    if tie is seen and span.tie is tie:
                        memory = memory_type(span.address, size, pool, device_id)
                        renewed = Tie(memory, note)
                        renewed.target = span
                        span.tie = renewed
                        counters.hits += 1  # no bytecode of it lets another thread in
                        return pointer_type(memory, 0)
        except BaseException as error:
            if tie is not None and tie.target.tie is tie:
                _put_back(queue, tie)
            if not isinstance(error, IndexError):  # another thread took the last one
                raise
        else:
            if tie is not None:  # another thread took the one that was seen
                other, tie = tie, None
                queue.appendleft(other)
        return slowly(size)

    return allocate


def _put_back(queue: deque[Any], tie: Any) -> None:
    with Uninterrupted():
        queue.appendleft(tie)
