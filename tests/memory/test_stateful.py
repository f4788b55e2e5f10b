"""Random operations on a pool. Its invariants are checked after every step, and the contents of an
allocation before it is freed.

Streams may lag behind the host: writes and verifications are enqueued like kernels and then run
later. So memory that is reused by another stream too early, moved while in use, or unmapped before
a kernel has used it, is found as a wrong pattern or an inaccessible page.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cukit.errors import OutOfMemoryError, PointerError
from cukit.memory import DeviceBuffer, MemoryPool, MemoryPoolConfig
from tests.memory.invariants import check_invariants, pages_mapped
from tests.memory.simulation import KIB, PAGE, InjectedError, SimulatedProvider, fill, holds

SIZES = st.one_of(
    st.sampled_from([1, 512, 513, 4 * KIB, PAGE, 2 * PAGE]),
    st.integers(0, 4 * KIB),
    st.integers(1, 12 * PAGE),
)
STREAMS = st.integers(0, 2)
PICK = st.integers(0, 1 << 16)


class PoolMachine(RuleBasedStateMachine):
    """Random calls of a pool's methods, with a separate record of the live and captured memory."""

    can_remap = True

    @initialize(
        limit=st.sampled_from([None, 24 * PAGE, 40 * PAGE + 512]),
        growth=st.sampled_from([1.0, 1.5]),
        defrag=st.booleans(),
        lagging=st.booleans(),
        early=st.booleans(),
        adjacent=st.booleans(),
        large=st.sampled_from([1, 2, 3]),
        progress=st.one_of(st.none(), st.integers(0, 1 << 16)),
    )
    def start(
        self,
        limit: int | None,
        growth: float,
        defrag: bool,
        lagging: bool,
        early: bool,
        adjacent: bool,
        large: int,
        progress: int | None,
    ) -> None:
        self.provider = SimulatedProvider(48 * PAGE, large_pages=large, can_remap=self.can_remap)
        self.provider.lagging = lagging
        if adjacent:
            self.provider.adjacent_bytes = 96 * PAGE
        if progress is not None:
            self.provider.progress = random.Random(progress)
        if early:
            self.provider.early_recorders.add(1)
        config = MemoryPoolConfig(
            max_pool_size=limit,
            block_size=PAGE,
            growth_factor=growth,
            enable_defrag=defrag,
            defrag_threshold=0.2,
        )
        self.pool = MemoryPool(config, self.provider)
        self.raw: dict[int, tuple[int, int, int]] = {}
        self.buffers: list[tuple[DeviceBuffer, int, int]] = []
        self.pins: list[DeviceBuffer] = []
        self.captured: dict[int, list[tuple[int, int]]] = {}
        self.written = 0

    # Helpers ----------------------------------------------------------------------------------

    def write(self, stream: int, address: int, size: int) -> int:
        self.written += 1
        pattern = self.written * 0x9E3779B1

        def kernel() -> None:
            assert self.provider.accessible(address, max(size, 1))
            fill(address, size, pattern)

        self.provider.launch(stream, kernel)
        return pattern

    def verify(self, stream: int, address: int, size: int, pattern: int) -> None:
        def kernel() -> None:
            assert self.provider.accessible(address, max(size, 1))
            assert holds(address, size, pattern), "overwritten"

        self.provider.launch(stream, kernel)

    def check_disjoint(self, address: int, size: int, capture: int | None = None) -> None:
        """Checks that new memory overlaps neither live raw memory nor memory of another capture."""
        taken = [(other, length) for other, (length, _, _) in self.raw.items()]
        for identity, kept in self.captured.items():
            if identity != capture:
                taken += kept
        for other, length in taken:
            assert address + size <= other or other + length <= address

    # Rules ------------------------------------------------------------------------------------

    @rule(size=SIZES, stream=STREAMS)
    def allocate(self, size: int, stream: int) -> None:
        try:
            address = self.pool.allocate(size, stream)
        except OutOfMemoryError:
            return
        assert address % 512 == 0
        self.check_disjoint(address, size)
        self.raw[address] = (size, stream, self.write(stream, address, size))

    @precondition(lambda self: self.raw)
    @rule(pick=PICK)
    def free(self, pick: int) -> None:
        address = list(self.raw)[pick % len(self.raw)]
        size, stream, pattern = self.raw[address]
        self.verify(stream, address, size, pattern)
        self.pool.free(address)
        del self.raw[address]

    @precondition(lambda self: self.raw)
    @rule(pick=PICK, other=STREAMS)
    def free_elsewhere(self, pick: int, other: int) -> None:
        """The other stream waits for the first, as callers must ensure, then frees."""
        address = list(self.raw)[pick % len(self.raw)]
        size, stream, pattern = self.raw[address]
        event = self.provider.record(stream)
        self.provider.wait(other, event)
        self.verify(other, address, size, pattern)
        self.pool.free(address, other)
        del self.raw[address]

    @precondition(lambda self: self.raw)
    @rule(pick=PICK, other=STREAMS)
    def use_elsewhere(self, pick: int, other: int) -> None:
        """Another stream reads, as `used_on` declares; the memory is freed on its own stream."""
        address = list(self.raw)[pick % len(self.raw)]
        size, stream, pattern = self.raw[address]
        event = self.provider.record(stream)
        self.provider.wait(other, event)
        self.verify(other, address, size, pattern)
        self.pool.used_on(address, other)
        self.pool.free(address)
        del self.raw[address]

    @precondition(lambda self: self.raw)
    @rule(pick=PICK, offset=st.sampled_from([512, 1, -512]))
    def free_invalid_address(self, pick: int, offset: int) -> None:
        address = list(self.raw)[pick % len(self.raw)] + offset
        if address in self.pool._live:
            return
        with pytest.raises(PointerError):
            self.pool.free(address)

    @rule(size=SIZES, stream=STREAMS)
    def allocate_buffer(self, size: int, stream: int) -> None:
        try:
            buffer = self.pool.allocate_buffer(size, stream)
        except OutOfMemoryError:
            return
        with buffer.pinned() as address:
            pattern = self.write(stream, address, size)
        self.buffers.append((buffer, stream, pattern))

    @precondition(lambda self: self.buffers)
    @rule(pick=PICK, close=st.booleans())
    def check_buffer(self, pick: int, close: bool) -> None:
        position = pick % len(self.buffers)
        buffer, stream, pattern = self.buffers[position]
        with buffer.pinned() as address:
            self.verify(stream, address, buffer.size, pattern)
        if close and buffer not in self.pins:
            del self.buffers[position]
            buffer.close()

    @precondition(lambda self: self.buffers)
    @rule(pick=PICK)
    def pin(self, pick: int) -> None:
        buffer = self.buffers[pick % len(self.buffers)][0]
        buffer.pin()
        self.pins.append(buffer)

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.pins.pop().unpin()

    @rule()
    def defragment(self) -> None:
        report = self.pool.defragment()
        assert report.largest_free_after >= report.largest_free_before

    @rule()
    def trim(self) -> None:
        self.pool.trim()

    @rule(stream=STREAMS, count=st.integers(1, 8))
    def let_run(self, stream: int, count: int) -> None:
        for _ in range(count):
            self.provider.run_one(stream)

    @rule(stream=STREAMS, sizes=st.lists(SIZES, max_size=6))
    def capture(self, stream: int, sizes: list[int]) -> None:
        """Allocates in a capture and frees half in it. The memory belongs to the graph until the
        capture is released."""
        identity = len(self.captured) + 1
        kept = self.captured[identity] = []
        self.provider.captures[stream] = identity
        try:
            for number, size in enumerate(sizes):
                address = self.pool.allocate(size, stream)
                self.check_disjoint(address, size, identity)
                kept.append((address, size))
                if number % 2:
                    self.pool.free(address)
        except OutOfMemoryError:
            pass
        finally:
            del self.provider.captures[stream]
        for address in {address for address, _ in kept}:
            if address in self.pool._live:
                self.pool.free(address)

    @precondition(lambda self: self.captured)
    @rule()
    def release_graphs(self) -> None:
        for identity in list(self.captured):
            self.pool.release_capture(identity)
            self.captured[identity] = []

    @rule(calls=st.integers(0, 12), size=SIZES, stream=STREAMS)
    def fail(self, calls: int, size: int, stream: int) -> None:
        """One of the next driver calls fails; the pool remains usable."""
        self.provider.fail_in = calls
        address = None
        try:
            address = self.pool.allocate(size, stream)
            self.pool.defragment()
            self.pool.trim()
        except (InjectedError, OutOfMemoryError):
            pass
        finally:
            self.provider.fail_in = None
        if address is not None:
            self.check_disjoint(address, size)
            self.raw[address] = (size, stream, self.write(stream, address, size))

    # Invariants -------------------------------------------------------------------------------

    @invariant()
    def check_pool_invariants(self) -> None:
        if hasattr(self, "pool"):
            check_invariants(self.pool)
            if self.provider.can_remap:
                assert self.provider.page_at == pages_mapped(self.pool)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for buffer in self.pins:
            buffer.unpin()
        while self.raw:
            self.free(0)
        while self.buffers:
            self.pins = []
            self.check_buffer(0, True)
        self.provider.run_all()
        self.pool.close()
        check_invariants(self.pool)
        assert self.pool.statistics().reserved_bytes == 0
        assert self.provider.used_bytes == 0
        assert not self.provider.segments
        recorded = {event for state in self.pool._states.values() for _, event in state.marks}
        assert self.provider.events >= recorded


class SegmentMachine(PoolMachine):
    """The same operations on a device whose pages cannot be remapped."""

    can_remap = False


@pytest.mark.parametrize("machine", [PoolMachine, SegmentMachine])
def test_random_use(machine: type[PoolMachine]) -> None:
    """2000 steps per machine, about two seconds; CUKIT_POOL_RUNS=100000 runs for hours."""
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=int(os.environ.get("CUKIT_POOL_RUNS", "40")),
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
