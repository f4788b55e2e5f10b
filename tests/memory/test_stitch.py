"""Contiguous ranges assembled from the free ends of several pages by mapping those pages a second
time."""

from __future__ import annotations

import gc
import random

import pytest

from cukit.memory import MemoryPool, MemoryPoolConfig
from tests.memory.cost_model import MIB, CostModelProvider
from tests.memory.invariants import check_invariants
from tests.memory.simulation import PAGE, InjectedError, SimulatedProvider, fill, holds


def two_edges() -> tuple[MemoryPool, SimulatedProvider, list[int]]:
    """Five full pages; blocks[1] is the end of the second page, blocks[3] the start of the fourth.
    The limit allows no further page."""
    provider = SimulatedProvider(64 * PAGE)
    pool = MemoryPool(MemoryPoolConfig(max_pool_size=5 * PAGE, block_size=PAGE), provider)
    sizes = (PAGE + PAGE // 2, PAGE // 2, PAGE, PAGE // 2, PAGE + PAGE // 2)
    blocks = [pool.allocate(size) for size in sizes]
    for number, (block, size) in enumerate(zip(blocks, sizes, strict=True)):
        fill(block, size, number)
    return pool, provider, blocks


def test_a_hole_from_two_pages() -> None:
    pool, provider, blocks = two_edges()
    pool.free(blocks[1])
    pool.free(blocks[3])
    mapped = dict(provider.page_at)
    block = pool.allocate(3 * PAGE // 4)
    assert mapped.items() <= provider.page_at.items(), "live pages stay where they are"
    fill(block, 3 * PAGE // 4, 77)
    assert holds(blocks[0], 3 * PAGE // 2, 0)
    assert holds(blocks[2], PAGE, 2)
    assert holds(blocks[4], 3 * PAGE // 2, 4)
    assert holds(block, 3 * PAGE // 4, 77)
    check_invariants(pool)
    statistics = pool.statistics()
    assert statistics.reserved_bytes == 5 * PAGE
    assert statistics.free_bytes == PAGE // 4
    pool.free(block)
    for kept in (blocks[0], blocks[2], blocks[4]):
        pool.free(kept)
    assert pool.allocate(5 * PAGE)
    assert len(provider.page_at) == 5, "each page is mapped only once"
    check_invariants(pool)


def test_the_second_mapping_is_undone_when_the_page_is_needed() -> None:
    pool, provider, blocks = two_edges()
    pool.free(blocks[1])
    pool.free(blocks[3])
    block = pool.allocate(PAGE)
    assert len(provider.page_at) == 7
    pool.free(blocks[0])
    pool.free(block)
    assert pool.allocate(2 * PAGE) > 0
    check_invariants(pool)


def test_an_unreferenced_pool_destroys_each_page_once() -> None:
    pool, provider, blocks = two_edges()
    pool.free(blocks[1])
    pool.free(blocks[3])
    block = pool.allocate(3 * PAGE // 4)
    for owned in (block, blocks[0], blocks[2], blocks[4]):
        pool.free(owned)
    del pool
    gc.collect()
    assert provider.used_bytes == 0
    assert not provider.page_at


def test_a_failed_driver_call_changes_nothing() -> None:
    pool, provider, blocks = two_edges()
    pool.free(blocks[1])
    pool.free(blocks[3])
    provider.fail_in = next(number for number in range(20) if _next_calls(number) == "map_pages")
    with pytest.raises(InjectedError):
        pool.allocate(3 * PAGE // 4)
    check_invariants(pool)
    assert pool.allocate(3 * PAGE // 4)
    check_invariants(pool)


def _next_calls(number: int) -> str:
    """The name of provider call `number`, from 0, of the same allocation in a new pool; "" if the
    allocation makes fewer calls."""
    pool, provider, blocks = two_edges()
    pool.free(blocks[1])
    pool.free(blocks[3])
    before = len(provider.calls)
    pool.allocate(3 * PAGE // 4)
    calls = provider.calls[before:]
    return calls[number] if number < len(calls) else ""


@pytest.mark.parametrize("seed", range(4))
def test_no_byte_is_used_by_two_allocations(seed: int) -> None:
    """Two lagging streams and a nearly reached limit, with defragmentation."""
    numbers = random.Random(seed)
    provider = SimulatedProvider(64 * PAGE)
    provider.lagging, provider.progress = True, random.Random(seed)
    pool = MemoryPool(MemoryPoolConfig(max_pool_size=24 * PAGE, block_size=PAGE), provider)
    live: list[tuple[int, int, int, int]] = []
    stitched = 0
    for step in range(600):
        size = int(2 ** numbers.uniform(9, 18))
        stream = numbers.randrange(2)
        while sum(each[1] for each in live) + size > 20 * PAGE:
            address, length, owner, pattern = live.pop(numbers.randrange(len(live)))
            _launch(provider, owner, lambda a=address, n=length, p=pattern: _check(a, n, p))  # type: ignore[misc]
            pool.free(address)
        try:
            address = pool.allocate(size, stream)
        except MemoryError:
            continue
        _launch(provider, stream, lambda a=address, n=size, p=step: fill(a, n, p))  # type: ignore[misc]
        live.append((address, size, stream, step))
        stitched = max(stitched, len(pool._supply._stitcher._aliases))
        if step % 50 == 0:
            check_invariants(pool)
            pool.defragment()
            check_invariants(pool)
    provider.run_all()
    for address, size, _, pattern in live:
        _check(address, size, pattern)
    assert stitched > 1


def _check(address: int, size: int, pattern: int) -> None:
    assert holds(address, size, pattern), "overwritten"


def _launch(provider: SimulatedProvider, stream: int, work: object) -> None:
    provider.launch(stream, work)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["uniform", "log-uniform"])
def test_sizes_of_all_kinds_below_a_tight_limit(kind: str) -> None:
    """At most 200 MiB live under a 230 MiB limit: frees random blocks to make room for each new
    one."""
    for seed in range(3):
        numbers = random.Random(seed)
        pool = MemoryPool(MemoryPoolConfig(max_pool_size=230 * MIB), CostModelProvider())
        live: list[tuple[int, int]] = []
        total = 0
        for _ in range(2500):
            size = (
                numbers.randint(256, 8 * MIB)
                if kind == "uniform"
                else int(2 ** numbers.uniform(8, 23))
            )
            while total + size > 200 * MIB:
                place = numbers.randrange(len(live))
                live[place], live[-1] = live[-1], live[place]
                address, length = live.pop()
                pool.free(address)
                total -= length
            live.append((pool.allocate(size), size))
            total += size
        check_invariants(pool)
