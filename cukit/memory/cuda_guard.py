"""Guarded GPU memory for CuPy: finds out-of-bounds accesses of any kernel at full speed.

    guard = CudaGuard(seed=1)
    with guard.installed():
        ...  # guards every array that CuPy allocates here, including scratch memory of ops
    for damage in guard.memory.check():
        print(damage)

An out-of-bounds access that leaves the array's pages fails with cudaErrorIllegalAddress; a write
inside them is found by `check`; memory that was never written reads as NaN, huge numbers or noise.
compute-sanitizer checks every access but slows a run down by a factor of 20 to 100; guarded memory
finds only accesses past the end or before the start of an array.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from cukit.core.device import require_cupy
from cukit.core.kernel import Kernel, KernelSpec, load_kernel
from cukit.errors import UnsupportedDeviceError
from cukit.memory.bookkeeping.streams import CaptureKey
from cukit.memory.guard import GuardedMemory
from cukit.memory.providers.cuda_captures import CaptureWatch, between_captures
from cukit.memory.providers.cuda_driver import (
    CudaVirtualMemoryDriver,
    call,
    supports_virtual_memory,
)
from cukit.memory.providers.provider import DeviceOutOfMemory

THREADS = 256
CHUNK_BYTES = 1 << 16
_MAX_PAGES = 1 << 13
_CAPTURABLE_FROM = 2
"""Handles below this are the legacy default stream, which cannot be captured or queried."""


def plan_guard_pages(page_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> KernelSpec:
    """The kernel for pages of `page_bytes`: one thread block per `chunk_bytes` of a page."""
    defines = (("THREADS", THREADS), ("PAGE_BYTES", page_bytes), ("CHUNK_BYTES", chunk_bytes))
    return KernelSpec("memory/guard_pages.cu", "guard_pages", defines, THREADS)


class CudaGuardDevice:
    """Fills and checks memory of the current device, with its own stream and table of pages."""

    def __init__(self, page_bytes: int) -> None:
        cupy = require_cupy("guarded memory")
        self._cuda = cuda = cupy.cuda
        self._runtime = cuda.runtime
        self.total_bytes = int(self._runtime.memGetInfo()[1])
        self._stream = cuda.Stream(non_blocking=True)
        self._captures = CaptureWatch()
        self._kernel: Kernel = load_kernel(plan_guard_pages(page_bytes))
        memory = cuda.Memory(_MAX_PAGES * (5 * 8 + 3 * 4))
        start = cuda.MemoryPointer(memory, 0)
        self._pages = cupy.ndarray((_MAX_PAGES, 5), np.int64, start)
        self._damage = cupy.ndarray((_MAX_PAGES, 3), np.int32, start + self._pages.nbytes)

    def capture(self) -> CaptureKey | None:
        handle = int(self._cuda.get_current_stream().ptr)
        if handle < _CAPTURABLE_FROM or not self._runtime.streamIsCapturing(handle):
            return None
        capture = self._captures.capture_of(handle)
        return None if capture is None else CaptureKey(capture, handle)

    def ended_captures(self) -> list[int]:
        return self._captures.ended()

    between_captures = staticmethod(between_captures)

    def synchronize(self) -> None:
        self._runtime.deviceSynchronize()

    def fill(self, address: int, size: int, word: int) -> None:
        # A memset, not a kernel, so that kernel traces do not show it.
        call("cuMemsetD32Async", address, word, size // 4, self._stream.ptr)
        self._stream.synchronize()

    def guard_pages(self, pages: npt.NDArray[np.int64], page_bytes: int) -> npt.NDArray[np.int32]:
        found = [
            self._check_pages(pages[first : first + _MAX_PAGES], page_bytes)
            for first in range(0, len(pages), _MAX_PAGES)
        ]
        return np.concatenate(found)

    def _check_pages(self, pages: npt.NDArray[np.int64], page_bytes: int) -> npt.NDArray[np.int32]:
        rows, damage = self._pages[: len(pages)], self._damage[: len(pages)]
        with self._stream:
            rows.set(pages, self._stream)
            damage.data.memset_async(0, damage.nbytes, self._stream)
            grid = (len(pages), page_bytes // CHUNK_BYTES)
            self._kernel(grid, (None, rows, damage))
            result: npt.NDArray[np.int32] = damage.get(self._stream)
            self._stream.synchronize()
        return result


class CudaGuard:
    """A CuPy allocator over the guarded memory of the current device.

    Arrays on other devices come from CuPy's own pool.

    Raises UnsupportedDeviceError if the GPU has no virtual memory management or cuda-bindings is
    missing.
    """

    def __init__(self, seed: int) -> None:
        cupy = require_cupy("guarded memory")
        self._cuda = cupy.cuda
        self._elsewhere = cupy.get_default_memory_pool().malloc
        self.device_id = int(self._cuda.runtime.getDevice())
        if not supports_virtual_memory(self.device_id):
            raise UnsupportedDeviceError(
                f"GPU {self.device_id} has no virtual memory management (or cuda-bindings is "
                "missing)"
            )
        driver = CudaVirtualMemoryDriver(self.device_id)
        self.memory = GuardedMemory(driver, CudaGuardDevice(driver.granularity()), seed)

    def allocate(self, size: int) -> Any:
        """Called by CuPy: returns a cupy.cuda.MemoryPointer to `size` bytes."""
        cuda = self._cuda
        if self._cuda.runtime.getDevice() != self.device_id:
            return self._elsewhere(size)
        if size == 0:
            return cuda.MemoryPointer(cuda.UnownedMemory(0, 0, None, self.device_id), 0)
        try:
            slot = self.memory.allocate(size)
        except DeviceOutOfMemory as error:
            raise cuda.memory.OutOfMemoryError(size, 0, 0) from error
        owner = _Owner()
        weakref.finalize(owner, self.memory.free, slot).atexit = False
        unowned = cuda.UnownedMemory(slot.allocation.address, size, owner, self.device_id)
        return cuda.MemoryPointer(unowned, 0)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the block, CuPy allocates guarded memory in all threads."""
        before = self._cuda.get_allocator()
        self._cuda.set_allocator(self.allocate)
        try:
            yield
        finally:
            self._cuda.set_allocator(before)


class _Owner:
    """Referenced by CuPy's memory object; its finalizer frees the slot."""

    __slots__ = ("__weakref__",)
