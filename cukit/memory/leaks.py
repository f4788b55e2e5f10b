"""Live memory by the call site of its allocation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from cukit.memory.bookkeeping.blocks import Event, Frame
from cukit.memory.pool.memory_pool import MemoryPool, check_pool


@dataclass(frozen=True)
class Site:
    """A call site, and the live memory allocated there."""

    call_site: tuple[Frame, ...]
    """Innermost call first; empty if the pool does not record call sites."""
    count: int
    size: int
    """Bytes, as rounded up by the pool."""

    def __str__(self) -> str:
        where = [f"{frame.filename}:{frame.line} in {frame.name}" for frame in self.call_site]
        calls = "\n        called from ".join(where) or "somewhere (call sites are not recorded)"
        return f"{self.size:,} bytes in {self.count} allocation(s)\n    {calls}"


@dataclass(frozen=True)
class LeakReport:
    """Live memory that may be leaked, by call site. Largest first."""

    sites: tuple[Site, ...]

    @property
    def count(self) -> int:
        return sum(site.count for site in self.sites)

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(site.size for site in self.sites)

    def __bool__(self) -> bool:
        return bool(self.sites)

    def __str__(self) -> str:
        if not self.sites:
            return "nothing is live"
        lines = [f"{self.size:,} bytes in {self.count} allocation(s) are live"]
        lines += [f"  {site}" for site in self.sites]
        if any(not site.call_site for site in self.sites):
            lines.append(
                "  call sites are recorded by a pool made with MemoryPoolConfig(call_site_depth=8)"
            )
        return "\n".join(lines)


def live_report(pool: MemoryPool) -> LeakReport:
    """All live memory by call site. Called when everything should be free, it lists the leaks."""
    check_pool("live_report", pool)
    blocks = (block for part in pool.ranges() for block in part.blocks)
    return _report((b.call_site, b.size) for b in blocks if b.state == "live")


@contextlib.contextmanager
def watch_leaks(pool: MemoryPool) -> Iterator[Callable[[], LeakReport]]:
    """`with watch_leaks(pool) as leaks: ...`; `leaks()` reports memory allocated since the start of
    the block and not freed."""
    check_pool("watch_leaks", pool)
    live: dict[int, tuple[tuple[Frame, ...], int]] = {}
    arriving: set[int] = set()
    """The new addresses of allocations from the `with` block that are being moved."""

    def listen(event: Event) -> None:
        if event.action == "alloc":
            if event.moved is None or event.address in arriving:
                live[event.address] = event.call_site, event.size
            arriving.discard(event.address)
        elif event.action == "free":
            was_live = live.pop(event.address, None) is not None
            if was_live and event.moved is not None:
                arriving.add(event.moved)

    pool.add_listener(listen)
    try:
        yield lambda: _report(live.values())
    finally:
        pool.remove_listener(listen)


def _report(blocks: Iterable[tuple[tuple[Frame, ...], int]]) -> LeakReport:
    sizes: dict[tuple[Frame, ...], tuple[int, int]] = {}
    for call_site, size in list(blocks):
        count, total = sizes.get(call_site, (0, 0))
        sizes[call_site] = count + 1, total + size
    sites = [Site(call_site, count, size) for call_site, (count, size) in sizes.items()]
    return LeakReport(tuple(sorted(sites, key=lambda site: (-site.size, site.call_site))))
