"""Tensor maps for the emulated copy engine."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

_MAGIC = 0x63756B6974746D61
_MOST_AXES = 5


def pack_tensor_map(
    array: np.ndarray[Any, Any], box: Sequence[int], swizzle_bytes: int
) -> np.ndarray[Any, Any]:
    """The 128 bytes that runtime/tensor_map.cpp reads: axes innermost first, as the hardware's."""
    extents = [*reversed(array.shape)] + [1] * (_MOST_AXES - array.ndim)
    strides = [*reversed(array.strides)] + [0] * (_MOST_AXES - array.ndim)
    boxes = [*reversed(tuple(box))] + [1] * (_MOST_AXES - array.ndim)
    kind = {"f": 1, "V": 2}.get(array.dtype.kind, 0)
    packed = struct.pack(
        "<QQ5I5q5H3BBBx",
        _MAGIC,
        array.ctypes.data,
        *extents,
        *strides,
        *boxes,
        array.ndim,
        array.itemsize,
        swizzle_bytes // 16,
        kind,
        int(array.flags.writeable),
    )
    words = np.frombuffer(packed.ljust(128, b"\0"), np.uint64)
    packed_map: np.ndarray[Any, Any] = words.copy().view(np.dtype((np.void, 128)))
    return packed_map
