"""Out of memory: the fallbacks, and the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cukit.errors import OutOfMemoryError
from cukit.memory import DeviceBuffer, MemoryPool, MemoryPoolConfig, OutOfMemoryReport
from cukit.memory.pool.oom import MAX_CALLBACKS, num_bytes
from tests.memory.invariants import check_invariants
from tests.memory.simulation import KIB, PAGE, SimulatedProvider


def tight_pool(pages: int = 16, **options: Any) -> tuple[MemoryPool, SimulatedProvider]:
    provider = SimulatedProvider(64 * PAGE)
    config = MemoryPoolConfig(max_pool_size=pages * PAGE, block_size=PAGE, **options)
    return MemoryPool(config, provider), provider


def test_memory_pending_on_another_stream_is_waited_for() -> None:
    pool, provider = tight_pool()
    provider.lagging = True
    address = pool.allocate(12 * PAGE, 1)
    pool.used_on(address, 2)
    provider.launch(2, lambda: None)
    pool.free(address)
    assert pool.statistics().pending_bytes == 12 * PAGE
    assert pool.allocate(12 * PAGE, 1) == address
    assert "synchronize" in provider.calls
    check_invariants(pool)


def test_a_stream_waits_rather_than_the_host() -> None:
    """Memory freed on another stream is reused after an event."""
    pool, provider = tight_pool()
    provider.lagging = True
    address = pool.allocate(12 * PAGE, 1)
    provider.launch(1, lambda: None)
    pool.free(address)
    assert pool.allocate(12 * PAGE, 2) == address
    assert "wait" in provider.calls
    assert "synchronize" not in provider.calls
    check_invariants(pool)


def test_a_small_request_grows_the_pool_rather_than_wait() -> None:
    """A small request does not make its stream wait for another."""
    pool, provider = tight_pool()
    provider.lagging = True
    address = pool.allocate(2 * KIB, 1)
    provider.launch(1, lambda: None)
    pool.free(address)
    assert pool.allocate(2 * KIB, 2) != address
    assert "wait" not in provider.calls
    check_invariants(pool)


def test_pages_are_remapped_before_bytes_move() -> None:
    pool, provider = tight_pool(enable_defrag=False)
    buffers = [pool.allocate_buffer(PAGE) for _ in range(16)]
    del buffers[::2]
    pool.allocate(8 * PAGE)
    assert "copy" not in provider.calls
    assert pool.statistics().pages_remapped == 8
    check_invariants(pool)


@pytest.mark.parametrize("enable_defrag", [True, False])
def test_buffers_move_before_an_allocation_fails(*, enable_defrag: bool) -> None:
    pool, provider = tight_pool(enable_defrag=enable_defrag)
    buffers = [pool.allocate_buffer(PAGE // 2) for _ in range(32)]
    for buffer in buffers[::2]:
        buffer.close()
    pool.allocate(8 * PAGE)
    assert {"copy", "move_slots"} & set(provider.calls)
    assert pool.statistics().num_out_of_memory == 0
    assert pool.statistics().num_defragments == int(enable_defrag)
    check_invariants(pool)


def test_automatic_defragmentation_instead_of_growth() -> None:
    """A pool that may grow defragments only if fragmentation exceeds the threshold."""
    for threshold, expected in ((0.9, 16), (1.0, 24)):
        pool, _ = tight_pool(pages=48, defrag_threshold=threshold)
        buffers = [pool.allocate_buffer(PAGE // 2) for _ in range(32)]
        for buffer in buffers[::2]:
            buffer.close()
        pool.allocate(8 * PAGE)
        assert pool.statistics().peak_reserved_bytes == expected * PAGE
        check_invariants(pool)


def test_small_segments_are_released_for_a_large_one() -> None:
    provider = SimulatedProvider(16 * PAGE, can_remap=False)
    pool = MemoryPool(MemoryPoolConfig(block_size=PAGE), provider)
    for address in [pool.allocate(2 * PAGE) for _ in range(8)]:
        pool.free(address)
    pool.allocate(16 * PAGE)
    assert provider.calls.count("release") == 8
    check_invariants(pool)


def test_garbage_is_collected() -> None:
    pool, _ = tight_pool()
    ring: list[Any] = [pool.allocate_buffer(12 * PAGE)]
    ring.append(ring)
    del ring
    pool.allocate(12 * PAGE)
    assert pool.statistics().num_live == 1
    check_invariants(pool)


def test_the_callback_is_called_last_and_may_use_the_pool() -> None:
    held: list[Callable[[], None]] = []
    requests: list[int] = []

    def release_something(size: int) -> bool:
        requests.append(size)
        if not held:
            return False
        held.pop()()
        return True

    pool, _ = tight_pool(on_out_of_memory=release_something)
    addresses = [pool.allocate(4 * PAGE) for _ in range(4)]
    held.extend([lambda: pool.free(addresses[0]), lambda: pool.free(addresses[2])])
    pool.allocate(8 * PAGE)
    assert requests == [8 * PAGE, 8 * PAGE]
    with pytest.raises(OutOfMemoryError):
        pool.allocate(8 * PAGE)
    assert len(requests) == 3
    check_invariants(pool)


def test_a_callback_that_frees_nothing_is_called_a_limited_number_of_times() -> None:
    requests: list[int] = []

    def free_nothing(size: int) -> bool:
        requests.append(size)
        return True

    pool, _ = tight_pool(on_out_of_memory=free_nothing)
    with pytest.raises(OutOfMemoryError):
        pool.allocate(17 * PAGE)
    assert requests == [17 * PAGE] * MAX_CALLBACKS


def test_exceptions_of_a_callback_propagate() -> None:
    def fail(size: int) -> bool:
        raise ZeroDivisionError

    pool, _ = tight_pool(on_out_of_memory=fail)
    with pytest.raises(ZeroDivisionError):
        pool.allocate(17 * PAGE)
    pool.free(pool.allocate(PAGE))
    check_invariants(pool)


def hold_memory(pool: MemoryPool) -> list[int]:
    addresses = []
    for _ in range(24):
        addresses.append(pool.allocate(PAGE // 2))
    return addresses


def test_the_error_explains_the_cause() -> None:
    pool, _ = tight_pool(call_site_depth=1)
    addresses = hold_memory(pool)
    for address in addresses[::2]:
        pool.free(address)
    buffer = pool.allocate_buffer(5 * PAGE // 2)
    with pytest.raises(OutOfMemoryError) as caught:
        pool.allocate(9 * PAGE)
    assert isinstance(caught.value, MemoryError)
    report = caught.value.report
    assert isinstance(report, OutOfMemoryReport)
    facts = {
        "requested": 9 * PAGE,
        "live": 17 * PAGE // 2,
        "limit": 16 * PAGE,
        "pending": 0,
        "largest_hole": PAGE // 2,
        "device_total": 64 * PAGE,
    }
    assert {name: getattr(report, name) for name in facts} == facts
    assert report.free == report.reserved - report.live
    assert report.per_stream[0].live_bytes == 17 * PAGE // 2
    (first, second) = report.top_call_sites
    assert (first[1], first[2], first[0][0].name) == (6 * PAGE, 12, "hold_memory")
    assert (second[1], second[2]) == (5 * PAGE // 2, 1)
    text = str(caught.value)
    assert text == str(report)
    for words in (
        "cannot allocate 576.00 KiB",
        "limit: 1.00 MiB",
        "544.00 KiB live + 0 B pending",
        "largest hole 32.00 KiB, reclaimable by remap",
        "device: 3.",
        "stream 0: 544.00 KiB live",
        "live: 384.00 KiB in 12 from",
        "(hold_memory)",
        "try: a larger max_pool_size: the device has the memory",
    ):
        assert words in text, text
    assert pool.statistics().num_out_of_memory == 1
    buffer.close()


def test_the_advice_matches_the_cause() -> None:
    pool, _ = tight_pool()
    buffers: list[DeviceBuffer] = []
    with pytest.raises(OutOfMemoryError, match="try: a larger max_pool_size: the request alone"):
        pool.allocate(17 * PAGE)
    while True:
        try:
            buffers.append(pool.allocate_buffer(PAGE // 2))
        except OutOfMemoryError:
            break
    for buffer in buffers:
        buffer.pin()
    for buffer in buffers[::2]:
        buffer.unpin()
        buffer.close()
    with pytest.raises(OutOfMemoryError, match="between live blocks that must not move"):
        pool.allocate(2 * PAGE)
    with pytest.raises(OutOfMemoryError, match=r"MemoryPoolConfig\(call_site_depth=4\)"):
        pool.allocate(2 * PAGE)


def test_formatted_sizes() -> None:
    assert [num_bytes(size) for size in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "5.00 MiB",
        "3072.00 GiB",
    ]
