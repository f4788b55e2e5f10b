"""Leak reports: live memory by call site; memory that was live before a block is excluded."""

from __future__ import annotations

import pytest

from cukit.memory import DeviceBuffer, MemoryPool, MemoryPoolConfig
from cukit.memory.leaks import live_report, watch_leaks
from cukit.memory.providers.host import HostProvider


@pytest.fixture
def pool() -> MemoryPool:
    return MemoryPool(MemoryPoolConfig(call_site_depth=2), HostProvider())


def leaky(pool: MemoryPool, size: int) -> int:
    return pool.allocate(size)


def leaky_buffer(pool: MemoryPool) -> DeviceBuffer:
    return pool.allocate_buffer(1 << 20)


def test_live_memory_is_reported_by_call_site(pool: MemoryPool) -> None:
    kept = []
    for _ in range(3):
        kept.append(leaky(pool, 5_000))
    other = pool.allocate(100_000)
    report = live_report(pool)
    assert report.count == 4
    assert report.size == 100_352 + 3 * 5_120
    largest, three = report.sites
    assert (largest.count, largest.size) == (1, 100_352)
    assert (three.count, three.size) == (3, 3 * 5_120)
    assert [frame.name for frame in three.call_site] == [
        "leaky",
        "test_live_memory_is_reported_by_call_site",
    ]
    text = str(report)
    assert "115,712 bytes in 4 allocation(s) are live" in text
    assert "in leaky" in text
    assert text.index("100,352") < text.index("15,360")
    for address in (*kept, other):
        pool.free(address)
    assert not live_report(pool)
    assert str(live_report(pool)) == "nothing is live"


def test_memory_from_before_the_block_is_no_leak_when_it_moves(pool: MemoryPool) -> None:
    buffers = [leaky_buffer(pool) for _ in range(16)]
    for buffer in buffers[::2]:
        buffer.close()
    with watch_leaks(pool) as leaks:
        inside = leaky_buffer(pool)
        buffers[1].close()
        assert pool.defragment().bytes_moved > 0
        assert leaks().count == 1
        inside.close()
        assert not leaks()


def test_only_allocations_inside_the_block_count(pool: MemoryPool) -> None:
    before = pool.allocate(1_000)
    with watch_leaks(pool) as leaks:
        pool.free(leaky(pool, 2_000))
        pool.free(before)
        again = leaky(pool, 1_000)
        assert again == before, "the address is reused"
    assert leaks().count == 1
    assert leaks().sites[0].call_site[0].name == "leaky"
    after = pool.allocate(50_000)
    assert leaks().count == 1, "the block has ended"
    for address in (again, after):
        pool.free(address)


def test_a_moved_buffer_keeps_its_call_site(pool: MemoryPool) -> None:
    with watch_leaks(pool) as leaks:
        buffers = [leaky_buffer(pool) for _ in range(16)]
        for buffer in buffers[::2]:
            buffer.close()
        assert pool.defragment().bytes_moved
        assert leaks().count == 8
        assert leaks().sites == live_report(pool).sites
        assert leaks().sites[0].call_site[0].name == "leaky_buffer"
        for buffer in buffers[1::2]:
            buffer.close()
    assert not leaks()


def test_without_call_sites_the_report_says_how_to_record_them() -> None:
    pool = MemoryPool(MemoryPoolConfig(), HostProvider())
    address = pool.allocate(1)
    assert "MemoryPoolConfig(call_site_depth=8)" in str(live_report(pool))
    pool.free(address)
