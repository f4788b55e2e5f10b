"""A defragmentation packs buffers in groups; pinning or freeing a buffer unpacks its group."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from cukit.errors import OutOfMemoryError, PointerError
from cukit.memory import DeviceBuffer, Event, HostProvider, MemoryPool, MemoryPoolConfig
from cukit.memory.bookkeeping.movables import MAX_PER_GROUP
from tests.memory.invariants import check_invariants
from tests.memory.simulation import KIB, PAGE


def packed(count: int = 40, size: int = 24 * KIB) -> tuple[MemoryPool, list[DeviceBuffer]]:
    """A pool whose buffers are packed, each filled with its number."""
    pool = MemoryPool(provider=HostProvider(256 * PAGE, page_bytes=PAGE))
    buffers = [pool.allocate_buffer(size) for _ in range(2 * count)]
    for buffer in buffers[::2]:
        buffer.close()
    del buffers[::2]
    for number, buffer in enumerate(buffers):
        buffer.array((size,), np.uint8)[:] = number
    pool.defragment()
    assert pool._movables.num_packed == count
    check_invariants(pool)
    return pool, buffers


def check_contents(buffers: list[DeviceBuffer]) -> None:
    for number, buffer in enumerate(buffers):
        if not buffer.closed:
            assert (buffer.array((buffer.size,), np.uint8) == number).all()


def address_of(pool: MemoryPool, buffer: DeviceBuffer) -> int:
    """The address of a packed buffer, read without unpacking it."""
    return pool._movables._address[buffer._holder.row]


def test_adjacent_buffers_become_one_span() -> None:
    pool, buffers = packed()
    assert len(list(pool._arena.spans())) < 10
    assert not pool._live
    check_contents(buffers)
    assert pool._movables.num_packed == 0
    check_invariants(pool)


def test_a_second_defragmentation_of_packed_buffers() -> None:
    pool, buffers = packed()
    for buffer in buffers[::3]:
        buffer.close()
    check_invariants(pool)
    assert pool.defragment().bytes_moved > 0
    check_invariants(pool)
    check_contents(buffers)


def test_random_use_of_packed_buffers() -> None:
    rng = random.Random(3)
    pool, buffers = packed(120, 8 * KIB)
    raw: list[int] = []
    actions: list[Callable[[DeviceBuffer], object]] = [
        lambda buffer: buffer.pin(),
        lambda buffer: buffer.unpin() if "pinned" in repr(buffer) else None,
        lambda buffer: buffer.close(),
        lambda buffer: raw.append(pool.allocate(rng.choice([512, 3 * KIB, 2 * PAGE]))),
        lambda buffer: pool.free(raw.pop()) if raw else None,
        lambda buffer: pool.defragment(),
    ]
    for _ in range(400):
        left = [buffer for buffer in buffers if not buffer.closed]
        if len(left) < 10:
            break
        rng.choice(actions)(rng.choice(left))
        check_invariants(pool)
    check_contents(buffers)


def test_counts_include_packed_buffers() -> None:
    pool, buffers = packed(40)
    assert (pool._num_live(), pool._counters.live_bytes) == (40, 40 * 24 * KIB)
    with pytest.raises(PointerError, match="close with 40 live"):
        pool.close()
    statistics = pool.statistics()
    assert (statistics.num_live, statistics.live_bytes) == (40, 40 * 24 * KIB)
    assert statistics.num_frees == 40
    assert statistics.per_stream[0].live_bytes == 40 * 24 * KIB
    check_invariants(pool)
    for buffer in buffers:
        buffer.close()
    pool.close()


def test_reports_list_packed_buffers() -> None:
    pool, _ = packed(40)
    blocks = [block for part in pool.ranges() for block in part.blocks if block.state == "live"]
    assert [(block.size, block.movable) for block in blocks] == [(24 * KIB, True)] * 40


def test_addresses_of_packed_buffers() -> None:
    pool, buffers = packed()
    address = address_of(pool, buffers[7])
    assert pool.owns(address)
    assert not pool.owns(address + 512)
    with pytest.raises(PointerError, match="belongs to a DeviceBuffer: close that instead"):
        pool.free(address)
    address = address_of(pool, buffers[8])
    with pytest.raises(PointerError, match="not the start of an allocation; 512 bytes inside"):
        pool.free(address + 512)
    pool.used_on(address_of(pool, buffers[9]), 5)
    for wrong in (-1, 1 << 70, "x", None, 1.5):
        assert not pool.owns(wrong)  # type: ignore[arg-type]
        with pytest.raises(PointerError):
            pool.free(wrong)  # type: ignore[arg-type]
    check_invariants(pool)
    check_contents(buffers)


def test_a_closed_buffer_is_removed_from_its_run() -> None:
    pool, buffers = packed()
    address = address_of(pool, buffers[20])
    buffers[20].close()
    assert not pool.owns(address)
    assert pool._movables.num_packed == 40 - MAX_PER_GROUP
    check_invariants(pool)
    check_contents(buffers)


def test_listeners_are_notified_of_packed_buffers_that_move_again() -> None:
    pool, buffers = packed(40)
    events: list[Event] = []
    pool.add_listener(events.append)
    before = {address_of(pool, buffer): buffer for buffer in buffers[1::2]}
    for buffer in buffers[::2]:
        buffer.close()
    del events[:]
    moved = pool.defragment().bytes_moved
    frees = [event.address for event in events if event.action == "free"]
    allocations = [event.address for event in events if event.action == "alloc"]
    assert 0 < len(frees) == len(allocations) <= moved // (24 * KIB)
    assert set(frees) <= set(before)
    after = {address_of(pool, buffer) for buffer in buffers[1::2]}
    assert after == (set(before) - set(frees)) | set(allocations)
    assert allocations == sorted(allocations)


def test_buffers_are_packed_next_to_raw_blocks() -> None:
    pool = MemoryPool(provider=HostProvider(64 * PAGE, page_bytes=PAGE))
    mixed = [
        pool.allocate(8 * KIB) if n % 5 == 0 else pool.allocate_buffer(8 * KIB) for n in range(60)
    ]
    for one in mixed[1::5]:
        one.close()  # type: ignore[union-attr]
    pool.defragment()
    check_invariants(pool)
    assert len(pool._live) == 12
    for one in mixed[::5]:
        pool.free(one)  # type: ignore[arg-type]
    check_invariants(pool)


def test_a_limit_moves_packed_buffers() -> None:
    config = MemoryPoolConfig(max_pool_size=16 * PAGE)
    pool = MemoryPool(config, HostProvider(16 * PAGE, page_bytes=PAGE))
    buffers = [pool.allocate_buffer(PAGE // 4) for _ in range(64)]
    pool.defragment()
    for buffer in buffers[::2]:
        buffer.close()
    address = pool.allocate(8 * PAGE)
    check_invariants(pool)
    with pytest.raises(OutOfMemoryError) as error:
        pool.allocate(PAGE)
    assert error.value.report.live == 16 * PAGE  # type: ignore[attr-defined]
    pool.free(address)
    check_invariants(pool)
