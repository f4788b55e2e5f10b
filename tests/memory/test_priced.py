"""What the driver is asked to do, counted: the prices are in tests/memory/priced.py."""

from __future__ import annotations

import pytest

from cukit.memory import MemoryPool, MemoryPoolConfig
from tests.memory.priced import GIB, MIB, PRICES_US, PricedProvider


@pytest.mark.parametrize("page_bytes", [2 * MIB, 16 * MIB])
def test_a_remap_unmaps_maps_and_opens_each_page_once(page_bytes: int) -> None:
    """1 GiB out of pages that lie one by one between live ones: 26 ms in pages of 2 MiB at these
    prices, 3 in pages of 16."""
    provider = PricedProvider(page_bytes=page_bytes)
    pool = MemoryPool(MemoryPoolConfig(max_pool_size=2 * GIB), provider)
    blocks = [pool.allocate(page_bytes) for _ in range(2 * GIB // page_bytes)]
    for block in blocks[::2]:
        pool.free(block)
    before, paid = provider.pages.copy(), provider.spent_us
    pool.allocate(GIB)
    pages = GIB // page_bytes
    assert provider.pages - before == {"unmap": pages, "map": pages, "open": pages}
    each = PRICES_US["unmap"] + PRICES_US["map"] + PRICES_US["open"]
    assert provider.spent_us - paid == pytest.approx(pages * each)
