"""Provider over cudaMalloc, for GPUs and systems without virtual memory management."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cukit.errors import UnsupportedDeviceError
from cukit.memory.providers.cuda_device import CudaDevice, is_out_of_memory
from cukit.memory.providers.provider import DeviceOutOfMemory

SEGMENT_BYTES = 2 << 20
"""cudaMalloc rounds sizes up to multiples of this on current GPUs."""


class CudaMalloc(CudaDevice):
    """Provider over cudaMalloc and cudaFree.

    Args:
        device_id: CuPy's device number; None: the current device.

    Raises:
        UnsupportedDeviceError: no GPU, or no device with that number.
        MissingDependencyError: CuPy is not installed.
    """

    name = "cuda-malloc"
    page_bytes = SEGMENT_BYTES
    large_pages = 1
    can_remap = False

    def reserve(self, size: int) -> int:
        with self.current(), self.between_captures():
            try:
                return int(self._runtime.malloc(size))
            except Exception as error:
                if is_out_of_memory(error):
                    raise DeviceOutOfMemory(f"cudaMalloc: the device lacks {size} bytes") from error
                raise

    def release(self, address: int, size: int) -> None:
        with self.current(), self.between_captures():
            self._runtime.free(address)

    def create_pages(self, count: int) -> list[Any]:
        raise _no_pages()

    def create_large_pages(self, count: int) -> list[tuple[Any, ...]]:
        raise _no_pages()

    def destroy_pages(self, pages: Sequence[Any]) -> None:
        raise _no_pages()

    def map_pages(self, address: int, pages: Sequence[Any]) -> None:
        raise _no_pages()

    def unmap_pages(self, address: int, count: int) -> None:
        raise _no_pages()


def _no_pages() -> UnsupportedDeviceError:
    return UnsupportedDeviceError("memory from cudaMalloc cannot be remapped")
