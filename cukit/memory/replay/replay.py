"""Replays an allocation log on a memory pool, and measures memory use and latency.

A replay launches no kernels and accesses no memory, so on every pool each free is complete
immediately. Pools differ only in how they place, cache and find memory.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cukit.memory.log import LogAction, LogEvent

PAGE_BYTES = 2 << 20
TIGHT = 1.05
"""The tight limit is this multiple of the peak of live bytes, plus one page per stream."""


class ReplayPool(Protocol):
    """The interface of a pool to replay on."""

    @property
    def out_of_memory(self) -> tuple[type[BaseException], ...]:
        """The exceptions that `allocate` raises when memory runs out."""
        ...

    @property
    def growth_ns(self) -> int:
        """Lower bound, in ns, on the host time of an allocation that takes memory from the device.
        `replay` calls `reserved_bytes` only after allocations that take at least this long."""
        ...

    def allocate(self, size: int, stream: int) -> int:
        """Returns an address. `stream`: the stream's number in the log, from 0."""
        ...

    def free(self, pointer: int, stream: int) -> None: ...

    def reserved_bytes(self) -> int:
        """Memory that the pool has taken from the device, in use or not."""
        ...

    def close(self) -> None:
        """Returns all memory to the device; everything is freed."""
        ...


class Step(NamedTuple):
    """One operation of a log, with block numbers in place of pointers."""

    block: int
    size: int
    """0: frees the block."""
    stream: int


@dataclass(frozen=True)
class Script:
    """A log in the form that `replay` takes."""

    steps: tuple[Step, ...]
    num_blocks: int
    num_streams: int
    peak_live_bytes: int

    @property
    def tight_limit(self) -> int:
        """A limit that suffices for a pool without fragmentation."""
        return int(TIGHT * self.peak_live_bytes) + self.num_streams * PAGE_BYTES


def script_of(events: Sequence[LogEvent]) -> Script:
    """The operations of a log. Failures are skipped; memory that is never freed is kept to the end;
    memory that was allocated before the log began is allocated first."""
    steps: list[Step] = []
    earlier: list[Step] = []
    blocks: dict[int, int] = {}
    streams: dict[int, int] = {}
    num_blocks = 0
    for event in events:
        if event.action is LogAction.FAILURE:
            continue
        stream = streams.setdefault(event.stream, len(streams))
        if event.action is LogAction.ALLOCATE:
            blocks[event.pointer] = num_blocks
            steps.append(Step(num_blocks, event.size, stream))
            num_blocks += 1
            continue
        block = blocks.pop(event.pointer, None)
        if block is None:
            block = num_blocks
            earlier.append(Step(block, event.size, stream))
            num_blocks += 1
        steps.append(Step(block, 0, stream))
    steps = earlier + steps
    return Script(tuple(steps), num_blocks, max(len(streams), 1), _peak(steps))


def _peak(steps: Sequence[Step]) -> int:
    sizes: dict[int, int] = {}
    live = peak = 0
    for block, size, _ in steps:
        if size:
            sizes[block] = size
            live += size
            peak = max(peak, live)
        else:
            live -= sizes[block]
    return peak


@dataclass(frozen=True)
class Latency:
    """Host time of one kind of call, in microseconds."""

    mean_us: float
    median_us: float
    p99_us: float
    iqr_us: float
    samples: int

    @classmethod
    def of(cls, nanoseconds: Sequence[int]) -> Latency:
        if not nanoseconds:
            return cls(0.0, 0.0, 0.0, 0.0, 0)
        ordered = sorted(nanoseconds)
        last = len(ordered) - 1
        q1, median, q3, p99 = (
            ordered[round(share * last)] / 1e3 for share in (0.25, 0.5, 0.75, 0.99)
        )
        mean = sum(ordered) / len(ordered) / 1e3
        return cls(mean, median, p99, q3 - q1, len(ordered))


@dataclass(frozen=True)
class ReplayResult:
    """The result of replaying a log on a pool."""

    pool: str
    limit_bytes: int | None
    completed: bool
    """No allocation failed and the limit was kept. A replay ends at the first failure."""
    failure: str
    """The allocation that failed, with the live bytes; or by how much the limit was exceeded."""
    num_steps: int
    """Allocations and frees done."""
    peak_live_bytes: int
    """Sum of the sizes in the log, up to the end of the replay."""
    peak_reserved_bytes: int
    fragmentation: float
    """1 - live / reserved when reserved memory last reached a new maximum: the share of the pool's
    memory that the pool could not use."""
    allocate: Latency
    free: Latency

    @property
    def overhead(self) -> float:
        """Peak reserved bytes / peak live bytes."""
        return self.peak_reserved_bytes / self.peak_live_bytes if self.peak_live_bytes else 1.0


def replay(script: Script, pool: ReplayPool, *, name: str, limit: int | None) -> ReplayResult:
    """Runs a script on a pool, which is empty before and after.

    limit: the bytes that the pool may reserve; `replay` does not enforce it, but checks the peak.
    The garbage collector is disabled during the replay, so its pauses do not count.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _replay(script, pool, name, limit)
    finally:
        if collecting:
            gc.enable()


def _replay(script: Script, pool: ReplayPool, name: str, limit: int | None) -> ReplayResult:
    now = time.perf_counter_ns
    allocate, free = pool.allocate, pool.free
    pointers = [0] * script.num_blocks
    sizes: dict[int, tuple[int, int]] = {}
    allocate_ns: list[int] = []
    free_ns: list[int] = []
    live = peak_live = reserved = 0
    wasted, failure = 0.0, ""
    for number, (block, size, stream) in enumerate(script.steps):
        if not size:
            pointer = pointers[block]
            start = now()
            free(pointer, stream)
            free_ns.append(now() - start)
            live -= sizes.pop(block)[0]
            continue
        start = now()
        try:
            pointers[block] = allocate(size, stream)
        except pool.out_of_memory as error:
            reason = " ".join(str(error).split())[:120]
            failure = f"step {number}: {size} bytes requested, {live} live ({reason})"
            break
        taken = now() - start
        allocate_ns.append(taken)
        sizes[block] = size, stream
        live += size
        peak_live = max(peak_live, live)
        if taken >= pool.growth_ns and (holds := pool.reserved_bytes()) > reserved:
            reserved, wasted = holds, 1 - live / holds
    reserved = max(reserved, pool.reserved_bytes())
    if not failure and limit is not None and reserved > limit:
        failure = f"held {reserved} bytes, {reserved - limit} above the limit"
    for block, (_, stream) in sizes.items():
        free(pointers[block], stream)
    return ReplayResult(
        pool=name,
        limit_bytes=limit,
        completed=not failure,
        failure=failure,
        num_steps=len(allocate_ns) + len(free_ns),
        peak_live_bytes=peak_live,
        peak_reserved_bytes=reserved,
        fragmentation=max(wasted, 0.0),
        allocate=Latency.of(allocate_ns),
        free=Latency.of(free_ns),
    )
