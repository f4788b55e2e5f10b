"""CUDA virtual memory: physical pages that can be mapped at any address, and remapped."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from cukit.errors import ConfigError, UnsupportedDeviceError
from cukit.memory.providers.cuda_device import CudaDevice
from cukit.memory.providers.cuda_driver import (
    CudaVirtualMemoryDriver,
    DriverError,
    VirtualMemoryDriver,
    supports_virtual_memory,
)
from cukit.memory.providers.provider import DeviceOutOfMemory


class LargePart(NamedTuple):
    """One page of a large page."""

    handle: Any
    number: int


class VirtualPages:
    """Addresses and pages of one device: the memory part of a provider that can remap.

    The driver maps and unmaps whole handles only. A page is one handle; so is a large page.

    Args:
        driver: the driver calls; tests pass a fake.
        page_bytes: a multiple of the driver's granularity.
        large_pages: pages per large page; None: see `choose_large_pages`.
    """

    can_remap = True

    def __init__(
        self, driver: VirtualMemoryDriver, page_bytes: int, large_pages: int | None = None
    ) -> None:
        granularity = driver.granularity()
        if page_bytes <= 0 or page_bytes % granularity:
            raise ConfigError(f"page_bytes: expected a multiple of {granularity}, got {page_bytes}")
        self.page_bytes = page_bytes
        self.large_pages = large_pages or choose_large_pages(page_bytes)
        self._driver = driver
        self._kept: list[Any] = []
        """Pages that the driver failed to release; reused before new ones are created."""
        self._kept_large: list[Any] = []
        """The same for large pages."""

    def reserve(self, size: int) -> int:
        return self._driver.reserve(size, self.page_bytes)

    def release(self, address: int, size: int) -> None:
        self._driver.free_addresses(address, size)

    def create_pages(self, count: int) -> list[Any]:
        return self._create(count, self.page_bytes, self._kept)

    def create_large_pages(self, count: int) -> list[tuple[Any, ...]]:
        size = self.large_pages * self.page_bytes
        handles = self._create(count, size, self._kept_large)
        numbers = range(self.large_pages)
        return [tuple(LargePart(handle, number) for number in numbers) for handle in handles]

    def _create(self, count: int, size: int, kept: list[Any]) -> list[Any]:
        handles = kept[:count]
        try:
            while len(handles) < count:
                handles.append(self._driver.create(size))
        except BaseException:
            kept[:count] = self._release_all(handles)
            raise
        del kept[:count]
        return handles

    def destroy_pages(self, pages: Sequence[Any]) -> None:
        single = [page for page in pages if not isinstance(page, LargePart)]
        large = [page.handle for page in pages if isinstance(page, LargePart) and not page.number]
        refused, refused_large = self._release_all(single), self._release_all(large)
        count = len(refused) + len(refused_large)
        if count and count == len(single) + len(large):
            raise DriverError(f"the driver released none of {len(pages)} pages")
        self._kept += refused
        self._kept_large += refused_large

    def _release_all(self, handles: Sequence[Any]) -> list[Any]:
        """Releases handles; returns those that the driver failed to release."""
        refused = []
        for handle in handles:
            try:
                self._driver.release(handle)
            except Exception:
                refused.append(handle)
        return refused

    def map_pages(self, address: int, pages: Sequence[Any]) -> None:
        mapped = 0
        size, large = self.page_bytes, self.large_pages * self.page_bytes
        try:
            number = 0
            while number < len(pages):
                page = pages[number]
                if type(page) is LargePart:  # the first part; the others follow it
                    self._driver.map(address + mapped, large, page.handle)
                    mapped += large
                    number += self.large_pages
                else:
                    self._driver.map(address + mapped, size, page)
                    mapped += size
                    number += 1
            if mapped:
                self._driver.set_access(address, mapped)
        except BaseException:
            if mapped:
                with suppress(Exception):
                    self._driver.unmap(address, mapped)
            raise

    def unmap_pages(self, address: int, count: int) -> None:
        if count:
            self._driver.unmap(address, count * self.page_bytes)


LARGE_BYTES = 32 << 20
"""Size of a large page: 1 GiB takes 32 of them, about 2 ms of driver calls."""

MIN_PAGES = 4
"""A large page has at least this many pages: with fewer, releasing them and creating the large page
takes as long as mapping them one by one."""


def choose_large_pages(page_bytes: int) -> int:
    """The number of pages per large page; 1: no large pages."""
    pages = LARGE_BYTES // page_bytes
    return pages if pages >= MIN_PAGES else 1


MAX_PAGES = 1 << 14
MANY_PAGES = 64
"""For this many pages or more, the free memory of the device is checked first."""


def choose_page_bytes(granularity: int, memory_bytes: int) -> int:
    """The granularity, doubled until the memory has at most MAX_PAGES pages.

    Small pages waste less memory on partly used pages. But driver calls cost a fixed time per
    handle (on an H200 15 us to create, 30 us to map and set access, 20 us to unmap): remapping
    1 GiB takes 26 ms in pages of 2 MiB, 3 ms in pages of 16 MiB.
    """
    page_bytes = granularity
    while memory_bytes > page_bytes * MAX_PAGES:
        page_bytes *= 2
    return page_bytes


class CudaVirtualMemory(VirtualPages, CudaDevice):
    """Provider over the CUDA driver's virtual memory.

    Args:
        device_id: CuPy's device number; None: the current device.
        page_bytes: a multiple of the granularity (2 MiB); None: see `choose_page_bytes`.
        most_bytes: the most memory that the pool will hold; None: all of the device.

    Raises:
        ConfigError: `page_bytes` is not a positive multiple of the granularity.
        UnsupportedDeviceError: no GPU, no device with that number, a GPU without virtual memory
            management, or cuda-bindings is not installed.
        MissingDependencyError: CuPy is not installed.
    """

    name = "cuda-vmm"

    def __init__(
        self,
        device_id: int | None = None,
        page_bytes: int | None = None,
        *,
        most_bytes: int | None = None,
    ) -> None:
        CudaDevice.__init__(self, device_id)
        if not supports_virtual_memory(self.device_id):
            raise UnsupportedDeviceError(
                f"GPU {self.device_id} has no virtual memory management (or cuda-bindings is "
                "missing); the cudaMalloc provider works there"
            )
        driver = CudaVirtualMemoryDriver(self.device_id)
        if page_bytes is None:
            total = self.memory_info()[1]
            limit = total if most_bytes is None else min(most_bytes, total)
            page_bytes = choose_page_bytes(driver.granularity(), limit)
        VirtualPages.__init__(self, driver, page_bytes)

    def create_pages(self, count: int) -> list[Any]:
        # Without this check, a request that fails would first take all free memory of the device.
        if count >= MANY_PAGES and count * self.page_bytes > self.memory_info()[0]:
            raise DeviceOutOfMemory(
                f"the device does not have {count} free pages of {self.page_bytes} bytes"
            )
        return super().create_pages(count)

    def create_large_pages(self, count: int) -> list[tuple[Any, ...]]:
        size = self.large_pages * self.page_bytes
        if count * size > self.memory_info()[0]:
            raise DeviceOutOfMemory(f"the device does not have {count} free pages of {size} bytes")
        return super().create_large_pages(count)

    def for_device(self, device_id: int) -> CudaVirtualMemory:
        """The same kind of provider for another device."""
        return CudaVirtualMemory(device_id, self.page_bytes)
