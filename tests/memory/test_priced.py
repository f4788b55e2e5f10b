"""Driver calls and their modelled times (tests/memory/cost_model.py)."""

from __future__ import annotations

import pytest

from cukit.memory import MemoryPool, MemoryPoolConfig
from cukit.memory.replay.mixes import make_log
from cukit.memory.replay.replay import script_of
from tests.memory.cost_model import COST_US, GIB, MIB, CostModelProvider


def scattered(provider: CostModelProvider, limit: int = 2 * GIB) -> MemoryPool:
    """A pool with 1 GiB free, in single pages between live ones."""
    page = provider.page_bytes
    pool = MemoryPool(MemoryPoolConfig(max_pool_size=limit), provider)
    blocks = [pool.allocate(page) for _ in range(2 * GIB // page)]
    for block in blocks[::2]:
        pool.free(block)
    return pool


@pytest.mark.parametrize("page_bytes", [2 * MIB, 16 * MIB])
def test_a_remap_unmaps_maps_and_enables_each_page_once(page_bytes: int) -> None:
    """Without large pages: 26 ms in pages of 2 MiB at these costs, 3 ms in pages of 16 MiB."""
    provider = CostModelProvider(page_bytes=page_bytes, large_pages=1)
    pool = scattered(provider)
    before, spent_before = provider.handles.copy(), provider.spent_us
    pool.allocate(GIB)
    pages = GIB // page_bytes
    assert provider.handles - before == {"unmap": pages, "map": pages, "open": pages}
    each = COST_US["unmap"] + COST_US["map"] + COST_US["open"]
    assert provider.spent_us - spent_before == pytest.approx(pages * each)


def test_a_remap_of_many_pages_creates_large_ones() -> None:
    """17 ms, most of it for unmapping and destroying 512 pages of 2 MiB."""
    provider = CostModelProvider()
    pool = scattered(provider)
    before, spent_before = provider.handles.copy(), provider.spent_us
    pool.allocate(GIB)
    large = {"create": 32, "map": 32, "open": 32}
    assert provider.handles - before == {"unmap": 512, "destroy": 512, **large}
    assert provider.spent_us - spent_before < 17_000
    assert pool.statistics().peak_reserved_bytes == 2 * GIB


def test_below_the_limit_a_request_waits_for_large_pages_only() -> None:
    """1.4 ms; later requests return the 512 single pages, 32 at a time."""
    provider = CostModelProvider()
    pool = scattered(provider, limit=3 * GIB)
    spent_before, spent = provider.spent_us, []
    pool.allocate(GIB)
    assert provider.spent_us - spent_before < 2_000
    for number in range(1, 19):
        spent_before = provider.spent_us
        pool.allocate(number * 512)
        spent.append(provider.spent_us - spent_before)
    assert max(spent) < 1_100
    assert pool.statistics().reserved_bytes == 2 * GIB + 2 * MIB  # the blocks share one page
    assert pool.statistics().peak_reserved_bytes == 3 * GIB


def test_large_pages_are_remapped_in_two_milliseconds() -> None:
    """1 GiB is free, in blocks of 128 MiB between live ones."""
    provider = CostModelProvider()
    pool = MemoryPool(MemoryPoolConfig(max_pool_size=2 * GIB), provider)
    blocks = [pool.allocate(128 * MIB) for _ in range(16)]
    for block in blocks[::2]:
        pool.free(block)
    spent_before = provider.spent_us
    pool.allocate(GIB)
    assert provider.spent_us - spent_before < 2_000


@pytest.mark.parametrize("seed", [0, 1])
def test_the_slowest_allocations_at_a_tight_limit(seed: int) -> None:
    """Blocks of up to 4 GiB with a limit of about 1.05 times the peak of live bytes: 99 % of the
    allocations take less than 10 ms of driver time; with pages of 2 MiB only, 78 ms."""
    script = script_of(make_log("random-1000-4096", seed))
    provider = CostModelProvider()
    pool = MemoryPool(MemoryPoolConfig(max_pool_size=script.tight_limit), provider)
    blocks = [0] * script.num_blocks
    spent = []
    for block, size, stream in script.steps:
        if not size:
            pool.free(blocks[block], stream)
            continue
        before = provider.spent_us
        blocks[block] = pool.allocate(size, stream)
        spent.append(provider.spent_us - before)
    assert sorted(spent)[round(0.99 * (len(spent) - 1))] < 10_000
