"""The products of :mod:`cukit.gemm.cublas` on NumPy arrays, for ops that run in the emulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cukit.core.arrays import float32, float64

if TYPE_CHECKING:
    from cukit.gemm.cublas import Matrix

HostArray = np.ndarray[Any, Any]


def gemm(
    a: HostArray,
    b: HostArray,
    out: HostArray,
    layouts: tuple[Matrix, Matrix, Matrix],
    alpha: float,
    beta: float,
) -> None:
    """out = alpha * op(a) @ op(b) + beta * out, summed in float32 (float64 for float64)."""
    left, right, target = (
        _view(array, layout) for array, layout in zip((a, b, out), layouts, strict=True)
    )
    wide = float64 if a.dtype == float64 else float32
    product = alpha * (left.astype(wide) @ right.astype(wide))
    target[...] = product + beta * target.astype(wide) if beta else product


def _view(array: HostArray, layout: Matrix) -> HostArray:
    """The matrix that starts where `array` does."""
    strides = (layout.leading * array.itemsize, array.itemsize)
    matrix = np.lib.stride_tricks.as_strided(array, (layout.rows, layout.columns), strides)
    return matrix.T if layout.transposed else matrix
