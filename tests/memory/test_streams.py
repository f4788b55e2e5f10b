"""Epochs, marks and graph captures."""

from __future__ import annotations

import pytest

from cukit.memory import MemoryPool, MemoryPoolConfig
from cukit.memory.bookkeeping.streams import MAX_MARKS, MAX_STREAMS, Streams
from tests.memory.invariants import check_invariants
from tests.memory.simulation import PAGE, SimulatedProvider, fill, holds


@pytest.fixture
def provider() -> SimulatedProvider:
    made = SimulatedProvider()
    made.lagging = True
    return made


@pytest.fixture
def pool(provider: SimulatedProvider) -> MemoryPool:
    return MemoryPool(MemoryPoolConfig(block_size=PAGE), provider)


def test_an_epoch_is_complete_when_its_event_is(provider: SimulatedProvider) -> None:
    streams = Streams(provider)
    state = streams.get(1)
    first = state.epoch
    streams.mark(state)
    streams.mark(state)
    streams.poll(state)
    assert state.done < first
    provider.run_one(1)
    streams.poll(state)
    assert state.done == first
    provider.run_all()
    streams.poll(state)
    assert state.done == first + 1
    assert not provider.events


def test_old_marks_are_dropped_and_none_is_mistaken_for_an_earlier_one(
    provider: SimulatedProvider,
) -> None:
    streams = Streams(provider)
    state = streams.get(1)
    for _ in range(10 * MAX_MARKS):
        streams.mark(state)
    assert len(state.marks) <= MAX_MARKS
    assert len(provider.events) == len(state.marks)
    while any(provider.queues.values()):
        provider.run_one(1)
        streams.poll(state)
        reached = 10 * MAX_MARKS - len(provider.queues[1])
        assert state.done <= reached, "considered complete before its event"
    assert state.done == 10 * MAX_MARKS


def test_a_stream_waits_for_unmarked_work(provider: SimulatedProvider) -> None:
    streams = Streams(provider)
    state = streams.get(1)
    streams.mark(state)
    streams.order_behind(2, state, state.epoch)
    assert provider.calls == ["record", "record", "wait"]
    provider.run_all()
    streams.poll(state)
    streams.order_behind(2, state, state.done)
    assert provider.calls.count("wait") == 1


def test_streams_without_memory_are_forgotten(
    pool: MemoryPool, provider: SimulatedProvider
) -> None:
    provider.lagging = False
    kept = pool.allocate(512, -1)
    for stream in range(1000):
        pool.free(pool.allocate(700 + 512 * (stream % 50), stream))
    assert len(pool._states) < 200
    check_invariants(pool)
    pool.free(kept)
    check_invariants(pool)


def test_a_stream_that_waits_for_memory_is_not_forgotten(provider: SimulatedProvider) -> None:
    """The on_out_of_memory callback uses more streams than the pool keeps states of."""
    blocks: list[int] = []

    def make_room(_: object) -> bool:
        if not blocks:
            return False
        pool.free(blocks.pop())
        for stream in range(10, 10 + 2 * MAX_STREAMS):
            pool.free(pool.allocate(512, stream), stream)
            provider.run_all()
        return True

    config = MemoryPoolConfig(max_pool_size=4 * PAGE, block_size=PAGE, on_out_of_memory=make_room)
    pool = MemoryPool(config, provider)
    blocks.append(pool.allocate(3 * PAGE, 1))
    block = pool.allocate(3 * PAGE, 2)
    pool.free(block)
    check_invariants(pool)


def test_one_stream_needs_no_events(pool: MemoryPool, provider: SimulatedProvider) -> None:
    for _ in range(10):
        pool.free(pool.allocate(3 * PAGE))
    assert "record" not in provider.calls


def test_a_stream_that_cannot_be_queried_later_is_marked_at_every_free(
    pool: MemoryPool, provider: SimulatedProvider
) -> None:
    provider.early_recorders.add(7)
    for _ in range(3):
        pool.free(pool.allocate(512, 7))
    assert provider.calls.count("record") == 3


def test_large_blocks_are_marked_when_several_streams_share(
    pool: MemoryPool, provider: SimulatedProvider
) -> None:
    """A stream that reuses the block waits for the free, but not for work queued afterwards."""
    first = pool.allocate(4 * PAGE, 1)
    pool.allocate(512, 2)
    pool.free(first)
    provider.launch(1, lambda: None)  # long work after the free
    provider.run_one(1)
    assert pool.allocate(4 * PAGE, 2) == first
    assert "wait" not in provider.calls


def test_memory_used_on_another_stream_stays_pending(
    pool: MemoryPool, provider: SimulatedProvider
) -> None:
    address = pool.allocate(PAGE, 1)
    pool.used_on(address, 2)
    provider.launch(2, lambda: None)
    pool.free(address)
    statistics = pool.statistics()
    assert (statistics.pending_bytes, statistics.live_bytes) == (PAGE, 0)
    assert pool.allocate(PAGE, 1) != address
    provider.run_all()
    assert pool.statistics().pending_bytes == 0
    assert pool.allocate(PAGE, 1) == address
    check_invariants(pool)


def test_a_graph_keeps_its_memory(pool: MemoryPool, provider: SimulatedProvider) -> None:
    """Memory of a capture is not reused elsewhere until the graph is destroyed."""
    provider.lagging = False
    provider.captures[1] = 41
    first = pool.allocate(2 * PAGE, 1)
    pool.free(first)
    assert pool.allocate(2 * PAGE, 1) == first, "reused inside the capture"
    kept = pool.allocate(PAGE, 1)
    del provider.captures[1]
    pool.free(first)
    fill(first, 2 * PAGE, 99)  # a launch of the graph
    addresses = [pool.allocate(PAGE, stream) for stream in (1, 2, 1, 2)]
    for address in addresses:
        assert not first <= address < first + 2 * PAGE
        fill(address, PAGE, address)
    pool.defragment()
    pool.trim()
    assert holds(first, 2 * PAGE, 99)

    # Another capture does not reuse it, even on the same stream.
    provider.captures[1] = 42
    assert pool.allocate(2 * PAGE, 1) != first
    del provider.captures[1]

    pool.release_capture(41)
    check_invariants(pool)
    assert pool.owns(kept)
    assert pool.allocate(2 * PAGE, 1) == first
    pool.free(kept)
    check_invariants(pool)


def test_buffers_used_by_a_graph_do_not_move(pool: MemoryPool, provider: SimulatedProvider) -> None:
    provider.lagging = False
    buffers = [pool.allocate_buffer(PAGE // 4) for _ in range(8)]
    provider.captures[0] = 1
    seen = buffers[6].pin()
    inside = pool.allocate_buffer(PAGE // 4)
    del provider.captures[0]
    buffers[6].unpin()
    for buffer in buffers[:6]:
        buffer.close()
    pool.defragment()
    assert buffers[6].pin() == seen
    inside.close()
    check_invariants(pool)


def test_no_wait_during_a_capture(pool: MemoryPool, provider: SimulatedProvider) -> None:
    """The provider fails the test if the pool records on the captured stream, makes it wait or
    synchronises the device."""
    blocks = [pool.allocate(2 * PAGE, stream) for stream in (1, 2, 3)]
    for block in blocks:
        pool.free(block)
    provider.captures[1] = 5
    pool.allocate(40 * PAGE, 1)
    pool.allocate(50 * PAGE, 2)
    small = pool.allocate(512, 3)
    pool.free(small)
    pool.statistics()
    pool.trim()
    check_invariants(pool)
