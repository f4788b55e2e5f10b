"""Conversion of the operands of `matmul` to a lower precision, and a sample of its error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cukit.core.arrays import Array, bfloat16, namespace
from cukit.core.narrow_dtype import float8_e4m3
from cukit.quantization import quantize

NARROWING: Mapping[str, Callable[[Array], Any]] = {
    "bfloat16": lambda x: x.astype(bfloat16),
    float8_e4m3.name: lambda x: quantize(x, float8_e4m3),
}
"""The conversion of an operand to each precision: to an array, or for float8 to a QuantizedArray
with a scale for each row."""

_ROWS = 8
_COLUMNS = 256


def _tf32(x: Array) -> Array:
    """Truncates to TF32's 10 mantissa bits, as tensor cores do."""
    bits = x.view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32)


def _rounded(x: Array, precision: str) -> Array:
    """The values that are multiplied in `precision`, in float32 or wider."""
    if precision == "tf32":
        return _tf32(x)
    narrow = NARROWING[precision](x)
    return narrow.decode() if precision == float8_e4m3.name else narrow.astype(np.float32)


def sampled_error(
    a: Array, b: Array, precision: str, *, transpose_a: bool, transpose_b: bool
) -> float:
    """The largest ||row - exact row|| / ||exact row|| of sampled rows of `op(a) @ op(b)`.

    a, b: as for `matmul`. Eight rows and 256 columns, evenly spaced, are multiplied in float64:
    once exactly, once with the operands rounded as in `precision`. Synchronises with the device.
    NaN if a sampled row is not finite.
    """
    left = a.reshape(-1, a.shape[-1])
    right = b.reshape(-1, b.shape[-1])
    rows = _sample_rows(left.T if transpose_a else left, _ROWS)
    columns = _sample_rows(right if transpose_b else right.T, _COLUMNS)
    xp: Any = namespace(a)
    with np.errstate(invalid="ignore", over="ignore"):
        exact = rows.astype(np.float64) @ columns.T.astype(np.float64)
        left, right = (_rounded(each, precision).astype(np.float64) for each in (rows, columns))
        coarse = left @ right.T
        error = xp.sqrt(((coarse - exact) ** 2).sum(axis=1))
        norm = xp.sqrt((exact**2).sum(axis=1))
        ratios = xp.where(error == 0, 0.0, error / norm)
    return float(ratios.max()) if ratios.size else 0.0


def _sample_rows(matrix: Array, most: int) -> Array:
    """At most `most` rows, evenly spaced, C-contiguous."""
    count = min(most, matrix.shape[0])
    chosen = np.linspace(0, max(matrix.shape[0] - 1, 0), count).astype(np.int64)
    return namespace(matrix).ascontiguousarray(matrix[chosen])
