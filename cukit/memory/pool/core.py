"""The quick half of the pool: `allocate`, `free`, and the lock around everything.

A request of a size that was freed before on the same stream is served from a list, without merging,
searching or calling the driver. Everything else happens on a miss.

Destructors only note their frees, for the next call of the pool to do (ties.py), or for the next
owner to take over without the lock (handover.py). Other code may be run by a garbage collection
inside any of these methods and use this very pool. So the lock can be taken again by the thread
that holds it, `_busy` tells that it was, and a free is then put aside.

Ctrl-C: what takes long runs inside Uninterrupted, which costs as much as a quick call does. So
those are interrupted wherever Python looks for signals (behind calls, at the start of functions),
and `_break_off` then undoes an allocation, finishes a free, and unlocks.
"""

from __future__ import annotations

import logging
import operator
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

from cukit.errors import ConfigError, PointerError
from cukit.memory.bookkeeping.arena import Arena
from cukit.memory.bookkeeping.movables import Movables
from cukit.memory.bookkeeping.spans import CACHED, LIVE, Span
from cukit.memory.bookkeeping.statistics import Counters
from cukit.memory.bookkeeping.streams import CaptureKey, Streams, StreamState
from cukit.memory.bookkeeping.ties import BufferTie, PinTie, Tie
from cukit.memory.pool.buffer import Holder
from cukit.memory.pool.capture import release_capture
from cukit.memory.pool.config import ALIGNMENT, MemoryPoolConfig
from cukit.memory.pool.defragment import Defragmenter
from cukit.memory.pool.faults import explain_pointer, register_pool
from cukit.memory.pool.finalize import give_back
from cukit.memory.pool.handover import Queue, Queues
from cukit.memory.pool.listeners import Listeners
from cukit.memory.pool.oom import Ladder
from cukit.memory.pool.pager import Pager
from cukit.memory.pool.stitch import Stitcher
from cukit.memory.pool.supply import Supply
from cukit.memory.providers.default import default_provider
from cukit.memory.providers.provider import Provider
from cukit.memory.uninterrupted import Uninterrupted

LOG = logging.getLogger(__name__)

T = TypeVar("T")

Free: TypeAlias = Tie | int | tuple[int, Any] | Holder
"""An owner that is gone, an address, one with a stream, a buffer's memory."""

ROUND_UP = ALIGNMENT - 1
ROUND_DOWN = -ALIGNMENT


def _whole(size: Any) -> int:
    """A size as a Python int: NumPy's integers would wrap around when they are rounded up."""
    try:
        return operator.index(size)
    except TypeError:
        raise ConfigError(
            f"memory pool: size: expected a whole number of bytes, got {size!r}"
        ) from None


class PoolCore:
    """A pool without its reports: see MemoryPool."""

    def __init__(
        self, config: MemoryPoolConfig | None = None, provider: Provider | None = None
    ) -> None:
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
        self._capture_id = provider.capture_id
        self._uncaptured = provider.uncaptured
        self._lock: Any = threading.RLock()
        self._acquire: Callable[[], object] = self._lock.acquire
        self._release: Callable[[], object] = self._lock.release
        self._busy = False
        self._queues = Queues()
        self._common_queue = (self._queues.common,)
        self._put_aside: deque[Free] = self._queues.common.ties
        self._taking: Free | None = None
        """Out of a queue, and not done yet."""
        self._waiting: list[Hashable] = []
        """Streams of allocations that may have unlocked the pool on their way (`_outside`)."""
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
        self._movables = Movables()
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
        self._ladder = Ladder(
            config, provider, self._supply, self._pager, self._defragmenter, self._outside, emit
        )
        self._has_buffers = False
        self.free_from_finalizer = self._queues.common.note
        """`free` for destructors: an address. Never blocks, never raises, and runs no bytecode in
        which an interrupt could get lost; the next call of the pool does it."""
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
            self._put_aside,
            self._states,
            self._live,
            self._counters,
            self._listeners,
        )
        """One attribute instead of seven, where that counts."""
        register_pool(self)
        parts = (provider, self._streams, self._pager, self._live, self._queues, os.getpid())
        weakref.finalize(self, give_back, *parts).atexit = False
        if config.initial_pool_size and not self._pager.prepare(config.initial_pool_size):
            raise ConfigError(
                f"MemoryPoolConfig: initial_pool_size: the device cannot give "
                f"{config.initial_pool_size} bytes"
            )

    # Allocating and freeing -------------------------------------------------------------------

    def allocate(self, size: int, stream: Any = None, _owner: Any = None) -> int:
        """Returns the address of `size` bytes, a multiple of 512, usable on `stream`.

        Raises OutOfMemoryError, whose text and `report` say what holds the memory.
        """
        # `_owner` makes CuPy's kind of memory, which is returned in place of the address: from the
        # moment it exists it frees itself, whatever interrupts its way to the caller.
        key = self._current_stream() if stream is None else self._stream_key(stream)
        if key not in self._uncaptured and (capture := self._capture_id(key)) is not None:
            key = CaptureKey(capture, key)
        if type(size) is not int:
            size = _whole(size)
        rounded = (size + ROUND_UP) & ROUND_DOWN
        if rounded <= 0:
            rounded = self._smallest(size)
        acquire, release, put_aside, states, live_spans, counters, listeners = self._parts
        span: Span | None = None
        found: list[Span] | None = None
        opened = False
        try:
            acquire()
            if self._busy:
                release()
                raise RuntimeError("memory pool: allocation from inside the pool (by a listener?)")
            opened = self._busy = True
            if put_aside:
                self._take_in(self._common_queue)
            try:
                if listeners.active:
                    raise KeyError
                cached = states[key].bins[rounded]
                span = cached[-1]
                del cached[-1]
            except (KeyError, IndexError):
                found = []
                self._allocate_slowly(size, rounded, key, found)
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
            note = None if _owner is None else self._queues.of(key, size).note
            self._busy = False
            release()
            if _owner is None:
                return span.address
            memory = _owner(span.address, size, self, self._device_id)
            tie = Tie(memory, note)
            tie.target = span
            span.tie = tie
            return memory  # type: ignore[no-any-return]
        except BaseException:
            self._break_off(opened, found[0] if found else span)
            raise

    def free(self, address: int, stream: Any = None) -> None:
        """Frees memory after the work queued on `stream` (None: the stream it was allocated on).

        Raises PointerError for anything but the address of a live allocation of this pool.
        """
        acquire, release, put_aside, states, live_spans, counters, listeners = self._parts
        span: Span | None = None
        opened = False
        try:
            acquire()
            if self._busy:  # a garbage collection inside the pool
                put_aside.append((address, stream))
                release()
                return
            opened = self._busy = True
            if put_aside:
                self._take_in(self._common_queue)
            try:
                found = live_spans[address]
            except (KeyError, TypeError):
                why = explain_pointer(self, address)
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
                span.tie = None
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
            self._break_off(opened, span)
            raise

    def _free_held(self, holder: Holder) -> None:
        """Frees the memory of a DeviceBuffer, now or as soon as the pool is idle."""
        self._put_aside.append(holder)
        self._take_in_if_idle()

    def _break_off(self, opened: bool, span: Span | None) -> None:
        """Closes the books after an interrupt, if they are open still.

        opened: this call has opened them.
        span: what was to be freed, or will not reach the caller: it is free then.
        """
        with Uninterrupted():
            lock = self._lock
            if not opened:
                if lock._is_owned():  # interrupted behind `acquire`; busy: a call around this one
                    _, owner = lock._release_save()
                    if self._busy:
                        lock._acquire_restore((1, owner))
                return
            if not lock._is_owned():
                self._acquire()
            self._busy = True
            try:
                self._finish_noted()
                if span is not None and self._is_simple(span):
                    self._finish_free(span)
                elif span is not None:
                    self._free_slowly(span)
            finally:
                self._listeners.deliver()
                self._busy = False
                lock._release_save()

    def _finish_noted(self) -> None:
        """Finishes the free that `_take_in` has begun, or puts it back."""
        tie = self._taking
        if type(tie) is Tie and tie.target.tie is tie and self._is_simple(tie.target):
            self._finish_free(tie.target)
        elif tie is not None:
            self._put_aside.appendleft(tie)
        self._taking = None

    def _is_simple(self, span: Span) -> bool:
        """Whether there is no more to freeing a live span than putting it into its list."""
        return not (span.uses or span.holder is not None or self._listeners.active)

    def _finish_free(self, span: Span) -> None:
        """Puts a span into its list from whatever is between that and being live."""
        state = self._states[span.stream]
        cached = state.bins.setdefault(span.size, [])
        if not any(one is span for one in cached):
            cached.append(span)
        self._live.pop(span.address, None)
        span.state, span.tie, span.epoch, state.dirty = CACHED, None, state.epoch, True
        self._counters.live_bytes = sum(one.size for one in self._live.values())

    # Behind the doors -------------------------------------------------------------------------

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """Locks; an interrupt takes effect when the lock is released."""
        with Uninterrupted():
            self._acquire()
            if self._busy:
                self._release()
                raise RuntimeError("memory pool: used from inside the pool (by a listener?)")
            self._busy = True
            try:
                self._release_ended_captures()
                self._take_in()
                yield
            finally:
                self._listeners.deliver()
                self._busy = False
                self._release()

    def _outside(self, action: Callable[[], T]) -> T:
        """Calls what may use the pool, in the middle of an allocation: unlocked meanwhile."""
        self._listeners.deliver()
        self._busy = False
        self._release()
        try:
            result = action()
        finally:
            self._acquire()
            self._busy = True
        self._take_in()
        return result

    def _smallest(self, size: int) -> int:
        if size < 0:
            raise ConfigError(f"memory pool: size: expected at least 0, got {size}")
        return ALIGNMENT

    def _span_at(self, address: int) -> Span:
        span = self._live.get(address)
        if span is None:
            raise PointerError(explain_pointer(self, address))
        return span

    def _allocate_slowly(self, size: int, rounded: int, key: Hashable, found: list[Span]) -> None:
        """Adds a live span to `found`: one that no list had ready, or that listeners are told of.

        By way of the list, so that `allocate` knows of it whatever happens on the way back.
        """
        hit = False
        with Uninterrupted():
            try:
                self._release_ended_captures()
                self._take_in()
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
        """A span of `size` bytes that no list had ready."""
        if len(self._states) > self._streams.most:
            spans = [*self._live.values(), *(span for span, _ in self._supply.pending)]
            keys = {state.key, *self._waiting, *(span.stream for span in spans)}
            self._streams.forget_unused(keys)
        self._waiting.append(state.key)
        try:
            return self._supply.obtain(size, state) or self._ladder.climb(size, state)
        finally:
            self._waiting.remove(state.key)

    def _free_slowly(self, span: Span, stream: Any = None, *, noted: bool = False) -> None:
        """`free` with everything that may come into it. Raises before anything has changed.

        `noted`: for a destructor, which may have run on another thread.
        """
        if span.holder is not None:
            raise PointerError(
                f"memory pool: {span.address:#x} belongs to a DeviceBuffer: close that instead"
            )
        key = span.stream if stream is None else self._stream_key(stream)
        state = self._streams.get(key)
        epoch = state.epoch
        marked = span.size >= state.mark_from
        if marked and noted and not state.late:
            # The work of another thread's own stream cannot be recorded from here. The memory is
            # that stream's again at once; for others the pool waits (Streams.wait_for).
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
        span.stream, span.epoch, span.tie = key, epoch, None
        if not uses:
            span.state = CACHED
            state.bins.setdefault(span.size, []).append(span)
        if self._listeners.active:
            self._listeners.freed(span, completed=not uses)

    def _release_ended_captures(self) -> None:
        """Takes back what belonged to graphs that are destroyed."""
        for capture in self.provider.ended_captures():
            release_capture(capture, self._streams, self._arena, self._live)

    def _take_in_if_idle(self) -> None:
        """Does the frees that were put aside, unless somebody is using the pool; never raises."""
        with Uninterrupted():
            if not self._lock.acquire(blocking=False):
                return
            try:
                if not self._busy:
                    self._busy = True
                    try:
                        self._take_in()
                    except Exception:
                        LOG.exception("memory pool: a free in a destructor failed, left for later")
                    finally:
                        self._busy = False
            finally:
                self._release()

    def _take_in(self, queues: Iterable[Queue] | None = None) -> None:
        """Does the frees that wait in the queues (None: in all). One that the driver refuses stays
        there."""
        _, _, _, states, live, counters, listeners = self._parts
        for waiting, taken, _ in self._queues.all if queues is None else queues:
            while waiting:
                try:
                    for tie in taken:  # noqa: B007
                        break
                except IndexError:  # somebody took it over
                    break
                self._taking = tie  # were this broken off now, `_break_off` would finish it
                if type(tie) is not Tie:
                    self._take_in_slowly(tie)
                    continue
                span = tie.target
                state = states[span.stream]
                size = span.size
                if span.tie is not tie or size >= state.mark_from or span.uses or listeners.active:
                    self._take_in_slowly(tie)
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
                self._taking = None

    def _take_in_slowly(self, item: Free) -> None:
        with Uninterrupted():
            self._taking = None
            try:
                self._do_noted(item)
            except BaseException:
                self._put_aside.appendleft(item)
                raise

    def _do_noted(self, item: Free) -> None:
        if isinstance(item, PinTie):
            if item.target.unpin(item):
                self._free_held_now(item.target)
        elif isinstance(item, BufferTie):
            if item.target.close():
                self._free_held_now(item.target)
        elif isinstance(item, Holder):
            self._free_held_now(item)
        elif isinstance(item, Tie):
            if item.target.tie is item:
                self._free_slowly(item.target, noted=True)
        else:
            address, stream = item if isinstance(item, tuple) else (item, None)
            span = self._live.get(address)
            if span is None or span.holder is not None:
                LOG.error("free in a destructor: %s", explain_pointer(self, address))
            else:
                self._free_slowly(span, stream, noted=True)

    def _free_held_now(self, holder: Holder) -> None:
        span = holder.span
        span.holder = None
        try:
            self._free_slowly(span, noted=True)
        except BaseException:
            span.holder = holder
            raise
        self._movables.remove(holder)
        holder.tie = None
