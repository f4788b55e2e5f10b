"""Every driver call fails once; the pool stays consistent, leaks nothing and remains usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from cukit.errors import OutOfMemoryError
from cukit.memory import DeviceBuffer, MemoryPool, MemoryPoolConfig
from cukit.memory.bookkeeping.compaction import MIN_GAP
from tests.memory.invariants import check_invariants
from tests.memory.simulation import KIB, PAGE, InjectedError, SimulatedProvider, fill, holds

T = TypeVar("T")


class DriverCallSequence:
    """Makes every kind of driver call; repeats failed steps."""

    def __init__(self, *, can_remap: bool, lagging: bool) -> None:
        self.provider = SimulatedProvider(64 * PAGE, can_remap=can_remap)
        self.provider.adjacent_bytes = 256 * PAGE  # so that every run is the same
        self.provider.lagging = lagging
        config = MemoryPoolConfig(max_pool_size=40 * PAGE, block_size=PAGE, growth_factor=1.25)
        self.pool = MemoryPool(config, self.provider)
        self.failures = 0

    def step(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except InjectedError:
            self.failures += 1
        finally:
            check_invariants(self.pool)
        result = action()  # only one call fails
        check_invariants(self.pool)
        return result

    def allocate(self, size: int, stream: int = 0) -> int:
        address = self.step(lambda: self.pool.allocate(size, stream))
        self.provider.launch(stream, lambda: fill(address, size, address))
        return address

    def free(self, address: int, size: int, stream: int | None = None) -> None:
        def check() -> None:
            assert holds(address, size, address)

        self.provider.launch(stream or 0, check)
        self.step(lambda: self.pool.free(address, stream))

    def buffer(self, size: int, value: int) -> DeviceBuffer:
        buffer = self.step(lambda: self.pool.allocate_buffer(size, 0))
        with buffer.pinned() as address:
            self.provider.launch(0, lambda: fill(address, size, value))
        return buffer

    def run(self) -> None:
        sizes = [PAGE, 3 * KIB, 5 * PAGE + 512, 2 * PAGE]
        blocks = [(self.allocate(size), size) for size in sizes]
        self.free(*blocks[0])
        self.free(*blocks[2], stream=0)

        # Stream 1 reuses memory freed on stream 0, and waits for the work queued there.
        other = self.allocate(5 * PAGE, stream=1)
        self.step(lambda: self.pool.used_on(other, 2))
        self.step(lambda: self.pool.used_on(other, 3))
        self.step(lambda: self.pool.free(other))
        self.step(self.pool.statistics)

        # Holes, remapped and compacted.
        buffers = [self.buffer(20 * KIB, value) for value in range(12)]
        for buffer in buffers[::2]:
            self.step(buffer.close)
        self.step(self.pool.defragment)
        large = self.allocate(24 * PAGE)
        with pytest.raises(OutOfMemoryError):
            self.step(lambda: self.pool.allocate(38 * PAGE, 0))
        for value, buffer in list(enumerate(buffers))[1::2]:
            with buffer.pinned() as address:
                self.provider.run_all()
                assert holds(address, 20 * KIB, value)
            self.step(buffer.close)
        self.free(large, 24 * PAGE)
        self.step(self.pool.trim)
        self.free(*blocks[1])
        self.free(*blocks[3])
        self.step(self.pool.close)
        assert self.provider.used_bytes == 0
        assert not self.provider.segments
        assert not self.provider.events


@pytest.mark.parametrize("lagging", [False, True])
@pytest.mark.parametrize("can_remap", [True, False])
def test_every_call_fails_once(*, can_remap: bool, lagging: bool) -> None:
    clean = DriverCallSequence(can_remap=can_remap, lagging=lagging)
    clean.run()
    calls = list(clean.provider.calls)
    kinds = {"reserve", "release", "record", "is_done", "synchronize_device", "copy"}
    if can_remap:
        kinds |= {"create_pages", "destroy_pages", "map_pages", "unmap_pages"}
    if lagging:
        kinds |= {"wait"}
    assert kinds <= set(calls), "the sequence misses a kind of call"
    for number in range(len(calls)):
        sequence = DriverCallSequence(can_remap=can_remap, lagging=lagging)
        sequence.provider.fail_in = number
        sequence.run()
        call = f"call {number} ({calls[number]})"
        assert sequence.failures == 1, f"{call} failed without an exception"


def slid_pool() -> tuple[MemoryPool, SimulatedProvider, list[DeviceBuffer]]:
    """Buffers of 3/4 of a page after holes of 1/4 of a page: the buffers can only slide."""
    page = 4 * MIN_GAP
    provider = SimulatedProvider(8 * page, page_bytes=page)
    pool = MemoryPool(MemoryPoolConfig(block_size=page), provider)
    gaps, buffers = [], []
    for value in range(8):
        gaps.append(pool.allocate_buffer(MIN_GAP))
        buffers.append(pool.allocate_buffer(3 * MIN_GAP))
        for part in range(3):
            with buffers[-1].pinned() as address:
                fill(address + part * MIN_GAP, MIN_GAP, 10 * value + part)
    for gap in gaps:
        gap.close()
    return pool, provider, buffers


def intact(buffers: list[DeviceBuffer]) -> bool:
    return all(
        holds(buffer.pin() + part * MIN_GAP, MIN_GAP, 10 * value + part)
        for value, buffer in enumerate(buffers)
        for part in range(3)
    )


def test_a_failed_slide_is_undone() -> None:
    pool, provider, buffers = slid_pool()
    provider.calls.clear()
    assert pool.defragment().bytes_moved > 0
    calls = list(provider.calls)
    assert calls.count("copy") > 2
    assert intact(buffers)
    for number in range(len(calls)):
        pool, provider, buffers = slid_pool()
        provider.fail_in = number
        with pytest.raises(InjectedError):
            pool.defragment()
        check_invariants(pool)
        assert intact(buffers), f"call {number}, {calls[number]}"
