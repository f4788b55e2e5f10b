"""What the pool asks of a device: memory in pages, copies, and the order of streams.

The pool's logic never calls CUDA. It talks to a provider, of which there are three: CUDA virtual
memory, plain cudaMalloc, and a host provider whose pages and streams are simulated, so that every
line of the logic is tested without a GPU.

Two kinds of provider share the protocol:

* `can_remap` is true: `reserve` returns addresses with nothing behind them; memory comes in pages
  of `page_bytes` that are created, mapped at a page-aligned address, unmapped and mapped elsewhere.
* `can_remap` is false: `reserve` returns usable memory at once (a segment), `release` frees it, and
  the page methods are never called.

Methods may be called while some stream is being captured into a graph: a provider whose driver
objects to that changes the thread's capture mode around the call. During a capture on the stream at
hand the pool calls only memory methods, never those that record, wait or synchronise.

Every method is all or nothing: when it raises, nothing has changed. Lack of memory is reported by
`DeviceOutOfMemory`; any other exception is a failure, which the pool passes on after it has put
itself back into a consistent state.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

from cukit.memory.batched_copy import Moves


class DeviceOutOfMemory(Exception):  # noqa: N818
    """The device cannot back the request. Never reaches users: the pool tries to make room."""


@runtime_checkable
class Provider(Protocol):
    """Memory and streams of one device.

    A stream is named by its key: a hashable that is unique for the life of the process, unlike a
    handle, which the driver recycles, and unlike the per-thread default stream, which is one handle
    for many streams. `stream_key` makes the key of whatever the user passed.
    """

    name: str
    device_id: int
    page_bytes: int
    large_pages: int
    """How many pages a large one has; 1: there are none."""
    can_remap: bool
    uncaptured: Container[Hashable]
    """Keys of streams that never take part in a capture: the pool does not ask `capture_id`."""

    # Memory -----------------------------------------------------------------------------------

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the device, the pool's own counted as used."""
        ...

    def reserve(self, size: int) -> int:
        """Returns the first of `size` contiguous addresses, page-aligned; see the module on kinds.

        `size` is a multiple of `page_bytes`. Raises DeviceOutOfMemory.
        """
        ...

    def release(self, address: int, size: int) -> None:
        """Undoes one `reserve`, whole. No page is mapped there any more."""
        ...

    def create_pages(self, count: int) -> list[Any]:
        """Creates physical pages, not mapped yet. Raises DeviceOutOfMemory, then none was made."""
        ...

    def create_large_pages(self, count: int) -> list[tuple[Any, ...]]:
        """Creates `count` times `large_pages` pages that belong together, to be mapped, unmapped
        and destroyed as a whole and in this order. Raises as `create_pages` does."""
        ...

    def destroy_pages(self, pages: Sequence[Any]) -> None:
        """Hands physical pages, mapped nowhere, back to the driver."""
        ...

    def map_pages(self, address: int, pages: Sequence[Any]) -> None:
        """Maps `pages` one behind the other from `address` on, readable and writable. A page may be
        mapped at further addresses meanwhile; its bytes are the same there."""
        ...

    def unmap_pages(self, address: int, count: int) -> None:
        """Unmaps `count` neighbouring pages, not necessarily mapped by one call.

        The pool has made sure that no work in flight uses them.
        """
        ...

    def copy(self, moves: Moves, stream: Hashable) -> None:
        """Queues all `moves` on a stream, in any order or at once.

        No destination overlaps a source or another destination; addresses and sizes are multiples
        of 512.
        """
        ...

    def array(self, address: int, shape: tuple[int, ...], dtype: Any, owner: object) -> Any:
        """An array (CuPy, or NumPy on the host) over memory of the pool; it, and every view of it,
        keeps `owner` alive."""
        ...

    # Streams ----------------------------------------------------------------------------------

    def current_stream(self) -> Hashable:
        """The key of this thread's current stream. Called by every allocation: has to be fast."""
        ...

    def stream_key(self, stream: Any) -> Hashable:
        """The key of a stream given as an object (such as cupy.cuda.Stream) or as a handle."""
        ...

    def records_late(self, stream: Hashable) -> bool:
        """Whether `record` works for this stream at any later time and from any thread.

        False for the per-thread default stream and for streams that somebody else may destroy: the
        pool then records an event at every free.
        """
        ...

    def record(self, stream: Hashable) -> Any:
        """Returns an event that is done when all work queued on the stream so far is."""
        ...

    def is_done(self, event: Any) -> bool:
        """Whether the event has been reached. Never blocks."""
        ...

    def wait(self, stream: Hashable, event: Any) -> None:
        """Makes later work of the stream wait for the event. Never blocks the host."""
        ...

    def synchronize(self, event: Any) -> None:
        """Blocks the host until the event has been reached."""
        ...

    def discard(self, event: Any) -> None:
        """The pool needs the event no more; the provider may use it again."""
        ...

    def synchronize_device(self) -> None:
        """Blocks the host until all work on the device is done."""
        ...

    def capture_id(self, stream: Hashable) -> int | None:
        """The number of the graph capture that the stream takes part in, or None.

        Called by every allocation: has to be fast when nothing is captured.
        """
        ...

    def capturing(self) -> bool:
        """Whether some stream of the device, as far as is known, takes part in a graph capture, so
        that the host must not wait for the device."""
        ...

    def ended_captures(self) -> Sequence[int]:
        """Captures whose graphs, and all that was instantiated from them, are destroyed and done;
        each is named once."""
        ...
