"""Who allocated what is still there: by call site."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from cukit.memory.bookkeeping.blocks import Event, Frame
from cukit.memory.pool.memory_pool import MemoryPool


@dataclass(frozen=True)
class Site:
    """One line of a program, and the memory from there that is live."""

    call_site: tuple[Frame, ...]
    """Innermost call first; empty if the pool does not record call sites."""
    count: int
    size: int
    """Bytes, rounded as the pool does."""

    def __str__(self) -> str:
        where = [f"{frame.filename}:{frame.line} in {frame.name}" for frame in self.call_site]
        calls = "\n        called from ".join(where) or "somewhere (call sites are not recorded)"
        return f"{self.size:,} bytes in {self.count} allocation(s)\n    {calls}"


@dataclass(frozen=True)
class LeakReport:
    """Memory that is live and, by the reader's lights, should not be. Largest first."""

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
    """Everything that is live now, by call site. Asked for when all should be freed: the leaks."""
    blocks = (block for part in pool.ranges() for block in part.blocks)
    return _report((b.call_site, b.size) for b in blocks if b.state == "live")


@contextlib.contextmanager
def watch_leaks(pool: MemoryPool) -> Iterator[Callable[[], LeakReport]]:
    """`with watch_leaks(pool) as leaks: ...`, then `leaks()`: allocated inside and still live.

    Memory that was live before does not count, not even if its address is used again.
    """
    live: dict[int, tuple[tuple[Frame, ...], int]] = {}

    def listen(event: Event) -> None:
        if event.action == "alloc":
            live[event.address] = event.call_site, event.size
        elif event.action == "free":
            live.pop(event.address, None)

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
