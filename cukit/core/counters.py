"""Arrival counters, with which a thread block detects that it is the last of its launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukit.core import backend
from cukit.core.arrays import Array, is_gpu_array
from cukit.core.device import require_cupy

_MIN_COUNTERS = 4096
"""Minimum number of counters in an allocation, enough for most launches of a stream to share it."""

_zeros: dict[tuple[Any, int], Array] = {}


def is_captured(array: Array) -> bool:
    """Whether launches on the current stream are captured into a graph instead of being run."""
    if not is_gpu_array(array):
        return False
    cuda = require_cupy("launching kernels").cuda
    return bool(cuda.runtime.streamIsCapturing(cuda.get_current_stream().ptr))


def current_stream(array: Array) -> int:
    """CuPy's current stream, as an address; 0 for arrays on the CPU."""
    if not is_gpu_array(array):
        return 0
    return int(require_cupy("launching kernels").cuda.get_current_stream().ptr)


def zero_counters(like: Array, count: int) -> Array:
    """An int32 array of at least `count` zeros, which kernels reset before they end.

    Launches on one stream share it. During graph capture a new array is allocated, and the memset
    that clears it is captured too, because replays may run on any stream.
    """
    if backend.active is not None:
        return np.zeros(count, np.int32)
    cupy = require_cupy("launching kernels")
    if is_captured(like):
        return cupy.zeros(count, cupy.int32)
    stream = cupy.cuda.get_current_stream().ptr
    key = (like.data.device_id, stream)
    found = _zeros.get(key)
    if found is None or found.size < count:
        found = _zeros[key] = cupy.zeros(max(count, _MIN_COUNTERS), cupy.int32)
    return found
