"""The default provider of a pool."""

from __future__ import annotations

from cukit.core.device import gpu_available
from cukit.memory.providers.host import HostProvider
from cukit.memory.providers.provider import Provider


def default_provider(device_id: int | None = None, most_bytes: int | None = None) -> Provider:
    """CUDA virtual memory; cudaMalloc if the device has none; host memory if there is no GPU.

    Also cudaMalloc if cuda-bindings is not installed.

    `device_id`: None is CuPy's current device. `most_bytes`: the limit of the pool, if it has one;
    a small pool gets small pages.
    """
    if not gpu_available():
        return HostProvider()
    from cukit.errors import UnsupportedDeviceError
    from cukit.memory.providers.cuda_malloc import CudaMalloc
    from cukit.memory.providers.cuda_vmm import CudaVirtualMemory

    try:
        return CudaVirtualMemory(device_id, most_bytes=most_bytes)
    except UnsupportedDeviceError:
        return CudaMalloc(device_id)
