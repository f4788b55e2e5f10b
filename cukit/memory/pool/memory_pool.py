"""The memory pool.

`allocate` and `free` have a fast path: a request of a size that was freed before on the same stream
is served from a list of exactly that size, without merging, searching or driver calls. Everything
else happens on a miss, in the other modules of this package.

Finalizers only append to a queue (bookkeeping/owner_refs.py). The next call of the pool does these
deferred frees, or CuPy's allocator passes the block to its next owner without taking the lock
(cupy_allocator.py). A garbage collection may run finalizers, and other code, inside any of these
methods, and that code may use the same pool. The lock is therefore reentrant, `_busy` shows that it
is held, and a reentrant `free` is deferred.

Ctrl-C: slow paths run inside Uninterrupted, which costs as much as a whole fast call. Fast paths
are therefore interruptible wherever Python checks for signals (after calls, at function starts);
`_undo_interrupted` then undoes an allocation or finishes a free, and unlocks.
"""

from __future__ import annotations

import logging
import operator
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, TypeAlias, TypeVar

from cukit.core.scalars import check_integer
from cukit.errors import ConfigError, CukitError, PointerError
from cukit.memory.bookkeeping.arena import Arena
from cukit.memory.bookkeeping.blocks import Event, Range
from cukit.memory.bookkeeping.movables import Movables
from cukit.memory.bookkeeping.owner_refs import BufferRef, OwnerRef, PinRef, Queue, Queues
from cukit.memory.bookkeeping.spans import (
    CACHED,
    FREE,
    LIVE,
    PENDING,
    PERMANENT,
    Holder,
    Span,
)
from cukit.memory.bookkeeping.statistics import DefragmentReport, PoolStatistics
from cukit.memory.bookkeeping.streams import CaptureKey, Streams, StreamState
from cukit.memory.bookkeeping.viewer_format import describe, describe_statistics
from cukit.memory.pool import cupy_allocator
from cukit.memory.pool.buffer import DeviceBuffer
from cukit.memory.pool.config import ALIGNMENT, MemoryPoolConfig
from cukit.memory.pool.counters import Counters
from cukit.memory.pool.defragment import Defragmenter
from cukit.memory.pool.finalize import release_memory
from cukit.memory.pool.listeners import Listeners
from cukit.memory.pool.oom import Recovery
from cukit.memory.pool.pager import Pager
from cukit.memory.pool.stitch import Stitcher
from cukit.memory.pool.supply import Supply
from cukit.memory.providers.default import default_provider
from cukit.memory.providers.provider import Provider
from cukit.memory.uninterrupted import Uninterrupted

LOG = logging.getLogger(__name__)

T = TypeVar("T")

Free: TypeAlias = OwnerRef | int | tuple[int, Any] | Holder
"""A deferred free: the reference of an owner, an address, an address and a stream, or a buffer."""

ROUND_UP = ALIGNMENT - 1
ROUND_DOWN = -ALIGNMENT

MIN_ALLOCATIONS_BETWEEN_DEFRAGMENTS = 256
"""Minimum number of allocations between two automatic defragmentations, each of which synchronises
the device."""

_pools: weakref.WeakSet[MemoryPool] = weakref.WeakSet()


class MemoryPool:
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
        """`provider=None`: CUDA virtual memory, cudaMalloc if that is unavailable, or the host if
        there is no GPU."""
        if config is None:
            config = MemoryPoolConfig()
        if not isinstance(config, MemoryPoolConfig):
            raise ConfigError(
                f"MemoryPool: config must be a MemoryPoolConfig or None, got {config!r}"
            )
        if provider is None:
            provider = default_provider(most_bytes=config.max_pool_size)
        if isinstance(provider, type) or not isinstance(provider, Provider):
            raise ConfigError(
                f"MemoryPool: provider must be a Provider (such as HostProvider()) or None, "
                f"got {provider!r}"
            )
        self.config, self.provider = config, provider
        limit = config.max_pool_size
        if limit is not None and limit < provider.page_bytes:
            raise ConfigError(
                f"MemoryPoolConfig: max_pool_size: expected at least a page of "
                f"{provider.page_bytes} bytes, got {limit}"
            )
        self._device_id = provider.device_id
        self._current_stream = provider.current_stream
        self._stream_key = provider.stream_key
        self._capture_id: Callable[[Hashable], int | None] = provider.capture_id
        self._uncaptured = provider.uncaptured
        self._lock: Any = threading.RLock()
        self._acquire: Callable[[], object] = self._lock.acquire
        self._release: Callable[[], object] = self._lock.release
        self._busy = False
        self._queues = Queues()
        self._common_queue = (self._queues.common,)
        self._deferred: deque[Free] = self._queues.common.refs
        self._draining: Free | None = None
        """Popped from a queue but not freed yet."""
        self._requesting: list[Hashable] = []
        """Streams of unfinished allocations, which may have unlocked the pool (`_unlocked`)."""
        self._live: dict[int, Span] = {}
        self._counters = Counters()
        self._listeners = Listeners(config.call_site_depth)

        emit = self._listeners.emit
        self._streams = Streams(provider)
        self._states = self._streams.states
        self._arena = Arena(self._streams, provider.page_bytes)
        self._pager = Pager(config, provider, self._arena, emit)
        stitcher = Stitcher(provider, self._arena, self._pager, emit)
        self._supply = Supply(provider, self._arena, self._pager, stitcher, self._streams, emit)
        self._movables = Movables(self._live, self._arena.replace_first)
        self._defragmenter = Defragmenter(
            provider,
            self._arena,
            self._pager,
            stitcher,
            self._supply,
            self._live,
            self._movables,
            self._listeners,
        )
        self._recovery = Recovery(
            config, provider, self._supply, self._pager, self._defragmenter, self._unlocked, emit
        )
        self._has_buffers = False
        self.free_from_finalizer = self._queues.common.append
        """`free(address)` for finalizers. Never blocks, never raises, and runs no bytecode in which
        an interrupt could be lost; the next call of the pool does the free."""
        self._parts: tuple[
            Callable[[], object],
            Callable[[], object],
            deque[Free],
            dict[Hashable, StreamState],
            dict[int, Span],
            Counters,
            Listeners,
        ] = (
            self._acquire,
            self._release,
            self._deferred,
            self._states,
            self._live,
            self._counters,
            self._listeners,
        )
        """One attribute access instead of seven on the fast paths."""
        _pools.add(self)
        parts = (provider, self._streams, self._pager, self._live, self._queues, os.getpid())
        weakref.finalize(self, release_memory, *parts).atexit = False
        if config.initial_pool_size and not self._pager.prepare(config.initial_pool_size):
            raise ConfigError(
                f"MemoryPoolConfig: initial_pool_size: the device lacks "
                f"{config.initial_pool_size} bytes"
            )
        self._next_defragment = 0
        if config.enable_defrag:
            self._supply.before_growing = self._defragment_if_fragmented

    def __repr__(self) -> str:
        counters, reserved = self._counters, self._pager.reserved_bytes
        return (
            f"<MemoryPool on {self.provider.name}: {counters.live_bytes} of {reserved} bytes live>"
        )

    # Allocating and freeing -------------------------------------------------------------------

    def allocate(self, size: int, stream: Any = None, _owner: Any = None) -> int:
        """Returns the address, a multiple of 512, of `size` bytes that `stream` may use.

        Raises OutOfMemoryError, whose text and `report` describe how the memory is used.
        """
        # `_owner` creates CuPy's memory object, which is returned instead of the address. Once it
        # exists, its destruction frees the memory, even if an interrupt prevents the return.
        key = self._current_stream() if stream is None else self._stream_key(stream)
        if key not in self._uncaptured and (capture := self._capture_id(key)) is not None:
            key = CaptureKey(capture, key)
        if type(size) is not int:
            size = _whole(size)
        rounded = (size + ROUND_UP) & ROUND_DOWN
        if rounded <= 0:
            rounded = self._smallest(size)
        acquire, release, deferred, states, live_spans, counters, listeners = self._parts
        span: Span | None = None
        found: list[Span] | None = None
        opened = False
        try:
            acquire()
            if self._busy:
                release()
                raise RuntimeError("memory pool: allocation from inside the pool (by a listener?)")
            opened = self._busy = True
            if deferred:
                self._drain(self._common_queue)
            try:
                if listeners.active:
                    raise KeyError
                cached = states[key].bins[rounded]
                span = cached[-1]
                del cached[-1]
            except (KeyError, IndexError):
                found = []
                self._allocate_slowly(rounded, key, found)
                span = found[0]
            else:
                span.state = LIVE
                live_spans[span.address] = span
                counters.hits += 1
                live = counters.live_bytes + rounded
                counters.live_bytes = live
                if live > counters.peak_live_bytes:
                    counters.peak_live_bytes = live
            span.requested = size
            append = None if _owner is None else self._queues.of(key, size).append
            self._busy = False
            release()
            if _owner is None:
                return span.address
            memory = _owner(span.address, size, self, self._device_id)
            ref = OwnerRef(memory, append)
            ref.target = span
            span.owner_ref = ref
            return memory  # type: ignore[no-any-return]
        except BaseException:
            self._undo_interrupted(opened, found[0] if found else span)
            raise

    def free(self, address: int, stream: Any = None) -> None:
        """Frees memory after the work queued on `stream` (None: the stream it was allocated on).

        Raises PointerError for anything but the address of a live allocation of this pool.
        """
        acquire, release, deferred, states, live_spans, counters, listeners = self._parts
        span: Span | None = None
        opened = False
        try:
            acquire()
            if self._busy:  # a garbage collection inside the pool
                deferred.append((address, stream))
                release()
                return
            opened = self._busy = True
            if deferred:
                self._drain(self._common_queue)
            try:
                found = live_spans[address]
            except (KeyError, TypeError):
                with Uninterrupted():
                    why = self._explain(address)
                self._busy = False
                release()
                raise PointerError(why) from None
            state = states[found.stream]
            size = found.size
            if (
                stream is not None
                or size >= state.mark_from
                or found.uses
                or found.holder is not None
                or listeners.active
            ):
                with Uninterrupted():
                    try:
                        self._free_slowly(found, stream)
                    except BaseException:
                        self._busy = False
                        release()
                        raise
            else:
                cached = state.bins.get(size)
                span = found
                del live_spans[address]
                span.state = CACHED
                span.owner_ref = None
                span.epoch = state.epoch
                state.dirty = True
                counters.live_bytes -= size
                if cached is None:
                    state.bins[size] = [span]
                else:
                    cached.append(span)
                span = None
            self._busy = False
            release()
        except BaseException:
            self._undo_interrupted(opened, span)
            raise

    def owns(self, address: int) -> bool:
        """Whether a live allocation of this pool starts at the address."""
        self._drain_if_idle()
        try:
            return address in self._live or self._movables.starts_at(address)
        except TypeError:  # unhashable, so no address
            return False

    def used_on(self, address: int, stream: Any) -> None:
        """Declares that work on another stream uses the memory: after `free`, the memory is reused
        only when the work queued on that stream before the free is complete."""
        with self._locked():
            span = self._span_at(address)
            key = self._stream_key(stream)
            if key != span.stream and key not in span.uses:
                span.uses = (*span.uses, key)

    def allocate_buffer(self, size: int, stream: Any = None) -> DeviceBuffer:
        """A movable buffer of `size` bytes that is freed when it is closed or collected."""
        with Uninterrupted():
            address = self.allocate(size, stream)
            span = self._live[address]
            holder = Holder(span, self._movables.note)
            if isinstance(span.stream, CaptureKey):
                holder.pins.append(PERMANENT)
            span.holder = holder
            self._has_buffers = True
            self._make_movable(holder)
            return DeviceBuffer(self, size, holder)

    # Maintenance and reports --------------------------------------------------------------------

    def defragment(self) -> DefragmentReport:
        """Moves unpinned buffers and remaps pages so that free memory becomes one hole.

        Synchronises the device. Raw allocations and pinned buffers keep their addresses.
        """
        with self._locked():
            return self._defragmenter.run(self._current_stream())

    def trim(self) -> int:
        """Releases all wholly free pages to the device, after waiting for all streams; returns the
        number of bytes."""
        with self._locked():
            self._supply.settle_waiting()
            return self._pager.trim()

    def statistics(self) -> PoolStatistics:
        """Current numbers, with the peaks and counts of the innermost open scope."""
        with self._locked():
            self._supply.poll_pending()
            return self._counters.statistics(
                self._defragmenter.survey(),
                self._pager,
                self._totals(),
                self._num_live(),
                self.config.max_pool_size,
            )

    def _num_live(self) -> int:
        return len(self._live) + self._movables.num_packed

    def _totals(self) -> tuple[int, ...]:
        counters, defragmenter = self._counters, self._defragmenter
        return (
            counters.allocations,
            counters.hits,
            counters.allocations - self._num_live(),
            self._recovery.failures,
            defragmenter.count,
            defragmenter.bytes_moved,
            self._pager.pages_remapped,
        )

    @contextmanager
    def scope(self) -> Iterator[Callable[[], PoolStatistics]]:
        """Counts and peaks of a section of code; scopes nest.

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
                    with self._locked():
                        self._counters.close_scope(self._pager)

        try:
            with self._locked():
                self._counters.open_scope(self._pager, self._totals())
                opened = True
            yield lambda: final[0] if final else self.statistics()
        finally:
            try:
                close()
            except KeyboardInterrupt:  # interrupted before `close` began
                close()
                raise

    def ranges(self) -> list[Range]:
        """All memory that the pool holds, in address order, as one consistent copy."""
        with self._locked():
            self._movables.unpack_all()
            return self._arena.public_ranges()

    def snapshot(self) -> dict[str, Any]:
        """The pool in the format of PyTorch's memory viewer. :mod:`cukit.memory.snapshot` writes
        such snapshots to files and adds the events of a History."""
        ranges, provider = self.ranges(), self.provider
        content = describe(ranges, device=provider.device_id, remaps=provider.can_remap)
        return content | {"statistics": describe_statistics(self.statistics())}

    def add_listener(self, listener: Callable[[Event], None]) -> None:
        """Calls `listener` for every event, in order, while the pool is locked: it must be quick
        and must not use the pool. Exceptions that it raises are logged and suppressed."""
        if not callable(listener):
            raise ConfigError(f"add_listener: listener must be a function, got {listener!r}")
        with self._locked():
            self._listeners.add(listener)

    def remove_listener(self, listener: Callable[[Event], None]) -> None:
        """Undoes one `add_listener`. Raises ConfigError if there is none to undo."""
        with self._locked():
            try:
                self._listeners.remove(listener)
            except ValueError:
                raise ConfigError(f"remove_listener: {listener!r} is not a listener") from None

    def release_capture(self, capture_id: int) -> None:
        """Synchronises the device and returns the private memory of a graph to the pool. The graph
        must not be launched again."""
        check_integer("release_capture", "capture_id", capture_id)
        with self._locked():
            self.provider.synchronize_device()
            self._release_capture(capture_id)

    def close(self) -> None:
        """Releases all memory to the device. Raises PointerError while any allocation is live."""
        with self._locked():
            if self._num_live():
                raise PointerError(
                    f"{self!r}: close with {self._num_live()} live allocations; free them first"
                )
            self.provider.synchronize_device()
            for capture in {key.capture for key in self._states if isinstance(key, CaptureKey)}:
                self._release_capture(capture)
            self._supply.settle_waiting()
            self._pager.trim()

    # As CuPy's allocator ----------------------------------------------------------------------

    def install(self) -> None:
        """Makes the pool CuPy's allocator in all threads."""
        cupy_allocator.install(self)

    def uninstall(self) -> None:
        """Reinstalls CuPy's own pool."""
        cupy_allocator.uninstall(self)

    def use(self) -> AbstractContextManager[None]:
        """`with pool.use():` CuPy allocates from the pool in this thread."""
        return cupy_allocator.use(self)

    def _sibling(self, device_id: int) -> MemoryPool:
        """A new pool with the same configuration on another device."""
        provider: Any = self.provider
        return type(self)(self.config, provider.for_device(device_id))

    # Locking and interrupts ---------------------------------------------------------------------

    def _locked(self) -> _Locked:
        """Locks the pool; an interrupt takes effect when the lock is released."""
        return _Locked(self)

    def _unlocked(self, action: Callable[[], T]) -> T:
        """Unlocks the pool during `action`, in the middle of an allocation, so that `action` may
        use the pool."""
        self._listeners.deliver()
        self._busy = False
        self._release()
        try:
            result = action()
        finally:
            self._acquire()
            self._busy = True
        self._drain()
        return result

    def _undo_interrupted(self, opened: bool, span: Span | None) -> None:
        """Restores a consistent state after an exception in `allocate` or `free`, and unlocks.

        opened: this call had set `_busy`.
        span: the span to be freed, or one that was allocated but cannot be returned; it is freed.
        """
        with Uninterrupted():
            lock = self._lock
            if not opened:
                if lock._is_owned():  # interrupted after `acquire`; if busy, inside another call
                    _, owner = lock._release_save()
                    if self._busy:
                        lock._acquire_restore((1, owner))
                return
            if not lock._is_owned():
                self._acquire()
            self._busy = True
            try:
                self._finish_draining()
                if span is not None and self._is_simple(span):
                    self._finish_free(span)
                elif span is not None:
                    self._free_slowly(span)
            finally:
                self._listeners.deliver()
                self._busy = False
                lock._release_save()

    def _is_simple(self, span: Span) -> bool:
        """Whether freeing a live span only appends it to the list of its size."""
        return not (span.uses or span.holder is not None or self._listeners.active)

    def _finish_free(self, span: Span) -> None:
        """Completes a free on the fast path from any intermediate state."""
        state = self._states[span.stream]
        cached = state.bins.setdefault(span.size, [])
        if not any(one is span for one in cached):
            cached.append(span)
        self._live.pop(span.address, None)
        span.state, span.owner_ref, span.epoch, state.dirty = CACHED, None, state.epoch, True
        live = sum(one.size for one in self._live.values())
        self._counters.live_bytes = live + self._movables.packed_bytes

    # Slow paths ---------------------------------------------------------------------------------

    def _smallest(self, size: int) -> int:
        """The block size for a request of 0 bytes. Raises ConfigError for a negative size."""
        if size < 0:
            raise ConfigError(f"memory pool: size: expected at least 0, got {size}")
        return ALIGNMENT

    def _span_at(self, address: int) -> Span:
        try:
            if address not in self._live:
                self._movables.unpack_at(address)
            span = self._live.get(address)
        except TypeError:  # unhashable, so no address
            span = None
        if span is None:
            raise PointerError(self._explain(address))
        return span

    def _allocate_slowly(self, rounded: int, key: Hashable, found: list[Span]) -> None:
        """Appends a live span to `found`: on a miss, or when listeners are active.

        The list makes the span visible to `allocate` even if an interrupt prevents the return.
        """
        hit = False
        with Uninterrupted():
            try:
                self._release_ended_captures()
                self._drain()
                state = self._streams.get(key)
                cached = state.bins.get(rounded)
                if cached:
                    hit, span = True, cached.pop()
                else:
                    span = self._find(rounded, state)
                found.append(span)
                span.state = LIVE
                self._live[span.address] = span
                counters = self._counters
                counters.live_bytes += rounded
                counters.peak_live_bytes = max(counters.peak_live_bytes, counters.live_bytes)
                if self._listeners.active:
                    self._listeners.allocated(span)
            except BaseException:
                self._listeners.deliver()
                self._busy = False
                self._release()
                raise
            self._listeners.deliver()
        if hit:
            self._counters.hits += 1
        else:
            self._counters.misses += 1

    def _find(self, size: int, state: StreamState) -> Span:
        """A span of `size` bytes, after a miss."""
        if len(self._states) > self._streams.most:
            self._movables.unpack_all()
            spans = [*self._live.values(), *(span for span, _ in self._supply.pending)]
            keys = {state.key, *self._requesting, *(span.stream for span in spans)}
            self._streams.forget_unused(keys)
        self._requesting.append(state.key)
        try:
            return self._supply.obtain(size, state) or self._recovery.allocate(size, state)
        finally:
            self._requesting.remove(state.key)

    def _free_slowly(self, span: Span, stream: Any = None, *, from_finalizer: bool = False) -> None:
        """`free` in the general case. When it raises, nothing has changed.

        `from_finalizer`: the free was deferred, perhaps by a finalizer on another thread.
        """
        if span.holder is not None:
            raise PointerError(
                f"memory pool: {span.address:#x} belongs to a DeviceBuffer: close that instead"
            )
        key = span.stream if stream is None else self._stream_key(stream)
        state = self._streams.get(key)
        epoch = state.epoch
        marked = span.size >= state.mark_from
        if marked and from_finalizer and not state.late:
            # Events on another thread's own stream cannot be recorded from here. That stream may
            # reuse the memory immediately; for other streams the pool waits (Streams.wait_for).
            marked = key == self._current_stream()
        if marked and self._capture_id(key) is None:
            self._streams.mark(state)
        uses = [use for use in span.uses if use != key]
        if uses:
            self._supply.hold(span, uses)
        if epoch == state.epoch:
            state.dirty = True
        del self._live[span.address]
        self._counters.live_bytes -= span.size
        span.stream, span.epoch, span.owner_ref = key, epoch, None
        if not uses:
            span.state = CACHED
            state.bins.setdefault(span.size, []).append(span)
        if self._listeners.active:
            self._listeners.freed(span, completed=not uses)

    def _defragment_if_fragmented(self, size: int, state: StreamState) -> bool:
        """Called before the pool grows: defragments if worthwhile; returns whether the largest
        hole grew."""
        counters = self._counters
        free = self._pager.reserved_bytes - counters.live_bytes - self._supply.pending_bytes
        early = counters.allocations < self._next_defragment
        if early or not self._has_buffers or free < size or self._supply.capturing():
            return False
        holes = self._defragmenter.holes()
        if holes.whole_pages >= size or holes.fragmentation <= self.config.defrag_threshold:
            return False
        report = self._defragmenter.run(state.key)
        self._next_defragment = counters.allocations + MIN_ALLOCATIONS_BETWEEN_DEFRAGMENTS
        return report.largest_free_after > report.largest_free_before

    # Captured graphs ----------------------------------------------------------------------------

    def _release_ended_captures(self) -> None:
        """Returns the memory of destroyed graphs to the pool."""
        for capture in self.provider.ended_captures():
            self._release_capture(capture)

    def _release_capture(self, capture: int) -> None:
        """Makes the free memory of a capture available to all streams, and reassigns its live
        memory to the stream that was captured. The caller ensures that the graph is not launched
        again and that its last launch is complete."""
        streams, arena = self._streams, self._arena
        states = streams.states
        keys = [key for key in states if isinstance(key, CaptureKey) and key.capture == capture]
        for span in self._live.values():
            if span.stream in keys:
                assert isinstance(span.stream, CaptureKey)
                span.stream = streams.get(span.stream.stream).key
        for key in keys:
            state = states[key]
            arena.flush(state)
            for span in state.index:
                if not span.gone:  # else merged into a neighbour earlier in this loop
                    arena.assign_stream(span, None, 0)
            del states[key]

    # Deferred frees -----------------------------------------------------------------------------

    def _drain_if_idle(self) -> None:
        """Does the deferred frees unless the pool is in use; never raises."""
        with Uninterrupted():
            if not self._lock.acquire(blocking=False):
                return
            try:
                if not self._busy:
                    self._busy = True
                    try:
                        self._drain()
                    except Exception:
                        LOG.exception("memory pool: a deferred free failed; it will be retried")
                    finally:
                        self._busy = False
            finally:
                self._release()

    def _drain(self, queues: Iterable[Queue] | None = None) -> None:
        """Does the frees in these queues (None: in all). A free that the driver refuses stays
        queued."""
        _, _, _, states, live, counters, listeners = self._parts
        for refs, popped, _ in self._queues.all if queues is None else queues:
            while refs:
                try:
                    for ref in popped:  # noqa: B007
                        break
                except IndexError:  # CuPy's allocator has emptied the queue
                    break
                self._draining = ref  # for `_undo_interrupted`
                if type(ref) is not OwnerRef:
                    self._drain_slowly(ref)
                    continue
                span = ref.target
                state = states[span.stream]
                size = span.size
                if (
                    span.owner_ref is not ref
                    or size >= state.mark_from
                    or span.uses
                    or listeners.active
                ):
                    self._drain_slowly(ref)
                    continue
                cached = state.bins.get(size)
                span.state = CACHED
                span.epoch = state.epoch
                state.dirty = True
                counters.live_bytes -= size
                if cached is None:
                    state.bins[size] = [span]
                else:
                    cached.append(span)
                del live[span.address]
                self._draining = None

    def _drain_slowly(self, item: Free) -> None:
        with Uninterrupted():
            self._draining = None
            try:
                self._free_deferred(item)
            except BaseException:
                self._deferred.appendleft(item)
                raise

    def _finish_draining(self) -> None:
        """Finishes the free that was in progress when `_drain` was interrupted, or puts it back
        into the queue."""
        ref = self._draining
        if type(ref) is OwnerRef and ref.target.owner_ref is ref and self._is_simple(ref.target):
            self._finish_free(ref.target)
        elif ref is not None:
            self._deferred.appendleft(ref)
        self._draining = None

    def _free_deferred(self, item: Free) -> None:
        if isinstance(item, PinRef):
            if item.target.unpin(item):
                self._free_buffer_now(item.target)
        elif isinstance(item, BufferRef):
            if item.target.close():
                self._free_buffer_now(item.target)
        elif isinstance(item, Holder):
            self._free_buffer_now(item)
        elif isinstance(item, OwnerRef):
            if item.target.owner_ref is item:
                self._free_slowly(item.target, from_finalizer=True)
        else:
            address, stream = item if isinstance(item, tuple) else (item, None)
            span = self._live.get(address)
            if span is None or span.holder is not None:
                LOG.error("a deferred free failed: %s", self._explain(address))
            else:
                self._free_slowly(span, stream, from_finalizer=True)

    # Buffers ------------------------------------------------------------------------------------

    def _pin(self, holder: Holder, pin: object) -> int:
        with self._locked():
            if holder.closed:
                raise PointerError("DeviceBuffer: used after close")
            if self._capture_id(self._current_stream()) is not None:
                holder.pins.append(PERMANENT)
            holder.pins.append(pin)
            self._movables.unpack(holder)
            self._movables.remove(holder)
            return holder.span.address

    def _make_movable(self, holder: Holder) -> None:
        """Adds a new buffer to those that defragmentation may move."""
        self._acquire()
        try:
            if self._busy or holder.pins:  # busy: a garbage collection inside the pool
                self._movables.note(holder)
            else:
                self._movables.add(holder)
        finally:
            self._release()

    def _free_buffer(self, holder: Holder) -> None:
        """Frees the memory of a DeviceBuffer, now or as soon as the pool is idle."""
        self._deferred.append(holder)
        self._drain_if_idle()

    def _free_buffer_now(self, holder: Holder) -> None:
        self._movables.unpack(holder)
        span = holder.span
        span.holder = None
        try:
            self._free_slowly(span, from_finalizer=True)
        except BaseException:
            span.holder = holder
            raise
        self._movables.remove(holder)
        holder.owner_ref = None

    # Errors -------------------------------------------------------------------------------------

    def _explain(self, address: int) -> str:
        """Why `address` cannot be freed."""
        if not isinstance(address, int):
            return f"memory pool: free of {address!r}: expected the address that allocate returned"
        what = f"memory pool: free of {address:#x}"
        self._movables.unpack_at(address)
        span = self._arena.locate(address)
        if span is not None and span.state == LIVE and span.address == address:
            return f"{what}: it belongs to a DeviceBuffer: close that instead"
        if span is not None and span.state == LIVE:
            return (
                f"{what}: not the start of an allocation; {address - span.address} bytes inside"
                f" one of {span.requested} bytes at {span.address:#x}"
            )
        if span is not None and span.state in (FREE, CACHED, PENDING):
            return f"{what}: freed before (double free), or never allocated"
        if span is not None:
            return f"{what}: freed before; its memory is unmapped"
        for other in list(_pools):
            if other is not self and other._arena.locate(address) is not None:
                return f"{what}: it belongs to another pool, {other!r}, not to {self!r}"
        return f"{what}: not an address of this pool"


class _Locked:
    """`with pool._locked():`. A generator-based context manager takes twice as long to enter."""

    __slots__ = ("_block", "_pool")

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = pool
        self._block = Uninterrupted()

    def __enter__(self) -> None:
        self._block.__enter__()
        pool = self._pool
        locked = False
        try:
            pool._acquire()
            if pool._busy:
                pool._release()
                raise RuntimeError("memory pool: used from inside the pool (by a listener?)")
            locked = pool._busy = True
            pool._release_ended_captures()
            pool._drain()
        except BaseException:
            if locked:
                self._unlock()
            self._block.__exit__()
            raise

    def _unlock(self) -> None:
        pool = self._pool
        pool._listeners.deliver()
        pool._busy = False
        pool._release()

    def __exit__(self, *_: object) -> None:
        try:
            self._unlock()
        finally:
            self._block.__exit__()


def check_pool(op: str, pool: Any) -> None:
    """Raises ConfigError unless `pool` is a MemoryPool."""
    if not isinstance(pool, MemoryPool):
        raise ConfigError(f"{op}: pool must be a MemoryPool, got {pool!r}")


def _whole(size: Any) -> int:
    """A size as a Python int: rounding up a NumPy integer could overflow."""
    try:
        return operator.index(size)
    except TypeError:
        raise ConfigError(
            f"memory pool: size: expected a whole number of bytes, got {size!r}"
        ) from None


# After a fork -------------------------------------------------------------------------------------


def _refuse() -> NoReturn:
    raise CukitError(
        "memory pool: used in a forked child. CUDA cannot be used after fork: start processes with"
        " the 'spawn' method and create the pool there"
    )


def _after_fork() -> None:
    for pool in list(_pools):
        pool._acquire = _refuse
        pool._parts = (_refuse, *pool._parts[1:])
        pool._listeners.active = True  # makes CuPy's allocator call `allocate`, and so `_refuse`
        pool._busy = True  # permanently: finalizers in the child only defer their frees


os.register_at_fork(after_in_child=_after_fork)
