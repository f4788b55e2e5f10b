"""Out of memory: the fallbacks that are tried, and the report if all of them fail."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from cukit.errors import OutOfMemoryError
from cukit.memory.bookkeeping.blocks import Frame
from cukit.memory.bookkeeping.spans import Span
from cukit.memory.bookkeeping.statistics import StreamStatistics
from cukit.memory.bookkeeping.streams import StreamState
from cukit.memory.bookkeeping.survey import Survey
from cukit.memory.pool.config import MemoryPoolConfig
from cukit.memory.pool.defragment import Defragmenter
from cukit.memory.pool.listeners import Emit
from cukit.memory.pool.pager import Pager
from cukit.memory.pool.supply import Supply
from cukit.memory.providers.provider import Provider
from cukit.memory.uninterrupted import InterruptedAsUsual

MAX_CALLBACKS = 100
"""Maximum number of calls of the callback for one request."""


@dataclass(frozen=True)
class OutOfMemoryReport:
    """Why a request failed: the text of the OutOfMemoryError, and its `report`. Sizes in bytes."""

    pool: str
    requested: int
    free: int
    largest_hole: int
    pending: int
    reclaimable_by_remap: int
    reclaimable_by_move: int
    live: int
    reserved: int
    limit: int | None
    device_free: int
    device_total: int
    per_stream: dict[Hashable, StreamStatistics]
    top_call_sites: tuple[tuple[tuple[Frame, ...], int, int], ...]
    """(call site, bytes, count) of the largest live allocations."""
    advice: tuple[str, ...]

    def __str__(self) -> str:
        limit = "none" if self.limit is None else num_bytes(self.limit)
        lines = [
            f"{self.pool}: cannot allocate {num_bytes(self.requested)}",
            f"  pool: {num_bytes(self.reserved)} reserved (limit: {limit}) = "
            f"{num_bytes(self.live)} live + {num_bytes(self.pending)} pending"
            f" + {num_bytes(self.free)} free",
            f"  free: largest hole {num_bytes(self.largest_hole)}, "
            f"reclaimable by remap {num_bytes(self.reclaimable_by_remap)}, "
            f"by move {num_bytes(self.reclaimable_by_move)}",
            f"  device: {num_bytes(self.device_free)} free of {num_bytes(self.device_total)}",
        ]
        for stream, share in self.per_stream.items():
            lines.append(
                f"  {'any stream' if stream is None else f'stream {stream}'}: "
                f"{num_bytes(share.live_bytes)} live, {num_bytes(share.pending_bytes)} pending, "
                f"{num_bytes(share.free_bytes)} free"
            )
        for frames, size, count in self.top_call_sites:
            where = f"{frames[0].filename}:{frames[0].line} ({frames[0].name})" if frames else "?"
            lines.append(f"  live: {num_bytes(size)} in {count} from {where}")
        lines.extend(f"  try: {advice}" for advice in self.advice)
        return "\n".join(lines)


def num_bytes(size: int) -> str:
    """`1536` -> `"1.50 KiB"`."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{size} B" if unit == "B" else f"{amount:.2f} {unit}"
        amount /= 1024
    return f"{amount:.2f} GiB"


class Recovery:
    """Tries one fallback after another before an allocation fails."""

    def __init__(
        self,
        config: MemoryPoolConfig,
        provider: Provider,
        supply: Supply,
        pager: Pager,
        defragmenter: Defragmenter,
        outside: Callable[[Callable[[], Any]], Any],
        emit: Emit,
    ) -> None:
        self._config = config
        self._provider = provider
        self._supply = supply
        self._pager = pager
        self._defragmenter = defragmenter
        self._emit = emit
        self._unlocked = outside
        """Calls a function while the pool is unlocked, then does the deferred frees."""
        self.failures = 0

    def allocate(self, size: int, state: StreamState) -> Span:
        """A live span of `size` bytes. Raises OutOfMemoryError."""
        fallbacks = [self._collect_garbage]
        if not state.private:
            # A request on a stream under capture must not synchronise.
            fallbacks = [self._wait, self._compact, self._trim, self._collect_garbage]
        for fallback in fallbacks:
            fallback(state)
            span = self._supply.obtain(size, state, under_pressure=True)
            if span is not None:
                return span
        for _ in range(MAX_CALLBACKS if self._config.on_out_of_memory else 0):
            if not self._call_back(size):
                break
            if not state.private:
                self._wait(state)
                self._compact(state)
            span = self._supply.obtain(size, state, under_pressure=True)
            if span is not None:
                return span
        self.failures += 1
        self._emit("oom", 0, size, state.key)
        report = self.report(size)
        error = OutOfMemoryError(str(report))
        error.report = report
        raise error

    def _wait(self, state: StreamState) -> None:
        """Completes pending frees and merges free memory. The next attempt remaps."""
        self._supply.settle_waiting()

    def _compact(self, state: StreamState) -> None:
        if not self._supply.capturing():
            self._defragmenter.compact(state.key)

    def _trim(self, state: StreamState) -> None:
        """Returns free segments to the device, so that one large enough may be created."""
        self._pager.trim()

    def _collect_garbage(self, state: StreamState) -> None:
        self._unlocked(gc.collect)
        if not state.private:
            self._supply.settle_waiting()
            self._compact(state)
            self._pager.trim()

    def _call_back(self, size: int) -> bool:
        callback = self._config.on_out_of_memory
        assert callback is not None

        def call() -> bool:
            with InterruptedAsUsual():
                return bool(callback(size))

        return bool(self._unlocked(call))

    def report(self, size: int) -> OutOfMemoryReport:
        """The current state of the pool, and advice."""
        facts = self._defragmenter.survey()
        device_free, device_total = self._provider.memory_info()
        sites = sorted(facts.call_sites.items(), key=lambda item: -item[1][0])
        sites = [site for site in sites if site[0]][:5]
        return OutOfMemoryReport(
            pool=f"memory pool ({self._provider.name}, device {self._provider.device_id})",
            requested=size,
            free=facts.free,
            largest_hole=facts.largest_free,
            pending=facts.pending,
            reclaimable_by_remap=facts.whole_pages,
            reclaimable_by_move=facts.freed_by_moving,
            live=facts.live,
            reserved=self._pager.reserved_bytes,
            limit=self._config.max_pool_size,
            device_free=device_free,
            device_total=device_total,
            per_stream=facts.per_stream,
            top_call_sites=tuple((frames, *numbers) for frames, numbers in sites),
            advice=self._advice(size, facts, device_free),
        )

    def _advice(self, size: int, facts: Survey, device_free: int) -> tuple[str, ...]:
        advice = []
        limit = self._config.max_pool_size
        if limit is not None and size > limit:
            advice.append("a larger max_pool_size: the request alone is above it")
        elif limit is not None and device_free >= size:
            advice.append("a larger max_pool_size: the device has the memory")
        if facts.free >= size:
            advice.append(
                "allocate_buffer() instead of allocate(), and unpin buffers: enough bytes are free,"
                " but between live blocks that must not move"
            )
        if facts.private_free >= size:
            advice.append("release_capture() for graphs that are no longer launched")
        if not self._config.call_site_depth and facts.live:
            advice.append("MemoryPoolConfig(call_site_depth=4): this report then lists call sites")
        if not advice:
            advice.append("less live memory: smaller batches, or freeing arrays earlier")
        return tuple(advice)
