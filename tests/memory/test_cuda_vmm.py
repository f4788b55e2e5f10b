"""The pages of the CUDA provider, on a fake driver."""

from __future__ import annotations

import pytest

from cukit.errors import ConfigError
from cukit.memory import DeviceOutOfMemory
from cukit.memory.providers.cuda_driver import DriverError
from cukit.memory.providers.cuda_vmm import (
    MAX_PAGES,
    VirtualPages,
    choose_large_pages,
    choose_page_bytes,
)

MIB = 1 << 20
PAGE = 4 * MIB


class Driver:
    """Handles, mappings and access with CUDA's semantics; the call named in `refused` fails."""

    def __init__(self, most: int = 100) -> None:
        self.most = most
        self.refused = ""
        self.allowed = 0
        """The number of calls of `refused` that still succeed."""
        self.handles: set[int] = set()
        self.mapped: dict[int, int] = {}
        self.accessible: set[int] = set()
        self._next = 0

    def _call(self, name: str) -> None:
        if name == self.refused:
            if not self.allowed:
                raise DriverError(name)
            self.allowed -= 1

    def granularity(self) -> int:
        return 2 * MIB

    def reserve(self, size: int, alignment: int) -> int:
        self._call("reserve")
        return alignment * 8

    def free_addresses(self, address: int, size: int) -> None:
        self._call("free_addresses")

    def create(self, size: int) -> int:
        self._call("create")
        if len(self.handles) == self.most:
            raise DeviceOutOfMemory("full")
        self._next += 1
        self.handles.add(self._next)
        return self._next

    def release(self, handle: int) -> None:
        self._call("release")
        assert handle not in self.mapped.values()
        self.handles.remove(handle)

    def map(self, address: int, size: int, handle: int) -> None:
        self._call("map")
        assert address not in self.mapped
        assert handle in self.handles
        self.mapped[address] = handle

    def set_access(self, address: int, size: int) -> None:
        self._call("set_access")
        pages = range(address, address + size, PAGE)
        assert all(page in self.mapped for page in pages)
        self.accessible |= set(pages)

    def unmap(self, address: int, size: int) -> None:
        self._call("unmap")
        for page in range(address, address + size, PAGE):
            del self.mapped[page]
            self.accessible.discard(page)


def test_pages_are_created_mapped_and_returned() -> None:
    driver = Driver()
    pages = VirtualPages(driver, PAGE)
    address = pages.reserve(8 * PAGE)
    made = pages.create_pages(3)
    pages.map_pages(address, made)
    assert driver.accessible == {address, address + PAGE, address + 2 * PAGE}
    pages.unmap_pages(address + PAGE, 2)
    pages.map_pages(address + 4 * PAGE, made[1:])
    assert driver.accessible == {address, address + 4 * PAGE, address + 5 * PAGE}
    pages.unmap_pages(address, 1)
    pages.unmap_pages(address + 4 * PAGE, 2)
    pages.destroy_pages(made)
    assert not driver.handles
    with pytest.raises(ConfigError, match="multiple of 2097152"):
        VirtualPages(driver, 3 * MIB)


@pytest.mark.parametrize("call", ["map", "set_access"])
def test_a_mapping_that_fails_leaves_nothing_mapped(call: str) -> None:
    driver = Driver()
    pages = VirtualPages(driver, PAGE)
    made = pages.create_pages(4)
    driver.refused, driver.allowed = call, 2 if call == "map" else 0
    with pytest.raises(DriverError, match=call):
        pages.map_pages(8 * PAGE, made)
    assert not driver.mapped
    assert not driver.accessible
    driver.refused = ""
    pages.map_pages(8 * PAGE, made)
    assert len(driver.accessible) == 4


def test_creation_is_all_or_nothing() -> None:
    driver = Driver(most=5)
    pages = VirtualPages(driver, PAGE)
    kept = pages.create_pages(3)
    with pytest.raises(DeviceOutOfMemory):
        pages.create_pages(3)
    assert driver.handles == set(kept)
    assert len(pages.create_pages(2)) == 2


def test_pages_that_cannot_be_released_are_reused() -> None:
    driver = Driver()
    pages = VirtualPages(driver, PAGE)
    made = pages.create_pages(4)
    driver.refused, driver.allowed = "release", 0
    with pytest.raises(DriverError, match="none of 4 pages"):
        pages.destroy_pages(made)
    driver.allowed = 1
    pages.destroy_pages(made)
    assert len(driver.handles) == 3, "only the driver holds them"
    driver.refused = "create"
    again = pages.create_pages(2)
    assert set(again) <= set(made)
    with pytest.raises(DriverError, match="create"):
        pages.create_pages(2)
    driver.refused = ""
    rest = pages.create_pages(1)
    assert set(rest + again) == driver.handles, "none was lost"


def test_large_pages_are_32_mib_if_that_is_several_pages() -> None:
    sizes = {2: 16, 4: 8, 8: 4, 16: 1, 32: 1, 64: 1}
    assert {mib: choose_large_pages(mib * MIB) for mib in sizes} == sizes


def test_page_sizes() -> None:
    assert choose_page_bytes(2 * MIB, MAX_PAGES * 2 * MIB) == 2 * MIB
    assert choose_page_bytes(2 * MIB, MAX_PAGES * 2 * MIB + 1) == 4 * MIB
    assert choose_page_bytes(2 * MIB, 141 << 30) == 16 * MIB
