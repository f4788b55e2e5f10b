"""In a nearly full pool, blocks are placed so that they use fewer wholly free pages."""

from __future__ import annotations

import pytest

from cukit.errors import OutOfMemoryError
from cukit.memory import MemoryPool, MemoryPoolConfig
from cukit.memory.pool import pager as pager_module
from tests.memory.invariants import check_invariants
from tests.memory.simulation import PAGE, SimulatedProvider

TENTH = PAGE // 20 // 512 * 2 * 512
"""Nearly a tenth of a page, and a multiple of 512."""


def full_pool() -> tuple[MemoryPool, list[int]]:
    """Ten pages. A hole of 2.1 pages between live blocks and half of the last page are free."""
    pool = MemoryPool(
        MemoryPoolConfig(max_pool_size=10 * PAGE, block_size=PAGE), SimulatedProvider(64 * PAGE)
    )
    blocks = [pool.allocate(size) for size in (PAGE - TENTH, 2 * PAGE + TENTH, 6 * PAGE, PAGE // 2)]
    assert blocks == [blocks[0] + at for at in (0, PAGE - TENTH, 3 * PAGE, 9 * PAGE)]
    pool.free(blocks[1])
    return pool, blocks


def test_a_block_is_placed_where_it_needs_fewer_pages() -> None:
    """Starting at the end of the last page, the block takes one more page; in the hole, two."""
    pool, _ = full_pool()
    assert pool.allocate(PAGE + PAGE // 4) % PAGE == 3 * PAGE // 4
    assert pool.statistics().pages_remapped == 1
    check_invariants(pool)
    pool.allocate(PAGE)
    assert pool.statistics().reserved_bytes == 10 * PAGE


def test_no_driver_calls_unless_the_pool_is_nearly_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best fit is used instead, and a later request fails under the same limit."""
    monkeypatch.setattr(pager_module, "NEARLY_FULL", 2.0)
    pool, blocks = full_pool()
    assert pool.allocate(PAGE + PAGE // 4) == blocks[1]
    assert pool.statistics().pages_remapped == 0
    with pytest.raises(OutOfMemoryError):
        pool.allocate(PAGE)


def test_the_hole_that_costs_fewer_pages_is_chosen() -> None:
    """The larger hole begins with half a page, so the block needs one whole page there, not two."""
    pool = MemoryPool(
        MemoryPoolConfig(max_pool_size=10 * PAGE, block_size=PAGE), SimulatedProvider(64 * PAGE)
    )
    sizes = (PAGE, 2 * PAGE, PAGE + PAGE // 2, 2 * PAGE + PAGE // 2, 3 * PAGE)
    blocks = [pool.allocate(size) for size in sizes]
    pool.free(blocks[1])
    pool.free(blocks[3])
    assert pool.allocate(PAGE + PAGE // 2) == blocks[3]
    check_invariants(pool)
