"""A provider that has no memory and adds up the modelled time of driver calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from cukit.memory import HostProvider
from cukit.memory.batched_copy import Moves
from cukit.memory.providers.cuda_vmm import LargePart, choose_large_pages

MIB, GIB = 1 << 20, 1 << 30

COST_US = {"create": 10.0, "destroy": 14.0, "map": 4.0, "open": 30.0, "unmap": 16.0}
"""Per handle, whatever its size: between the measurements of two H200 hosts
(profiling/notes/memory_pool.md)."""
COPY_US = 10.0
"""Per launch, including the wait for it."""
COPY_BYTES_PER_US = 1.8e6
"""3.6 TB/s, reads and writes together."""


class CostModelProvider(HostProvider):
    """Addresses and pages are plain numbers. `spent_us`: the modelled driver time."""

    def __init__(
        self,
        total_bytes: int = 64 * GIB,
        *,
        page_bytes: int = 2 * MIB,
        large_pages: int | None = None,
    ) -> None:
        large = large_pages or choose_large_pages(page_bytes)
        super().__init__(total_bytes, page_bytes=page_bytes, large_pages=large)
        self.spent_us = 0.0
        self.handles: Counter[str] = Counter()
        """The number of handles by kind of call."""
        self._handle_at: dict[int, Any] = {}
        self._next_address = 1 << 40
        self._next_page = 0

    def _add_cost(self, call: str, handles: int) -> None:
        self.handles[call] += handles
        self.spent_us += COST_US[call] * handles

    def _handles(self, pages: Sequence[Any]) -> int:
        """The number of handles; a large page counts once, as its first part."""
        return sum(not (isinstance(page, LargePart) and page.number) for page in pages)

    def reserve(self, size: int) -> int:
        address = self._next_address
        self._next_address += size + GIB
        return address

    def release(self, address: int, size: int) -> None:
        pass

    def create_pages(self, count: int) -> list[Any]:
        self._charge(count * self.page_bytes)
        self._add_cost("create", count)
        self._next_page += count
        return list(range(self._next_page - count, self._next_page))

    def create_large_pages(self, count: int) -> list[tuple[Any, ...]]:
        self._charge(count * self.large_pages * self.page_bytes)
        self._add_cost("create", count)
        self._next_page += count
        numbers = range(self.large_pages)
        handles = range(self._next_page - count, self._next_page)
        return [tuple(LargePart(handle, number) for number in numbers) for handle in handles]

    def destroy_pages(self, pages: Sequence[Any]) -> None:
        self.used_bytes -= len(pages) * self.page_bytes
        self._add_cost("destroy", self._handles(pages))

    def map_pages(self, address: int, pages: Sequence[Any]) -> None:
        self._add_cost("map", self._handles(pages))
        self._add_cost("open", self._handles(pages))
        self._handle_at.update(zip(self._page_addresses(address, len(pages)), pages, strict=True))

    def unmap_pages(self, address: int, count: int) -> None:
        pages = [self._handle_at.pop(at) for at in self._page_addresses(address, count)]
        self._add_cost("unmap", self._handles(pages))

    def copy(self, moves: Moves, stream: Hashable) -> None:
        self.spent_us += COPY_US + float(moves[:, 2].sum()) / COPY_BYTES_PER_US
