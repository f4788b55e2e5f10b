"""Large pages: created for large requests, split for small ones."""

from __future__ import annotations

from contextlib import suppress

import pytest

from cukit.memory import DeviceOutOfMemory, MemoryPool, MemoryPoolConfig
from cukit.memory.providers.cuda_driver import DriverError
from cukit.memory.providers.cuda_vmm import VirtualPages
from tests.memory.invariants import check_invariants
from tests.memory.simulation import PAGE, InjectedError, SimulatedProvider, fill, holds
from tests.memory.test_cuda_vmm import PAGE as DRIVER_PAGE
from tests.memory.test_cuda_vmm import Driver

LARGE = 4
MANY = 2 * LARGE
"""Pages of the smallest request that gets large pages."""


def make_pool(limit: int = 64) -> tuple[MemoryPool, SimulatedProvider]:
    provider = SimulatedProvider(128 * PAGE, large_pages=LARGE)
    config = MemoryPoolConfig(max_pool_size=limit * PAGE, block_size=PAGE)
    return MemoryPool(config, provider), provider


def num_large(pool: MemoryPool) -> int:
    """The number of mapped large pages."""
    return len(pool._pager.large_mapped)


def test_many_pages_are_created_as_large_ones() -> None:
    pool, provider = make_pool()
    pool.allocate(MANY * PAGE - 512)
    pool.allocate((MANY - 1) * PAGE)
    assert num_large(pool) == 2
    assert provider.calls.count("create_large_pages") == 1
    check_invariants(pool)


def test_single_pages_become_large_ones_for_a_large_request() -> None:
    """The limit is never exceeded, and live blocks keep their bytes."""
    pool, _ = make_pool(limit=4 * MANY)
    blocks = [pool.allocate(PAGE) for _ in range(4 * MANY)]
    for number, block in enumerate(blocks):
        fill(block, PAGE, number)
    for block in blocks[::2]:
        pool.free(block)
    large = pool.allocate(2 * MANY * PAGE)
    fill(large, 2 * MANY * PAGE, 99)
    assert num_large(pool) == 4
    assert all(holds(block, PAGE, 2 * n + 1) for n, block in enumerate(blocks[1::2]))
    assert pool.statistics().peak_reserved_bytes == 4 * MANY * PAGE
    check_invariants(pool)


def test_a_small_block_splits_one_large_page() -> None:
    """Other large pages stay whole, and all pages but the block's can be remapped."""
    pool, _ = make_pool(limit=MANY)
    pool.free(pool.allocate(MANY * PAGE))
    small = pool.allocate(512)
    assert num_large(pool) == 1
    assert pool.statistics().reclaimable_by_remap_bytes == (MANY - 1) * PAGE
    check_invariants(pool)
    pool.allocate((MANY - 1) * PAGE)
    pool.free(small)
    check_invariants(pool)


def test_a_large_page_in_use_is_not_counted_as_reclaimable() -> None:
    """A large page is not split while a stream may still use it."""
    pool, provider = make_pool(limit=MANY)
    provider.lagging = True
    block = pool.allocate(MANY * PAGE)
    provider.launch(0, lambda: None)
    pool.free(block)
    small = pool.allocate(512)
    assert small == block
    assert num_large(pool) == 2
    provider.run_all()
    assert pool.statistics().reclaimable_by_remap_bytes == (MANY - LARGE) * PAGE
    check_invariants(pool)


def scattered(limit: int) -> tuple[MemoryPool, SimulatedProvider, list[int]]:
    """A pool with 4 * MANY pages, every second of them live and filled with its number."""
    pool, provider = make_pool(limit)
    blocks = [pool.allocate(PAGE) for _ in range(4 * MANY)]
    for number, block in enumerate(blocks):
        fill(block, PAGE, number)
    for block in blocks[::2]:
        pool.free(block)
    return pool, provider, blocks[1::2]


def test_below_the_limit_scattered_pages_stay_until_later() -> None:
    """A large request gets new large pages; the free single ones count as held, and go back to the
    device during later requests."""
    pool, provider, kept = scattered(limit=8 * MANY)
    provider.calls.clear()
    big = pool.allocate(2 * MANY * PAGE)
    assert not {"unmap_pages", "destroy_pages"} & set(provider.calls)
    fill(big, 2 * MANY * PAGE, 99)
    held = pool.statistics()
    assert held.reserved_bytes == 6 * MANY * PAGE == provider.used_bytes
    assert held.reclaimable_by_remap_bytes == 2 * MANY * PAGE
    check_invariants(pool)
    for number in range(1, 5):  # these blocks share one page
        pool.allocate(number * 512)
        check_invariants(pool)
    assert pool.statistics().reserved_bytes == provider.used_bytes == (4 * MANY + 1) * PAGE
    assert all(holds(block, PAGE, 2 * n + 1) for n, block in enumerate(kept))
    assert holds(big, 2 * MANY * PAGE, 99)


def test_a_later_request_may_use_the_scattered_pages() -> None:
    """The pool keeps the pages that the next request needs, and stays within its limit."""
    pool, provider, kept = scattered(limit=6 * MANY)
    pool.allocate(2 * MANY * PAGE)
    again = pool.allocate(2 * MANY * PAGE)
    assert provider.used_bytes == pool.statistics().peak_reserved_bytes == 6 * MANY * PAGE
    with pytest.raises(MemoryError):
        pool.allocate(PAGE)
    pool.free(again)
    check_invariants(pool)
    assert all(holds(block, PAGE, 2 * n + 1) for n, block in enumerate(kept))


def test_the_limit_leaves_room_for_some_large_pages() -> None:
    """For the rest of the request, single pages are remapped."""
    pool, _, kept = scattered(limit=4 * MANY + 2 * LARGE + 1)
    pool.allocate(2 * MANY * PAGE)
    held = pool.statistics()
    assert held.reserved_bytes == (4 * MANY + 2 * LARGE) * PAGE
    assert held.pages_remapped == 2 * MANY - 2 * LARGE
    assert num_large(pool) == 2 * MANY // LARGE
    assert all(holds(block, PAGE, 2 * n + 1) for n, block in enumerate(kept))
    check_invariants(pool)


def test_single_pages_are_remapped_if_the_device_is_full() -> None:
    pool, provider, _ = scattered(limit=8 * MANY)
    provider.total_bytes = provider.used_bytes
    pool.allocate(2 * MANY * PAGE)
    assert pool.statistics().reserved_bytes == provider.used_bytes == 4 * MANY * PAGE
    check_invariants(pool)


@pytest.mark.parametrize("release", ["trim", "defragment"])
def test_scattered_pages_are_returned_immediately(release: str) -> None:
    pool, provider, _ = scattered(limit=8 * MANY)
    pool.allocate(2 * MANY * PAGE)
    getattr(pool, release)()
    assert pool.statistics().reserved_bytes == provider.used_bytes == 4 * MANY * PAGE
    check_invariants(pool)


@pytest.mark.parametrize("number", range(6))
def test_a_failure_while_pages_are_returned_loses_nothing(number: int) -> None:
    pool, provider, kept = scattered(limit=8 * MANY)
    pool.allocate(2 * MANY * PAGE)
    small = pool.allocate(512)
    provider.fail_in = number
    with suppress(InjectedError):
        pool.allocate(1024)
    provider.fail_in = None
    check_invariants(pool)
    pool.trim()
    assert pool.statistics().reserved_bytes == provider.used_bytes
    assert all(holds(block, PAGE, 2 * n + 1) for n, block in enumerate(kept))
    pool.free(small)
    check_invariants(pool)


@pytest.mark.parametrize("number", range(6))
def test_a_failed_call_loses_nothing(number: int) -> None:
    pool, provider = make_pool(limit=4 * MANY)
    blocks = [pool.allocate(PAGE) for _ in range(4 * MANY)]
    for index, block in enumerate(blocks):
        fill(block, PAGE, index)
    for block in blocks[::2]:
        pool.free(block)
    provider.fail_in = number * 4
    try:
        pool.allocate(2 * MANY * PAGE)
    except InjectedError:
        check_invariants(pool)
        pool.allocate(2 * MANY * PAGE)
    provider.fail_in = None
    assert all(holds(block, PAGE, 2 * n + 1) for n, block in enumerate(blocks[1::2]))
    check_invariants(pool)


def test_memory_that_others_allocate_meanwhile() -> None:
    """The device may run out between destroying single pages and creating large ones."""
    pool, provider = make_pool(limit=4 * MANY)
    blocks = [pool.allocate(PAGE) for _ in range(4 * MANY)]
    for block in blocks[::2]:
        pool.free(block)
    inner = provider.destroy_pages

    def destroy(pages: object) -> None:
        inner(pages)  # type: ignore[arg-type]
        provider.total_bytes = provider.used_bytes

    provider.destroy_pages = destroy  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        pool.allocate(2 * MANY * PAGE)
    check_invariants(pool)
    provider.total_bytes = 128 * PAGE
    pool.allocate(2 * MANY * PAGE)
    check_invariants(pool)


def test_the_driver_maps_each_large_page_once() -> None:
    driver = Driver()
    sizes: list[int] = []
    inner = driver.map

    def mapped(address: int, size: int, handle: int) -> None:
        sizes.append(size)
        inner(address, size, handle)

    driver.map = mapped  # type: ignore[method-assign]
    driver.set_access = lambda address, size: None  # type: ignore[method-assign]
    pages = VirtualPages(driver, DRIVER_PAGE, 4)
    (single,) = pages.create_pages(1)
    first, second = pages.create_large_pages(2)
    pages.map_pages(8 * DRIVER_PAGE, [*first, *second, single])
    assert sizes == [4 * DRIVER_PAGE, 4 * DRIVER_PAGE, DRIVER_PAGE]
    assert list(driver.mapped) == [8 * DRIVER_PAGE, 12 * DRIVER_PAGE, 16 * DRIVER_PAGE]
    driver.mapped.clear()
    driver.refused, driver.allowed = "release", 1
    pages.destroy_pages([*first, *second])
    assert len(driver.handles) == 2, "the driver has kept one of them"
    driver.refused = "create"
    (again,) = pages.create_large_pages(1)
    assert again == second
    with pytest.raises(DriverError, match="create"):
        pages.create_large_pages(1)


def test_creation_of_large_pages_is_all_or_nothing() -> None:
    driver = Driver(most=3)
    pages = VirtualPages(driver, DRIVER_PAGE, 4)
    with pytest.raises(DeviceOutOfMemory):
        pages.create_large_pages(4)
    assert not driver.handles


def test_defragment_merges_ranges_left_by_returned_pages() -> None:
    pool, _ = make_pool(limit=8 * MANY)
    blocks = [pool.allocate(MANY * PAGE)]
    singles = [pool.allocate(PAGE) for _ in range(2 * MANY)]
    for block in singles[::2]:
        pool.free(block)
    blocks.append(pool.allocate(MANY * PAGE))
    for block in blocks + singles[1::2]:
        pool.free(block)
    report = pool.defragment()
    assert report.fragmentation_after == 0
    assert report.largest_free_after == pool.statistics().reserved_bytes
    check_invariants(pool)
