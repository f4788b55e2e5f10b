"""Defragmentations of buffers of one size, which the device plans."""

from __future__ import annotations

import random

import pytest

from cukit.memory import DeviceBuffer, MemoryPool, MemoryPoolConfig
from tests.memory.invariants import check_invariants
from tests.memory.simulation import KIB, PAGE, InjectedError, SimulatedProvider, fill, holds

SIZE = 8 * KIB


class Scene:
    """A pool with buffers of one size, each filled with its number, and raw blocks between them."""

    def __init__(self, seed: int, *, lagging: bool = False, raw: bool = True) -> None:
        self.provider = SimulatedProvider(4096 * PAGE)
        self.provider.lagging = lagging
        self.pool = MemoryPool(MemoryPoolConfig(enable_defrag=False), self.provider)
        self.random = random.Random(seed)
        self.buffers: list[tuple[DeviceBuffer, int]] = []
        self.raw: list[int] = []
        for number in range(200):
            self.add(number)
            if raw and number % 40 == 7:
                self.raw.append(self.pool.allocate(self.random.choice([SIZE, 2 * SIZE, 3 * PAGE])))
        self.close(100)

    def add(self, number: int) -> None:
        buffer = self.pool.allocate_buffer(SIZE)
        with buffer.pinned() as address:
            self.provider.launch(0, lambda: fill(address, SIZE, number))
        self.buffers.append((buffer, number))

    def close(self, count: int) -> None:
        self.random.shuffle(self.buffers)
        for buffer, _ in self.buffers[:count]:
            buffer.close()
        del self.buffers[:count]

    def check(self) -> None:
        check_invariants(self.pool)
        assert not self.provider.events, "every event was returned"
        self.provider.run_all()
        for buffer, number in self.buffers:
            with buffer.pinned() as address:
                assert holds(address, SIZE, number)

    def defragment(self) -> int:
        """Returns the bytes that the device planned to move."""
        del self.provider.calls[:]
        report = self.pool.defragment()
        assert report.largest_free_after >= report.largest_free_before
        # The host plans a compaction that frees fewer than two pages.
        return 0 if "copy" in self.provider.calls else report.bytes_moved


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("raw", [False, True])
def test_buffers_keep_their_bytes(seed: int, *, raw: bool) -> None:
    scene = Scene(seed, lagging=seed % 2 == 1, raw=raw)
    moved = 0
    for turn in range(6):
        pinned = [buffer for buffer, _ in scene.buffers[:turn]]
        for buffer in pinned:
            buffer.pin()
        moved += scene.defragment()
        for buffer in pinned:
            buffer.unpin()
        if scene.random.random() < 0.5:  # check() unpacks the buffers
            scene.check()
        for number in range(45):
            scene.add(1000 * turn + number)
        scene.close(45)
    scene.check()
    assert moved > 20 * SIZE


def test_as_compact_as_a_host_plan() -> None:
    reports = []
    for plans in (True, False):
        scene = Scene(3)
        scene.provider.plans_slots = plans
        report = scene.pool.defragment()
        reports.append((report.bytes_moved, report.largest_free_after, report.fragmentation_before))
    assert reports[0] == reports[1]
    assert reports[0][0] > 0


@pytest.mark.parametrize("interrupting", [False, True])
@pytest.mark.parametrize("lagging", [False, True])
def test_every_call_fails(*, lagging: bool, interrupting: bool) -> None:
    """Nothing is lost and no event leaks; the next defragmentation makes the remaining moves."""
    failed = []
    for number in range(100):
        scene = Scene(5, lagging=lagging)
        scene.provider.interrupting = interrupting
        scene.provider.fail_in = number
        del scene.provider.calls[:]
        expected: type[BaseException] = KeyboardInterrupt if interrupting else InjectedError
        try:
            scene.pool.defragment()
        except expected:
            failed.append(scene.provider.calls[-1])
        else:
            break
        finally:
            scene.provider.fail_in = None
            check_invariants(scene.pool)
        scene.pool.defragment()
        scene.check()
    assert len(failed) > 4


def test_buffers_outside_slots_are_planned_by_the_host() -> None:
    """Buffers in holes that do not start at a multiple of their size: the device plans no move."""
    scene = Scene(1, raw=False)
    blocks = [scene.pool.allocate(size) for _ in range(160) for size in (SIZE, 512)]
    for block in blocks[::2]:
        scene.pool.free(block)
    for number in range(200, 360):
        scene.add(number)
    scene.close(130)
    places = []
    for buffer, _ in scene.buffers:
        with buffer.pinned() as address:
            places.append(address % SIZE)
    assert any(places)
    del scene.provider.calls[:]
    assert scene.pool.defragment().bytes_moved > 0
    assert [call for call in scene.provider.calls if call in ("move_slots", "copy")] == [
        "move_slots",
        "copy",
    ]
    scene.check()
