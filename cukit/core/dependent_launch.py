"""Programmatic dependent launch: a kernel starts while the previous one is still running.

CuPy has no call for it, so the driver's cuLaunchKernelEx is called through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

from cukit.core.device import require_cupy
from cukit.errors import LaunchError

_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig. extents: grid and block dimensions, then bytes of dynamic shared memory."""

    _fields_ = (
        ("extents", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class DependentFunction:
    """Wraps a CuPy function, with the same call signature, to launch without waiting for the
    previous kernel to end.

    The kernel starts once every block of the previous kernel has ended or has called
    `release_next_grid()`. It must call `wait_for_previous_grids()` before it accesses the previous
    kernel's output (kernels_cu/common/ptx/grid_dependency.cuh), unless it polls that output
    (kernels_cu/moe/expert_order.cuh), and in any case before it ends. Its pointers to the output of
    previous kernels must not be `__restrict__`. Arguments are arrays, None and results of
    `by_value`.
    """

    __slots__ = ("_config", "_function", "_lock")

    def __init__(self, function: Any) -> None:
        attributes = (_Attribute * 1)()
        attributes[0].id = _PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[0].value[0] = 1
        self._function = function
        self._lock = threading.Lock()  # guards _config, which concurrent calls share
        self._config = _Config(attributes=attributes, num_attributes=1)

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        shared_bytes: int,
    ) -> None:
        pointers = (ctypes.c_uint64 * len(args))()
        places = (ctypes.c_void_p * len(args))()
        start = ctypes.addressof(pointers)
        for index, argument in enumerate(args):
            if hasattr(argument, "storage"):
                places[index] = argument.ptr
                continue
            places[index] = start + index * ctypes.sizeof(ctypes.c_uint64)
            if argument is not None:
                pointers[index] = argument.data.ptr
        launch, current_stream = _driver()
        config = self._config
        with self._lock:
            config.extents[:] = (*grid, 1, 1)[:3] + block + (shared_bytes,)
            config.stream = current_stream().ptr
            status = launch(ctypes.byref(config), self._function.ptr, places, None)
        if status:
            raise LaunchError(f"cuLaunchKernelEx: CUDA error {status}")


@functools.cache
def _driver() -> tuple[Any, Any]:
    """cuLaunchKernelEx, and CuPy's current stream."""
    launch = ctypes.PyDLL("libcuda.so.1").cuLaunchKernelEx
    launch.argtypes = [ctypes.c_void_p] * 4
    return launch, require_cupy("launching kernels").cuda.get_current_stream
