"""The contract of a pool, tested on every provider."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest

from cukit.errors import ArrayShapeError, ConfigError, OutOfMemoryError, PointerError
from cukit.memory import Event, MemoryPool, Provider
from tests.memory.invariants import check_invariants

MIB = 1 << 20
MakePool = Callable[..., MemoryPool]


def write(pool: MemoryPool, address: int, size: int, value: int) -> None:
    pool.provider.array(address, (size,), np.uint8, None)[:] = value


def holds(pool: MemoryPool, address: int, size: int, value: int) -> bool:
    return bool((pool.provider.array(address, (size,), np.uint8, None) == value).all())


def test_blocks_are_aligned_apart_and_writable(make_pool: MakePool) -> None:
    pool = make_pool()
    sizes = [1, 511, 512, 513, 4096, 100_000, MIB, 3 * MIB + 7]
    addresses = [pool.allocate(size) for size in sizes]
    for value, (address, size) in enumerate(zip(addresses, sizes, strict=True)):
        assert address % 512 == 0
        write(pool, address, size, value)
    for value, (address, size) in enumerate(zip(addresses, sizes, strict=True)):
        assert holds(pool, address, size, value)
        pool.free(address)
    check_invariants(pool)
    pool.close()


def test_a_freed_block_is_reused_on_its_stream(make_pool: MakePool) -> None:
    pool = make_pool()
    first = pool.allocate(5000)
    pool.free(first)
    assert pool.allocate(5120) == first
    assert pool.statistics().num_hits == 1
    pool.free(first)


def test_an_allocation_of_zero_bytes(make_pool: MakePool) -> None:
    pool = make_pool()
    first, second = pool.allocate(0), pool.allocate(0)
    assert first != second
    pool.free(first)
    pool.free(second)
    with pytest.raises(ConfigError, match="size: expected at least 0, got -1"):
        pool.allocate(-1)


def test_random_sizes_keep_their_bytes(make_pool: MakePool, rng: np.random.Generator) -> None:
    pool = make_pool()
    live: list[tuple[int, int, int]] = []
    for step in range(400):
        if live and rng.random() < 0.45:
            address, size, value = live.pop(int(rng.integers(len(live))))
            assert holds(pool, address, size, value)
            pool.free(address)
        else:
            size = int(2 ** rng.uniform(0, 21))
            address = pool.allocate(size)
            write(pool, address, size, step % 251)
            live.append((address, size, step % 251))
    check_invariants(pool)
    for address, size, value in live:
        assert holds(pool, address, size, value)
        pool.free(address)
    pool.close()
    assert pool.statistics().reserved_bytes == 0


def test_freed_on_another_thread(make_pool: MakePool) -> None:
    pool = make_pool()
    addresses = [pool.allocate(1000) for _ in range(50)]
    thread = threading.Thread(target=lambda: [pool.free(address) for address in addresses])
    thread.start()
    thread.join()
    assert pool.statistics().num_live == 0
    check_invariants(pool)


def test_errors_describe_wrong_pointers(make_pool: MakePool) -> None:
    pool, other = make_pool(), make_pool()
    address, foreign = pool.allocate(10_000), other.allocate(512)
    with pytest.raises(PointerError, match="512 bytes inside one of 10000 bytes"):
        pool.free(address + 512)
    with pytest.raises(PointerError, match="belongs to another pool"):
        pool.free(foreign)
    with pytest.raises(PointerError, match="not an address of this pool"):
        pool.free(64)
    pool.free(address)
    with pytest.raises(PointerError, match="double free"):
        pool.free(address)
    with pytest.raises(PointerError, match="1 live allocations"):
        other.close()
    other.free(foreign)
    other.close()
    check_invariants(pool)


def test_the_limit_holds_and_can_be_reached(make_pool: MakePool) -> None:
    pool = make_pool(max_pool_size=32 * MIB)
    addresses = [pool.allocate(2 * MIB) for _ in range(16)]
    with pytest.raises(OutOfMemoryError):
        pool.allocate(1)
    assert pool.statistics().peak_reserved_bytes == 32 * MIB
    for address in addresses:
        pool.free(address)
    whole = pool.allocate(32 * MIB)
    assert pool.statistics().peak_reserved_bytes == 32 * MIB
    pool.free(whole)
    check_invariants(pool)
    pool.close()


def test_scattered_free_pages_serve_a_large_request(make_pool: MakePool) -> None:
    """32 MiB are free in holes of 2 MiB: a request of 32 MiB succeeds only by remapping pages."""
    pool = make_pool(initial_pool_size=64 * MIB, max_pool_size=64 * MIB)
    addresses = [pool.allocate(2 * MIB) for _ in range(32)]
    for value, address in enumerate(addresses):
        write(pool, address, 2 * MIB, value)
    for address in addresses[::2]:
        pool.free(address)
    if pool.provider.can_remap:
        large = pool.allocate(32 * MIB)
        write(pool, large, 32 * MIB, 255)
        assert pool.statistics().pages_remapped == 16
        assert pool.statistics().fragmentation == 0
        pool.free(large)
    else:
        with pytest.raises(OutOfMemoryError, match=r"free: largest hole 2.00 MiB"):
            pool.allocate(32 * MIB)
    for value, address in enumerate(addresses):
        if value % 2:
            assert holds(pool, address, 2 * MIB, value)
            pool.free(address)
    check_invariants(pool)
    pool.close()


def test_buffers_move_and_keep_their_bytes(make_pool: MakePool) -> None:
    pool = make_pool(enable_defrag=False, block_size=32 * MIB)
    buffers = [pool.allocate_buffer(300_000) for _ in range(60)]
    for value, buffer in enumerate(buffers):
        buffer.array((300_000,), np.uint8)[:] = value
    for buffer in buffers[::2]:
        buffer.close()
    kept = buffers[1].pin()
    report = pool.defragment()
    assert report.bytes_moved > 0
    assert report.fragmentation_after < report.fragmentation_before
    assert report.largest_free_after > report.largest_free_before
    assert buffers[1].pin() == kept
    for value, buffer in enumerate(buffers):
        if value % 2:
            array = buffer.array((300_000,), np.uint8)
            assert bool((array == value).all())
    check_invariants(pool)
    statistics = pool.statistics()
    assert statistics.bytes_moved == report.bytes_moved
    assert statistics.num_defragments == 1


def test_a_buffer_frees_itself(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool.allocate_buffer(1000) as buffer:
        assert pool.statistics().num_live == 1
        address = buffer.pin()
        with pytest.raises(PointerError, match="belongs to a DeviceBuffer"):
            pool.free(address)
        buffer.unpin()
        with pytest.raises(PointerError, match="unpin without pin"):
            buffer.unpin()
    assert pool.statistics().num_live == 0
    with pytest.raises(PointerError, match="used after close"):
        buffer.pin()
    buffer.close()
    pool.allocate_buffer(1000)
    gc.collect()
    assert pool.statistics().num_live == 0
    check_invariants(pool)


def test_an_array_keeps_its_buffer(make_pool: MakePool) -> None:
    pool = make_pool()
    buffer = pool.allocate_buffer(4000)
    array = buffer.array((10, 100), np.float32)
    view = array[3:]
    view[:] = 7
    buffer.close()
    del array, buffer
    gc.collect()
    assert pool.statistics().num_live == 1
    assert float(view.sum()) == 4900
    del view
    gc.collect()
    assert pool.statistics().num_live == 0
    with (
        pool.allocate_buffer(100) as small,
        pytest.raises(ArrayShapeError, match="is larger"),
    ):
        small.array((26,), np.float32)
    gc.collect()
    assert pool.statistics().num_live == 0


def test_trim_returns_memory(make_pool: MakePool) -> None:
    pool = make_pool(initial_pool_size=20 * MIB)
    assert pool.statistics().reserved_bytes == 20 * MIB
    small = pool.allocate(100)
    large = pool.allocate(8 * MIB)
    pool.free(large)
    given = pool.trim()
    assert pool.statistics().reserved_bytes == 20 * MIB - given
    if pool.provider.can_remap:
        assert pool.statistics().reserved_bytes == 2 * MIB
    pool.free(small)
    pool.trim()
    assert pool.statistics().reserved_bytes == 0
    check_invariants(pool)


def test_growth_factor(make_pool: MakePool) -> None:
    pool = make_pool(block_size=8 * MIB, growth_factor=2.0, max_pool_size=50 * MIB)
    pool.allocate(100)
    assert pool.statistics().reserved_bytes == 8 * MIB
    pool.allocate(9 * MIB)
    assert pool.statistics().reserved_bytes in (16 * MIB, 24 * MIB)
    for _ in range(3):
        pool.allocate(6 * MIB)
    assert pool.statistics().peak_reserved_bytes <= 50 * MIB
    check_invariants(pool)


def test_statistics_and_scopes(make_pool: MakePool) -> None:
    pool = make_pool()
    outer_block = pool.allocate(1 * MIB)
    with pool.scope() as outer:
        block = pool.allocate(100_000)
        with pool.scope() as inner:
            pool.free(pool.allocate(3 * MIB))
        assert inner().peak_live_bytes == 4 * MIB + 100_352
        assert (inner().num_allocations, inner().num_frees) == (1, 1)
        pool.free(block)
    assert outer().num_allocations == 2
    assert outer().peak_live_bytes == 4 * MIB + 100_352
    assert outer().live_bytes == MIB
    with pool.scope() as quiet:
        pass
    assert quiet().peak_live_bytes == MIB
    statistics = pool.statistics()
    assert statistics.num_allocations == 3
    assert statistics.requested_bytes == MIB
    assert statistics.peak_live_bytes == 4 * MIB + 100_352
    total = statistics.live_bytes + statistics.pending_bytes + statistics.free_bytes
    assert statistics.reserved_bytes == total
    (stream,) = [key for key, share in statistics.per_stream.items() if share.live_bytes]
    assert stream == pool.provider.current_stream()
    pool.free(outer_block)


def test_listeners_receive_all_events_in_order(make_pool: MakePool) -> None:
    pool = make_pool(call_site_depth=2)
    received: list[Event] = []

    def broken(event: Event) -> None:
        raise ValueError("a listener's own error")

    pool.add_listener(broken)
    pool.add_listener(received.append)
    address = pool.allocate(1000)
    pool.free(address)
    pool.remove_listener(received.append)
    pool.allocate(1000)
    actions = [event.action for event in received]
    assert actions[0] == "segment_alloc"
    assert actions[-3:] == ["alloc", "free", "free_completed"]
    allocated = received[-3]
    assert (allocated.address, allocated.size) == (address, 1024)
    assert allocated.thread == threading.get_ident()
    assert allocated.call_site[0].name == "test_listeners_receive_all_events_in_order"
    assert received[-2].call_site == allocated.call_site
    assert [event.time for event in received] == sorted(event.time for event in received)
    check_invariants(pool)


def test_a_listener_must_not_use_the_pool(
    make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool()
    pool.add_listener(lambda event: pool.trim() and None)
    pool.allocate(512)
    assert "used from inside the pool" in caplog.text
    check_invariants(pool)


def test_memory_ranges(make_pool: MakePool) -> None:
    pool = make_pool()
    first, second = pool.allocate(512), pool.allocate(700)
    pool.free(first)
    ranges = pool.ranges()
    assert sum(part.mapped for part in ranges) == pool.statistics().reserved_bytes
    blocks = {block.address: block for part in ranges for block in part.blocks}
    assert blocks[first].state == "free"
    live = blocks[second]
    assert (live.state, live.size, live.requested, live.movable) == ("live", 1024, 700, False)


def test_two_streams_share_completed_memory(make_pool: MakePool, provider: Provider) -> None:
    streams = [1, 2]
    if "host" not in provider.name:
        cupy = pytest.importorskip("cupy")
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    pool = make_pool()
    address = pool.allocate(6 * MIB, streams[0])
    pool.free(address)
    if "host" not in provider.name:
        streams[0].synchronize()
    assert pool.allocate(6 * MIB, streams[1]) == address
    pool.used_on(address, streams[0])
    pool.free(address)
    pool.trim()
    assert pool.statistics().pending_bytes == 0
    assert pool.statistics().reserved_bytes == 0
    check_invariants(pool)
