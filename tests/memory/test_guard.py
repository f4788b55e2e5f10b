"""Guarded memory on a fake device in host memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import cukit
from cukit.commands.compile import DEFAULT_ARCHS
from cukit.core.compiler import compile_kernel
from cukit.core.kernel import load_kernel
from cukit.memory import DeviceOutOfMemory
from cukit.memory.bookkeeping.streams import CaptureKey
from cukit.memory.cuda_guard import plan_guard_pages
from cukit.memory.guard import ALIGNMENT, LARGEST_RECYCLED, GuardedMemory, Slot
from cukit.reference import memory as reference
from tests.memory.guard_device import GAP, MAX_PAGES, PAGE, Device, Driver, bytes_at, poke


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture(params=range(4))
def memory(request: pytest.FixtureRequest, driver: Driver, device: Device) -> GuardedMemory:
    """Guarded memory for each of four seeds, which choose the fill patterns and the slot ends."""
    found = GuardedMemory(driver, device, seed=request.param)
    found.label = "tests/test_it.py::test_one"
    return found


def at_end(memory: GuardedMemory, size: int, wanted: bool) -> Slot:
    """An allocation at the end of its slot if `wanted`, otherwise at its start."""
    while True:
        slot = memory.allocate(size)
        if (slot.allocation.address > slot.address) == wanted:
            return slot


@pytest.mark.parametrize("size", [1, 16, 100, PAGE, PAGE + 1, 40 * PAGE + 5])
def test_an_allocation_borders_on_an_unmapped_address(memory, driver, size):
    slots = [memory.allocate(size) for _ in range(6)]
    sides = set()
    for slot in slots:
        start, end = slot.allocation.address, slot.allocation.address + size
        assert slot.address <= start < end <= slot.address + slot.size
        assert driver.mapped[slot.address] == slot.size
        assert start % ALIGNMENT == 0
        before, behind = start - slot.address, slot.address + slot.size - end
        assert before == 0 or behind < ALIGNMENT
        sides.add(before == 0)
        assert driver.reserved[slot.address - GAP]
    assert sides == {False, True} or size == PAGE
    assert memory.check() == []


@pytest.mark.parametrize(
    ("end", "offset", "size", "words"),
    [
        (False, 1000, 1, "0 bytes past its end to 0 bytes past its end"),
        (False, 1003, 40, "3 bytes past its end to 42 bytes past its end"),
        (
            True,
            -1,
            1,
            "1 bytes before its start to 1 bytes before its start",
        ),
        (
            True,
            -5000,
            4,
            "5000 bytes before its start to 4997 bytes before its start",
        ),
        (True, 1003, 2, "3 bytes past its end to 4 bytes past its end"),
    ],
)
@pytest.mark.parametrize("freed", [False, True])
def test_a_changed_byte_is_reported_with_its_array_and_its_test(
    memory, end, offset, size, words, freed
):
    others = [memory.allocate(1000) for _ in range(3)]
    slot = at_end(memory, 1000, end)
    poke(slot, offset, size)
    if freed:
        memory.free(slot)
    memory.label = "tests/test_it.py::test_two"
    (damage,) = memory.check()
    assert str(damage).startswith(f"{size} byte(s) changed, from {words}: 1,000 bytes at")
    assert "allocated by tests/test_it.py::test_one" in str(damage)
    assert "test_guard.py" in str(damage)
    assert "in at_end" in str(damage), "the call site"
    assert memory.check() == [], "damage is reported once"
    del others


def test_damage_on_several_pages_is_one_report(memory):
    slot = at_end(memory, 3 * PAGE, True)
    assert slot.size == 4 * PAGE
    size = PAGE // 2
    big = at_end(memory, 8 * PAGE + size, True)
    poke(big, -6 * PAGE, 2)
    poke(big, -PAGE, 3)
    (damage,) = memory.check()
    assert (damage.num_bytes, damage.first, damage.last) == (5, -6 * PAGE, -PAGE + 2)


def test_every_byte_of_an_allocation_may_be_written(memory):
    for size in (1, 15, 1000, PAGE - 1, 3 * PAGE):
        slot = memory.allocate(size)
        poke(slot, 0, size)
        assert memory.check() == []
        memory.free(slot)
        assert memory.check() == []


def test_reused_memory_has_other_contents(memory, driver):
    seen = set()
    for _ in range(30):
        slot = memory.allocate(PAGE)
        seen.add(bytes_at(slot.address, PAGE).tobytes())
        poke(slot, 0, PAGE)
        memory.free(slot)
        assert memory.check() == []
    assert len(driver.handles) == 1
    assert len(seen) > 5


def test_memory_is_not_reused_before_a_device_synchronisation(memory, device):
    first = memory.allocate(100)
    memory.free(first)
    assert memory.allocate(100) is not first
    assert device.waits == 0
    memory.check()
    assert memory.allocate(100) is first


def test_large_allocations_are_returned_to_the_driver(memory, driver):
    slot = memory.allocate(LARGEST_RECYCLED * PAGE + 1)
    assert slot.size == (LARGEST_RECYCLED + 1) * PAGE
    memory.free(slot)
    memory.check()
    assert not driver.handles
    assert not driver.mapped
    assert not driver.reserved


def test_idle_memory_is_bounded(memory, driver):
    for _ in range(3):
        slots = [memory.allocate(PAGE) for _ in range(MAX_PAGES // 2)]
        for slot in slots:
            memory.free(slot)
        memory.check()
    assert sum(driver.handles.values()) <= MAX_PAGES * PAGE // 8


def test_a_loop_recycles_without_a_check(memory, driver):
    for _ in range(5 * MAX_PAGES):
        memory.free(memory.allocate(PAGE))
    assert sum(driver.handles.values()) <= MAX_PAGES * PAGE // 4
    assert memory.check() == []


def test_damage_found_during_reuse_is_reported_by_the_check(memory):
    slot = at_end(memory, 100, False)
    damaged = slot.allocation
    poke(slot, 100)
    memory.free(slot)
    for _ in range(2 * MAX_PAGES):
        memory.free(memory.allocate(PAGE))
    assert [damage.allocation for damage in memory.check()] == [damaged]


def test_idle_slots_are_released_when_memory_is_short(memory, driver):
    for _ in range(MAX_PAGES // 8):
        memory.free(memory.allocate(PAGE))
    memory.check()
    kept = len(driver.handles)
    assert kept
    whole = memory.allocate((MAX_PAGES - 1) * PAGE)
    assert len(driver.handles) == 1
    with pytest.raises(DeviceOutOfMemory):
        memory.allocate(2 * PAGE)
    memory.free(whole)
    memory.allocate(2 * PAGE)


def test_trim_keeps_what_is_in_use(memory, driver):
    slots = [memory.allocate(100) for _ in range(4)]
    for slot in slots[1:]:
        memory.free(slot)
    memory.trim()
    assert list(driver.mapped) == [slots[0].address]
    assert len(driver.handles) == 1


@pytest.mark.parametrize("call", ["reserve", "map", "set_access"])
def test_a_failed_call_leaves_nothing_mapped(memory, driver, call):
    driver.refused = call
    with pytest.raises(RuntimeError, match=call):
        memory.allocate(100)
    assert (driver.handles, driver.mapped, driver.reserved) == ({}, {}, {})
    driver.refused = ""
    memory.allocate(100)


def test_memory_of_a_graph_is_reserved_until_it_is_destroyed(memory, device):
    device.capturing = CaptureKey(7, 1)
    first = memory.allocate(100)
    memory.free(first)
    again = memory.allocate(1000)
    assert again is first, "reused in the same capture, in stream order"
    memory.free(again)
    device.capturing = CaptureKey(7, 2)
    assert memory.allocate(100) is not first
    device.capturing = CaptureKey(8, 1)
    assert memory.allocate(100) is not first
    device.capturing = None
    memory.check()
    others = [memory.allocate(100) for _ in range(50)]
    assert first not in others
    poke(first, 0, 100)  # a launch of the graph writes
    assert memory.check() == []
    device.gone = [7]
    memory.check()
    assert first in [memory.allocate(100) for _ in range(50)]


def test_allocations_that_outlive_their_graph_are_freed_normally(memory, device):
    device.capturing = CaptureKey(7, 1)
    slot = memory.allocate(100)
    device.capturing, device.gone = None, [7]
    memory.check()
    memory.free(slot)
    memory.check()
    assert memory.allocate(100) is slot


def test_the_latest_allocations_are_listed_until_the_check(memory):
    slots = [memory.allocate(size) for size in (10, 20)]
    memory.free(slots[0])
    assert [each.size for each in memory.latest] == [10, 20]
    memory.check()
    assert not memory.latest


# The kernel -----------------------------------------------------------------------------------

CHUNK = 1 << 12


@pytest.fixture
def emulated() -> Iterator[None]:
    with cukit.backend("emulator"):
        yield


@pytest.mark.parametrize("arch", DEFAULT_ARCHS)
def test_the_kernel_compiles(tmp_path, monkeypatch, arch) -> None:
    monkeypatch.setenv("CUKIT_CACHE_DIR", str(tmp_path))
    info = compile_kernel(plan_guard_pages(2 << 20), arch).info
    assert info.spill_store_bytes == info.spill_load_bytes == 0


@pytest.mark.emulator
@pytest.mark.parametrize("before", [0xFFFFFFFF, 0x80808080, 12345 << 32])
def test_the_kernel_matches_the_reference(emulated, before):
    """Changes at the boundaries of allocations, vectors, chunks and pages."""
    page_bytes, number = 2 * CHUNK, 6
    kernel = load_kernel(plan_guard_pages(page_bytes, CHUNK))
    memory = np.tile(reference.guard_pattern(before, page_bytes), number)
    pages = np.zeros((number, 5), np.int64)
    pages[:, 0] = np.arange(number) * page_bytes
    pages[:, 3], pages[:, 4] = before, (0, 5 << 32, 0, 0x7FFF7FFF, 0, 0)
    pages[4, 3] = 0
    pages[:, 1] = pages[:, 0] + (0, 5, 4090, 0, 0, page_bytes)
    pages[:, 2] = pages[:, 1] + (0, 1, 4100, page_bytes, 0, 0)
    for address in (0, 8191, 8192 + 4, 8192 + 6, 2 * 8192 + 4089, 2 * 8192 + 8190, 3 * 8192 + 9):
        memory[address] ^= 0xFF
    memory[2 * 8192 + 4090 : 2 * 8192 + 8190] = 1
    memory[5 * 8192 + 777] ^= 1
    expected = memory.copy()
    wanted = reference.guard_pages(expected, pages, page_bytes)
    damage = np.zeros((number, 3), np.int32)
    kernel((number, page_bytes // CHUNK), (memory, pages, damage))
    np.testing.assert_array_equal(damage, wanted)
    np.testing.assert_array_equal(memory, expected)
    assert damage[:, 0].tolist() == [2, 2, 2, 0, 0, 1]
