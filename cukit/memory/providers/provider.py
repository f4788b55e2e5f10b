"""The interface between a pool and a device: pages, copies, and stream order.

The pool never calls CUDA itself; it calls a provider. There are three: CUDA virtual memory, plain
cudaMalloc, and a host provider with real pages and a single stream, which is always idle. With the
host provider, tests cover the whole pool without a GPU.

There are two kinds of provider:

* `can_remap` is true: `reserve` returns addresses without memory behind them; memory comes in pages
  of `page_bytes`, which are created, mapped at a page-aligned address, unmapped and remapped.
* `can_remap` is false: `reserve` returns usable memory (a segment), `release` frees it, and the
  page methods are never called.

Methods may be called during a graph capture of any stream; if the driver forbids a call during a
capture, the provider relaxes the thread's capture mode around the call. During a capture of the
requesting stream, the pool calls only memory methods, never methods that record, wait or
synchronise.

Every method is all or nothing: when it raises, nothing has changed. Lack of memory is reported by
`DeviceOutOfMemory`; any other exception is a failure, which the pool propagates after restoring a
consistent state.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

from cukit.memory.batched_copy import Moves
from cukit.memory.providers.slot_mover import SlotMoves
from cukit.memory.slot_grid import Grid


class DeviceOutOfMemory(Exception):  # noqa: N818
    """The device lacks memory. The pool handles it; callers of the pool get OutOfMemoryError."""


@runtime_checkable
class Provider(Protocol):
    """Memory and streams of one device.

    A stream is identified by its key: a hashable that is unique in the process. Handles are not:
    the driver recycles them, and the per-thread default streams all have the same one. `stream_key`
    converts a stream object or handle to a key.
    """

    name: str
    device_id: int
    page_bytes: int
    large_pages: int
    """Pages per large page; 1: there are no large pages."""
    can_remap: bool
    plans_slots: bool
    """Whether `move_slots` may be called."""
    uncaptured: Container[Hashable]
    """Keys of streams that cannot be captured; the pool does not call `capture_id` for them."""

    # Memory -----------------------------------------------------------------------------------

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the device. Memory of the pool counts as used."""
        ...

    def reserve(self, size: int) -> int:
        """Returns the page-aligned start of `size` contiguous addresses. Whether there is memory
        behind them depends on `can_remap`.

        `size` is a multiple of `page_bytes`. Raises DeviceOutOfMemory.
        """
        ...

    def release(self, address: int, size: int) -> None:
        """Undoes one complete `reserve`. No page is mapped there."""
        ...

    def create_pages(self, count: int) -> list[Any]:
        """Creates `count` unmapped physical pages, or raises DeviceOutOfMemory and creates none."""
        ...

    def create_large_pages(self, count: int) -> list[tuple[Any, ...]]:
        """Creates `count` large pages of `large_pages` pages each, which are mapped, unmapped and
        destroyed as a whole and in this order. Raises like `create_pages`."""
        ...

    def destroy_pages(self, pages: Sequence[Any]) -> None:
        """Returns unmapped physical pages to the driver."""
        ...

    def map_pages(self, address: int, pages: Sequence[Any]) -> None:
        """Maps `pages` contiguously from `address` on, readable and writable. A page may be mapped
        at several addresses at once."""
        ...

    def unmap_pages(self, address: int, count: int) -> None:
        """Unmaps `count` contiguous pages, not necessarily mapped by one call.

        The pool guarantees that no work in flight uses them.
        """
        ...

    def copy(self, moves: Moves, stream: Hashable) -> None:
        """Enqueues all `moves` on a stream, in any order or in parallel.

        No destination overlaps a source or another destination; addresses and sizes are multiples
        of 512.
        """
        ...

    def move_slots(
        self, grid: Grid, addresses: array[int], walls: array[int], stream: Hashable
    ) -> SlotMoves | None:
        """Enqueues a compaction of buffers of one size on a stream. The device computes the same
        plan as `bookkeeping.slots.plan_slots`. Never blocks the host.

        addresses: the address of each buffer; 0 for an unused row. walls: addresses and sizes,
        alternating, of the spans in the grid that no buffer can move to. Returns None, and enqueues
        nothing, if the compaction exceeds a limit of the device's planner or has too few buffers,
        or if the device lacks memory for the table of moves.
        """
        ...

    def array(self, address: int, shape: tuple[int, ...], dtype: Any, owner: object) -> Any:
        """An array (CuPy, or NumPy on the host) over memory of the pool. The array and its views
        keep `owner` alive."""
        ...

    # Streams ----------------------------------------------------------------------------------

    def current_stream(self) -> Hashable:
        """The key of this thread's current stream. Called by every allocation: must be fast."""
        ...

    def stream_key(self, stream: Any) -> Hashable:
        """The key of a stream given as an object (such as cupy.cuda.Stream) or as a handle."""
        ...

    def records_late(self, stream: Hashable) -> bool:
        """Whether `record` works for this stream at any later time and from any thread.

        False for per-thread default streams and for streams that other code may destroy: the pool
        then records an event at every free.
        """
        ...

    def record(self, stream: Hashable) -> Any:
        """Returns an event that completes after all work queued on the stream so far."""
        ...

    def is_done(self, event: Any) -> bool:
        """Whether the event is complete. Never blocks."""
        ...

    def wait(self, stream: Hashable, event: Any) -> None:
        """Makes later work on the stream wait for the event. Never blocks the host."""
        ...

    def synchronize(self, event: Any) -> None:
        """Blocks the host until the event is complete."""
        ...

    def discard(self, event: Any) -> None:
        """Returns an event to the provider, which may reuse it."""
        ...

    def synchronize_device(self) -> None:
        """Blocks the host until all work on the device is complete."""
        ...

    def capture_id(self, stream: Hashable) -> int | None:
        """The id of the graph capture that the stream takes part in, or None.

        Called by every allocation: must be fast when there is no capture.
        """
        ...

    def capturing(self) -> bool:
        """Whether any known stream of the device is being captured; the host must not wait for the
        device then."""
        ...

    def ended_captures(self) -> Sequence[int]:
        """Captures whose graphs, and all executable graphs made from them, are destroyed and
        complete. Each is returned once."""
        ...
