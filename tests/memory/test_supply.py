"""A miss merges only the cached blocks that its request needs."""

from __future__ import annotations

import pytest

from cukit.memory import MemoryPool, MemoryPoolConfig
from cukit.memory.pool.supply import LARGE_BYTES
from tests.memory.invariants import check_invariants
from tests.memory.simulation import KIB, SimulatedProvider

PAGE = 2 * LARGE_BYTES


@pytest.fixture
def pool() -> MemoryPool:
    """A pool that holds eight free pages."""
    config = MemoryPoolConfig(initial_pool_size=8 * PAGE)
    return MemoryPool(config, SimulatedProvider(16 * PAGE, page_bytes=PAGE))


def hits(pool: MemoryPool) -> int:
    return pool.statistics().num_hits


def test_a_miss_of_one_size_does_not_affect_others(pool: MemoryPool) -> None:
    sizes = [KIB * number for number in range(1, 40)]
    for address in [pool.allocate(size) for size in sizes]:
        pool.free(address)
    kept = pool.allocate(100 * KIB)
    before = hits(pool)
    for address in [pool.allocate(size) for size in sizes]:
        pool.free(address)
    assert hits(pool) == before + len(sizes)
    pool.free(kept)
    check_invariants(pool)


def test_large_blocks_are_merged_for_large_requests(pool: MemoryPool) -> None:
    small = pool.allocate(KIB)
    parts = [pool.allocate(LARGE_BYTES) for _ in range(4)]
    end = pool.allocate(KIB)
    for address in (*parts, small):
        pool.free(address)
    before = hits(pool)
    assert pool.allocate(3 * LARGE_BYTES) == parts[0], "the smallest hole, merged from large blocks"
    assert pool.allocate(KIB) == small, "still in the list of its size"
    assert hits(pool) == before + 1
    assert pool.owns(end)
    check_invariants(pool)


def test_small_blocks_are_merged_before_the_pool_grows(pool: MemoryPool) -> None:
    blocks = [pool.allocate(PAGE // 4) for _ in range(32)]
    reserved = pool.statistics().reserved_bytes
    for address in blocks[4:12]:
        pool.free(address)
    assert pool.allocate(2 * PAGE) == blocks[4]
    assert pool.statistics().reserved_bytes == reserved
    assert pool.statistics().pages_remapped == 0
    check_invariants(pool)
