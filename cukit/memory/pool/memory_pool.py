"""The memory pool: what users hold. The rooms behind it do the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from cukit.core.scalars import check_integer
from cukit.errors import ConfigError, PointerError
from cukit.memory.bookkeeping.blocks import Event, Range
from cukit.memory.bookkeeping.statistics import DefragmentReport, PoolStatistics
from cukit.memory.bookkeeping.streams import CaptureKey, StreamState
from cukit.memory.pool.buffer import FOR_GOOD, DeviceBuffer, Holder
from cukit.memory.pool.capture import release_capture
from cukit.memory.pool.config import MemoryPoolConfig
from cukit.memory.pool.core import PoolCore
from cukit.memory.providers.provider import Provider
from cukit.memory.uninterrupted import Uninterrupted

AUTOMATIC_EVERY = 256
"""Allocations between two automatic defragmentations, at least: they wait for the device."""


class MemoryPool(PoolCore):
    """A pool of device memory that defragments.

    Streams are given as objects or handles that the provider understands; None is the current one.

    >>> from cukit.memory import HostProvider
    >>> pool = MemoryPool(MemoryPoolConfig(max_pool_size=64 << 20), HostProvider())
    >>> address = pool.allocate(1000)
    >>> pool.statistics().live_bytes
    1024
    >>> pool.free(address)
    """

    def __init__(
        self, config: MemoryPoolConfig | None = None, provider: Provider | None = None
    ) -> None:
        """`provider=None`: CUDA virtual memory, else cudaMalloc, else (no GPU) the host."""
        super().__init__(config, provider)
        self._next_defragment = 0
        if self.config.enable_defrag:
            self._supply.before_growing = self._defragment_if_fragmented

    def __repr__(self) -> str:
        counters, reserved = self._counters, self._pager.reserved_bytes
        return (
            f"<MemoryPool on {self.provider.name}: {counters.live_bytes} of {reserved} bytes live>"
        )

    def owns(self, address: int) -> bool:
        """Whether a live allocation of this pool starts at the address."""
        self._take_in_if_idle()
        try:
            return address in self._live
        except TypeError:  # no number, so nobody's address
            return False

    def used_on(self, address: int, stream: Any) -> None:
        """Tells that work on another stream uses the memory: its reuse will wait for that too."""
        with self._in_order():
            span = self._span_at(address)
            key = self._stream_key(stream)
            if key != span.stream and key not in span.uses:
                span.uses = (*span.uses, key)

    def allocate_buffer(self, size: int, stream: Any = None) -> DeviceBuffer:
        """A movable buffer of `size` bytes that frees itself."""
        with Uninterrupted():
            address = self.allocate(size, stream)
            span = self._live[address]
            holder = Holder(span, self._movables.note)
            if isinstance(span.stream, CaptureKey):
                holder.pins.append(FOR_GOOD)
            span.holder = holder
            self._has_buffers = True
            self._make_movable(holder)
            return DeviceBuffer(self, size, holder)

    # Order and numbers ------------------------------------------------------------------------

    def defragment(self) -> DefragmentReport:
        """Moves unpinned buffers and remaps pages so that free memory becomes one hole.

        Waits for the device. Raw allocations and pinned buffers keep their addresses.
        """
        with self._in_order():
            return self._defragmenter.run(self._current_stream())

    def trim(self) -> int:
        """Hands every wholly free page back to the device; returns the bytes. Waits for streams."""
        with self._in_order():
            self._supply.settle_waiting()
            return self._pager.trim()

    def statistics(self) -> PoolStatistics:
        """Numbers of this moment, with peaks and counts since the innermost open scope began."""
        with self._in_order():
            self._supply.poll_pending()
            return self._counters.statistics(
                self._defragmenter.survey(),
                self._pager,
                self._facts(),
                len(self._live),
                self.config.max_pool_size,
            )

    @contextmanager
    def scope(self) -> Iterator[Callable[[], PoolStatistics]]:
        """Counts and peaks of a stretch of code; scopes nest.

        >>> from cukit.memory import HostProvider
        >>> pool = MemoryPool(provider=HostProvider())
        >>> with pool.scope() as statistics:
        ...     pool.free(pool.allocate(512))
        >>> statistics().num_allocations, statistics().peak_live_bytes
        (1, 512)
        """
        final: list[PoolStatistics] = []
        opened = False

        def close() -> None:
            if opened and not final:
                with Uninterrupted():
                    final.append(self.statistics())
                    with self._in_order():
                        self._counters.close_scope(self._pager)

        try:
            with self._in_order():
                self._counters.open_scope(self._pager, self._facts())
                opened = True
            yield lambda: final[0] if final else self.statistics()
        finally:
            try:
                close()
            except KeyboardInterrupt:  # before it began
                close()
                raise

    def ranges(self) -> list[Range]:
        """Everything the pool holds, in address order, consistent at one moment."""
        with self._in_order():
            return self._arena.public_ranges()

    def snapshot(self) -> dict[str, Any]:
        """The pool as PyTorch's memory viewer wants it; :mod:`cukit.memory.snapshot` writes files
        of it, and adds what happened before."""
        from cukit.memory.snapshot import snapshot

        return snapshot(self)

    def add_listener(self, listener: Callable[[Event], None]) -> None:
        """`listener` is called for every event, in order, while the pool is locked: it must be
        quick and must not use the pool. What it raises is logged and goes no further."""
        if not callable(listener):
            raise ConfigError(f"add_listener: listener must be a function, got {listener!r}")
        with self._in_order():
            self._listeners.add(listener)

    def remove_listener(self, listener: Callable[[Event], None]) -> None:
        """Undoes one `add_listener`. Raises ConfigError if there is none to undo."""
        with self._in_order():
            try:
                self._listeners.remove(listener)
            except ValueError:
                raise ConfigError(f"remove_listener: {listener!r} does not listen") from None

    def release_capture(self, capture_id: int) -> None:
        """The graph of a capture is gone: its private memory goes back to the pool."""
        check_integer("release_capture", "capture_id", capture_id)
        with self._in_order():
            self.provider.synchronize_device()
            release_capture(capture_id, self._streams, self._arena, self._live)

    def close(self) -> None:
        """Gives everything back to the device. Raises PointerError while anything is live."""
        with self._in_order():
            if self._live:
                raise PointerError(
                    f"{self!r}: close with {len(self._live)} live allocations; free them first"
                )
            self.provider.synchronize_device()
            for capture in {key.capture for key in self._states if isinstance(key, CaptureKey)}:
                release_capture(capture, self._streams, self._arena, self._live)
            self._supply.settle_waiting()
            self._pager.trim()

    # As CuPy's allocator ----------------------------------------------------------------------

    def install(self) -> None:
        """Makes the pool CuPy's allocator, in all threads."""
        from cukit.memory.pool.cupy_allocator import install

        install(self)

    def uninstall(self) -> None:
        """Gives CuPy its own pool back."""
        from cukit.memory.pool.cupy_allocator import uninstall

        uninstall(self)

    def use(self) -> AbstractContextManager[None]:
        """`with pool.use():` CuPy allocates from the pool in this thread."""
        from cukit.memory.pool.cupy_allocator import use

        return use(self)

    def _facts(self) -> tuple[int, ...]:
        counters, defragmenter = self._counters, self._defragmenter
        return (
            counters.allocations,
            counters.hits,
            counters.allocations - len(self._live),
            self._ladder.failures,
            defragmenter.count,
            defragmenter.bytes_moved,
            self._pager.pages_remapped,
        )

    def _pin(self, holder: Holder, pin: object) -> int:
        with self._in_order():
            if holder.closed:
                raise PointerError("DeviceBuffer: used after close")
            if self._capture_id(self._current_stream()) is not None:
                holder.pins.append(FOR_GOOD)
            holder.pins.append(pin)
            self._movables.remove(holder)
            return holder.span.address

    def _make_movable(self, holder: Holder) -> None:
        """From here on a new buffer may be moved."""
        self._acquire()
        try:
            if self._busy or holder.pins:  # a garbage collection inside the pool
                self._movables.note(holder)
            else:
                self._movables.add(holder)
        finally:
            self._release()

    def _defragment_if_fragmented(self, size: int, state: StreamState) -> bool:
        """Before the pool grows: whether moving buffers is the better way, and did it."""
        counters = self._counters
        free = self._pager.reserved_bytes - counters.live_bytes - self._supply.pending_bytes
        early = counters.allocations < self._next_defragment
        if early or not self._has_buffers or free < size or self._supply.capturing():
            return False
        facts = self._defragmenter.holes()
        if facts.whole_pages >= size or facts.fragmentation <= self.config.defrag_threshold:
            return False
        report = self._defragmenter.run(state.key)
        self._next_defragment = counters.allocations + AUTOMATIC_EVERY
        return report.largest_free_after > report.largest_free_before
