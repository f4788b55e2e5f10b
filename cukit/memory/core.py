"""The quick half of the pool: `allocate`, `free`, and the lock around everything.

A request of a size that was freed before on the same stream is served from a list, without merging,
searching or calling the driver. Everything else happens on a miss.

A garbage collection may start inside any of these methods and free memory of this very pool. So the
lock can be taken again by the thread that holds it, `_busy` tells that it was, and such a free is
put aside until later. Where one stream has the pool for itself and nobody listens, destructors
always do that, and else for small memory: it needs no lock, and the next call does the free.
"""

from __future__ import annotations

import logging
import operator
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from cukit.errors import ConfigError, PointerError
from cukit.memory.arena import Arena
from cukit.memory.buffer import Holder
from cukit.memory.capture import release_capture
from cukit.memory.choose import default_provider
from cukit.memory.config import ALIGNMENT, MemoryPoolConfig
from cukit.memory.estate import give_back
from cukit.memory.faults import explain_pointer, register_pool
from cukit.memory.interrupts import Uninterrupted, interrupted_as_usual
from cukit.memory.listeners import Listeners
from cukit.memory.oom import Ladder
from cukit.memory.pager import Pager
from cukit.memory.provider import Provider
from cukit.memory.relocate import Defragmenter
from cukit.memory.spans import CACHED, LIVE, Span
from cukit.memory.statistics import Counters
from cukit.memory.streams import NEVER, CaptureKey, Streams, StreamState
from cukit.memory.supply import Supply

LOG = logging.getLogger(__name__)

Free: TypeAlias = int | tuple[int, Any] | Holder  # an address, one with a stream, a buffer's

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
        self.config = config = config or MemoryPoolConfig()
        self.provider = provider = provider or default_provider(most_bytes=config.max_pool_size)
        limit = config.max_pool_size
        if limit is not None and limit < provider.page_bytes:
            raise ConfigError(
                f"MemoryPoolConfig: max_pool_size: expected at least a page of "
                f"{provider.page_bytes} bytes, got {limit}"
            )
        self._current_stream = provider.current_stream
        self._stream_key = provider.stream_key
        self._capture_id = provider.capture_id
        self._uncaptured = provider.uncaptured
        self._lock = threading.RLock()
        self._acquire: Callable[[], object] = self._lock.acquire
        self._acquire_at_once = self._lock.acquire
        """Called with False; `blocking=False` would take twice as long."""
        self._release = self._lock.release
        self._busy = False
        self._put_aside: deque[Free] = deque()
        self._live: dict[int, Span] = {}
        self._counters = Counters()
        self._listeners = Listeners(config.call_site_depth)

        emit = self._listeners.emit
        self._streams = Streams(provider)
        self._states = self._streams.states
        self._arena = Arena(self._streams, provider.page_bytes)
        self._pager = Pager(config, provider, self._arena, emit)
        self._supply = Supply(provider, self._arena, self._pager, self._streams, emit)
        self._defragmenter = Defragmenter(
            provider, self._arena, self._pager, self._supply, self._live, self._listeners
        )
        self._ladder = Ladder(
            config, provider, self._supply, self._pager, self._defragmenter, self._outside, emit
        )
        self._has_buffers = False
        self.prompt_from = NEVER
        """From how many bytes on it matters when a destructor's free is done."""
        self.free_later = self._put_aside.append
        """What destructors of smaller memory may call; the pool has to live until its next call."""
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
        self._see_when_to_free()
        register_pool(self)
        parts = (provider, self._streams, self._pager, self._live, self._put_aside, os.getpid())
        weakref.finalize(self, give_back, *parts).atexit = False
        if config.initial_pool_size and not self._pager.prepare(config.initial_pool_size):
            raise ConfigError(
                f"MemoryPoolConfig: initial_pool_size: the device cannot give "
                f"{config.initial_pool_size} bytes"
            )

    # Allocating and freeing -------------------------------------------------------------------

    def allocate(self, size: int, stream: Any = None) -> int:
        """Returns the address of `size` bytes, a multiple of 512, usable on `stream`.

        Raises OutOfMemoryError, whose text and `report` say what holds the memory.
        """
        key = self._current_stream() if stream is None else self._stream_key(stream)
        if key not in self._uncaptured and (capture := self._capture_id(key)) is not None:
            key = CaptureKey(capture, key)
        if type(size) is not int:
            size = _whole(size)
        rounded = (size + ROUND_UP) & ROUND_DOWN
        if rounded <= 0:
            rounded = self._smallest(size)
        acquire, release, put_aside, states, live_spans, counters, listeners = self._parts
        acquire()
        if self._busy:
            release()
            raise RuntimeError("memory pool: allocation from inside the pool (by a listener?)")
        self._busy = True
        try:
            if put_aside:
                self._take_in()
            # An interrupt may strike after any call. So there is none between taking the span from
            # its list and entering it as live.
            try:
                cached = states[key].bins[rounded]
                span: Span | None = cached[-1]
                del cached[-1]
                counters.hits += 1
            except (KeyError, IndexError):
                span = None
            if span is None:
                span = self._find(rounded, self._streams.get(key))
                counters.misses += 1
            span.state = LIVE
            span.requested = size
            address = span.address
            live_spans[address] = span
            live = counters.live_bytes + rounded
            counters.live_bytes = live
            if live > counters.peak_live_bytes:
                counters.peak_live_bytes = live
            if listeners.active:
                listeners.allocated(span)
            return address
        finally:
            self._busy = False
            release()

    def free(self, address: int, stream: Any = None) -> None:
        """Frees memory after the work queued on `stream` (None: the stream it was allocated on).

        Raises PointerError for anything but the address of a live allocation of this pool.
        """
        self._acquire()
        if self._busy:  # a garbage collection inside the pool
            self._put_aside.append((address, stream))
            self._release()
            return
        self._busy = True
        try:
            if self._put_aside:
                self._take_in()
            span = self._live.get(address)
            if span is None:
                raise PointerError(explain_pointer(self, address))
            if stream is not None or not self._put_back(span):
                with Uninterrupted():
                    self._free_slowly(span, stream)
        finally:
            self._busy = False
            self._release()

    def free_from_finalizer(self, address: int) -> None:
        """`free` for destructors: never blocks, never raises; done later if the pool is busy."""
        self._put_aside.append(address)
        if self.prompt_from != NEVER:
            self._take_in_if_idle()

    def _free_held(self, holder: Holder) -> None:
        """The same for the memory of a DeviceBuffer."""
        self._put_aside.append(holder)
        self._take_in_if_idle()

    # Behind the doors -------------------------------------------------------------------------

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """`_locked`, for what must not be broken off in the middle."""
        with self._locked(), Uninterrupted():
            yield

    @contextmanager
    def _locked(self) -> Iterator[None]:
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
            self._see_when_to_free()
            self._busy = False
            self._release()

    def _see_when_to_free(self) -> None:
        """To be called after anything that may bring a new stream, or a listener."""
        self.prompt_from = 0 if self._listeners.active else self._streams.mark_from

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """Unlocks for code that may use the pool, in the middle of an allocation."""
        self._listeners.deliver()
        self._busy = False
        self._release()
        try:
            with interrupted_as_usual():
                yield
        finally:
            self._acquire()
            self._busy = True
        self._take_in()

    def _put_back(self, span: Span) -> bool:
        """Frees a live span into its list, if there is no more to it than that."""
        state = self._states[span.stream]
        size = span.size
        if (
            size >= state.mark_from
            or span.uses
            or span.holder is not None
            or self._listeners.active
        ):
            return False
        cached = state.bins.get(size)
        del self._live[span.address]
        span.state = CACHED
        span.epoch = state.epoch
        state.dirty = True
        self._counters.live_bytes -= size
        if cached is None:
            state.bins[size] = [span]
        else:
            cached.append(span)
        return True

    def _smallest(self, size: int) -> int:
        if size < 0:
            raise ConfigError(f"memory pool: size: expected at least 0, got {size}")
        return ALIGNMENT

    def _span_at(self, address: int) -> Span:
        span = self._live.get(address)
        if span is None:
            raise PointerError(explain_pointer(self, address))
        return span

    def _find(self, size: int, state: StreamState) -> Span:
        """A span of `size` bytes that no list had ready."""
        span = None
        try:
            with Uninterrupted():
                self._release_ended_captures()
                self._take_in()
                if len(self._states) > self._streams.most:
                    spans = [*self._live.values(), *(span for span, _ in self._supply.pending)]
                    self._streams.forget_unused({state.key, *(span.stream for span in spans)})
                span = self._supply.obtain(size, state) or self._ladder.climb(size, state)
        except BaseException:
            if span is not None:  # found, but interrupted: nobody will get it
                span.epoch, state.dirty = state.epoch, True
                self._arena.put_free(span)
            self._listeners.deliver()
            raise
        finally:
            self._see_when_to_free()
        return span

    def _free_slowly(self, span: Span, stream: Any = None) -> None:
        """`free` with everything that may come into it. Raises before anything has changed."""
        if span.holder is not None:
            raise PointerError(
                f"memory pool: {span.address:#x} belongs to a DeviceBuffer: close that instead"
            )
        key = span.stream if stream is None else self._stream_key(stream)
        state = self._streams.get(key)
        epoch = state.epoch
        if span.size >= state.mark_from and self._capture_id(key) is None:
            self._streams.mark(state)
        uses = [use for use in span.uses if use != key]
        if uses:
            self._supply.hold(span, uses)
        if epoch == state.epoch:
            state.dirty = True
        del self._live[span.address]
        self._counters.live_bytes -= span.size
        span.stream, span.epoch = key, epoch
        if not uses:
            span.state = CACHED
            state.bins.setdefault(span.size, []).append(span)
        if self._listeners.active:
            self._listeners.freed(span, completed=not uses)
        self._see_when_to_free()

    def _release_ended_captures(self) -> None:
        """Takes back what belonged to graphs that are destroyed."""
        for capture in self.provider.ended_captures():
            release_capture(capture, self._streams, self._arena, self._live)

    def _take_in_if_idle(self) -> None:
        """Does the frees that were put aside, unless somebody is using the pool; never raises."""
        if not self._acquire_at_once(False):
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

    def _take_in(self) -> None:
        """Does the frees that were put aside. One that the driver refuses stays there."""
        _, _, put_aside, states, live, counters, listeners = self._parts
        while put_aside:
            item = put_aside[0]
            span = live.get(item)  # type: ignore[arg-type]
            if span is None or span.uses or span.holder is not None or listeners.active:
                self._take_in_slowly(item)
                continue
            state = states[span.stream]
            size = span.size
            if size >= state.mark_from:
                self._take_in_slowly(item)
                continue
            # As _put_back does; a call would cost a third of it, and let an interrupt in.
            cached = state.bins.get(size)
            del live[item]  # type: ignore[arg-type]
            del put_aside[0]
            span.state = CACHED
            span.epoch = state.epoch
            state.dirty = True
            counters.live_bytes -= size
            if cached is None:
                state.bins[size] = [span]
            else:
                cached.append(span)

    def _take_in_slowly(self, item: Free) -> None:
        with Uninterrupted():
            if isinstance(item, Holder):
                span = item.span
                span.holder = None
                try:
                    if not self._put_back(span):
                        self._free_slowly(span)
                except BaseException:
                    span.holder = item
                    raise
            else:
                address, stream = item if isinstance(item, tuple) else (item, None)
                found = self._live.get(address)
                if found is None or found.holder is not None:
                    LOG.error("free in a destructor: %s", explain_pointer(self, address))
                else:
                    self._free_slowly(found, stream)
            self._put_aside.popleft()
