"""CUDA driver calls for virtual memory management, behind an interface that tests can replace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

from cukit.core.device import INSTALL_GPU_EXTRA, require_cupy
from cukit.errors import CukitError, MissingDependencyError
from cukit.memory.providers.provider import DeviceOutOfMemory

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class DriverError(CukitError):
    """A CUDA driver call failed. The message contains the call and the driver's error."""


class VirtualMemoryDriver(Protocol):
    """Driver calls for addresses and physical memory. All sizes in bytes.

    A call that fails has no effect. It raises DeviceOutOfMemory if memory is exhausted, else
    DriverError.
    """

    def granularity(self) -> int:
        """Sizes of physical memory and its mapped addresses are multiples of this."""

    def reserve(self, size: int, alignment: int) -> int: ...

    def free_addresses(self, address: int, size: int) -> None: ...

    def create(self, size: int) -> Any:
        """Creates physical memory; returns its handle."""

    def release(self, handle: Any) -> None: ...

    def map(self, address: int, size: int, handle: Any) -> None:
        """Maps all of `handle`; the addresses are inaccessible until `set_access`."""

    def set_access(self, address: int, size: int) -> None:
        """Makes mapped addresses readable and writable."""

    def unmap(self, address: int, size: int) -> None:
        """Unmaps any number of complete, contiguous mappings."""


def driver_module() -> ModuleType:
    """The driver module of cuda-bindings. Raises MissingDependencyError if it is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MissingDependencyError(
            f"the CUDA memory pool needs cuda-bindings: {INSTALL_GPU_EXTRA}"
        ) from error
    return driver  # type: ignore[no-any-return]


def call(name: str, *arguments: Any) -> Any:
    """The result of `cuda.bindings.driver.<name>`: None, one value, or a tuple."""
    function = _function(name)
    status, *results = function(*arguments)
    code = int(status)
    if code == 0:
        return results[0] if len(results) == 1 else tuple(results) if results else None
    if code == _INVALID_CONTEXT:  # this thread has no current CUDA context yet
        runtime = require_cupy("the CUDA memory pool").cuda.runtime
        runtime.setDevice(runtime.getDevice())
        status, *results = function(*arguments)
    if int(status) == _OUT_OF_MEMORY:
        raise DeviceOutOfMemory(f"{name}: the device is out of memory")
    if int(status) != 0:
        raise DriverError(f"{name}: {_describe(driver_module(), status)}")
    return tuple(results) if len(results) > 1 else results[0] if results else None


@functools.cache
def _function(name: str) -> Callable[..., Any]:
    return getattr(driver_module(), name)  # type: ignore[no-any-return]


def _describe(driver: ModuleType, status: Any) -> str:
    found, text = driver.cuGetErrorString(status)
    name = getattr(status, "name", str(status))
    return f"{name} ({text.decode()})" if int(found) == 0 and text else name


def supports_virtual_memory(device_id: int) -> bool:
    """Whether cuda-bindings is installed and the device supports virtual memory management."""
    try:
        attribute = driver_module().CUdevice_attribute
    except MissingDependencyError:
        return False
    name = attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    return bool(call("cuDeviceGetAttribute", name, device_id))


class CudaVirtualMemoryDriver:
    """The CUDA driver, for the memory of one device. CuPy must have initialised CUDA."""

    def __init__(self, device_id: int) -> None:
        driver = driver_module()
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device_id
        self._properties = properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = location
        attributes = driver.CUdevice_attribute
        rdma = attributes.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        if call("cuDeviceGetAttribute", rdma, device_id):
            properties.allocFlags.gpuDirectRDMACapable = 1  # for GPUDirect RDMA by network adapters
        self._access = [self._read_write(peer) for peer in _devices_that_reach(device_id)]

    @staticmethod
    def _read_write(device_id: int) -> Any:
        driver = driver_module()
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device_id
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def granularity(self) -> int:
        flags = driver_module().CUmemAllocationGranularity_flags
        recommended = flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(call("cuMemGetAllocationGranularity", self._properties, recommended))

    def reserve(self, size: int, alignment: int) -> int:
        return int(call("cuMemAddressReserve", size, alignment, 0, 0))

    def free_addresses(self, address: int, size: int) -> None:
        call("cuMemAddressFree", address, size)

    def create(self, size: int) -> Any:
        return call("cuMemCreate", size, self._properties, 0)

    def release(self, handle: Any) -> None:
        call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: Any) -> None:
        call("cuMemMap", address, size, 0, handle, 0)

    def set_access(self, address: int, size: int) -> None:
        call("cuMemSetAccess", address, size, self._access, len(self._access))

    def unmap(self, address: int, size: int) -> None:
        call("cuMemUnmap", address, size)


def _devices_that_reach(device_id: int) -> list[int]:
    """The device itself and the peers that can access it.

    CuPy enables peer access per context, which does not cover memory mapped with cuMemMap.
    """
    count = int(call("cuDeviceGetCount"))
    return [device_id] + [
        peer
        for peer in range(count)
        if peer != device_id and call("cuDeviceCanAccessPeer", peer, device_id)
    ]
