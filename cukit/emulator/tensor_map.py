"""Tensor maps for the emulated TMA."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from cukit.core.arrays import address_of
from cukit.core.backend import TensorView

_MAGIC = 0x63756B6974746D61
_MAX_AXES = 5


def pack_tensor_map(
    view: TensorView, box: Sequence[int], swizzle_bytes: int
) -> np.ndarray[Any, Any]:
    """The 128 bytes that runtime/tensor_map.cpp reads; the innermost axis is first, as for TMA."""
    array, axes = view.array, len(view.shape)
    low = address_of(array)
    steps = zip(array.shape, array.strides, strict=True)
    high = low + sum((extent - 1) * stride for extent, stride in steps) + array.itemsize
    extents = [*reversed(view.shape)] + [1] * (_MAX_AXES - axes)
    strides = [*reversed(view.strides)] + [0] * (_MAX_AXES - axes)
    boxes = [*reversed(tuple(box))] + [1] * (_MAX_AXES - axes)
    kind = {"f": 1, "V": 2}.get(array.dtype.kind, 0)
    packed = struct.pack(
        "<QQQQ5I5q5H3BBBx",
        _MAGIC,
        view.address,
        low,
        high,
        *extents,
        *strides,
        *boxes,
        axes,
        array.itemsize,
        swizzle_bytes // 16,
        kind,
        int(array.flags.writeable),
    )
    words = np.frombuffer(packed.ljust(128, b"\0"), np.uint64)
    packed_map: np.ndarray[Any, Any] = words.copy().view(np.dtype((np.void, 128)))
    return packed_map
