"""Tensor maps for the emulated copy engine."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from cukit.core.tensor_map import TensorView

_MAGIC = 0x63756B6974746D61
_MOST_AXES = 5


def pack_tensor_map(
    view: TensorView, box: Sequence[int], swizzle_bytes: int
) -> np.ndarray[Any, Any]:
    """The 128 bytes that runtime/tensor_map.cpp reads: axes innermost first, as the hardware's."""
    axes = len(view.shape)
    extents = [*reversed(view.shape)] + [1] * (_MOST_AXES - axes)
    strides = [*reversed(view.strides)] + [0] * (_MOST_AXES - axes)
    boxes = [*reversed(tuple(box))] + [1] * (_MOST_AXES - axes)
    kind = {"f": 1, "V": 2}.get(view.dtype.kind, 0)
    packed = struct.pack(
        "<QQQQ5I5q5H3BBBx",
        _MAGIC,
        view.address,
        view.low,
        view.high,
        *extents,
        *strides,
        *boxes,
        axes,
        view.dtype.itemsize,
        swizzle_bytes // 16,
        kind,
        int(view.writeable),
    )
    words = np.frombuffer(packed.ljust(128, b"\0"), np.uint64)
    packed_map: np.ndarray[Any, Any] = words.copy().view(np.dtype((np.void, 128)))
    return packed_map
