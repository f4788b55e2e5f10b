"""Operands of 8-bit products and their checks, shared by int8 and FP8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cukit.core.arrays import (
    Array,
    bfloat16,
    check_array,
    float16,
    float32,
)
from cukit.core.narrow_dtype import NarrowDtype
from cukit.core.quantized_array import Axis, GroupSize, QuantizedArray
from cukit.core.scalars import check_dtype
from cukit.errors import ArrayDtypeError, ArrayShapeError, ConfigError

OUT_DTYPES = (bfloat16, float16, float32)


class Parts(NamedTuple):
    """A QuantizedArray split into its arrays and hashable metadata, for launch plans."""

    storage: Array
    scales: Array | None
    zero_points: Array | None
    form: tuple[NarrowDtype, tuple[int, ...], Axis, GroupSize]

    def arrays(self, name: str) -> dict[str, Any]:
        """The arrays of the argument `name`, by name."""
        return {
            name: self.storage,
            f"{name}.scales": self.scales,
            f"{name}.zero_points": self.zero_points,
        }

    def whole(self) -> QuantizedArray:
        """The QuantizedArray that was split."""
        dtype, shape, axis, group_size = self.form
        return QuantizedArray(
            self.storage, dtype, shape, self.scales, self.zero_points, axis, group_size
        )


def parts_of(op: str, name: str, array: Any, dtype: NarrowDtype) -> Parts:
    """Splits a QuantizedArray; raises ArrayDtypeError for anything else."""
    if not isinstance(array, QuantizedArray):
        raise ArrayDtypeError(
            f"{op}: {name} must be a QuantizedArray of {dtype.name}, got {type(array).__name__}"
        )
    form = (array.dtype, array.shape, array.axis, array.group_size)
    return Parts(array.storage, array.scales, array.zero_points, form)


class Checked(NamedTuple):
    """The properties of a call whose arguments have been checked."""

    m: int
    n: int
    k: int
    dtype: np.dtype[Any]
    """Dtype of the result."""
    a_stride: int | None
    """Stride of the scales of `a`: 1 per row, 0 per tensor; None for scales per block."""
    b_stride: int | None
    """Stride of the scales of `b`; values as for `a`."""


def both_operands(values: Sequence[Any]) -> tuple[QuantizedArray, QuantizedArray]:
    """The two operands, from the leading arguments of a launch plan: the parts of a, then of b."""
    size = len(Parts._fields)
    return Parts(*values[:size]).whole(), Parts(*values[size : 2 * size]).whole()


def check_operands(
    op: str, a: QuantizedArray, b: QuantizedArray, dtype: NarrowDtype
) -> tuple[int, int, int]:
    """Checks a [m, k] and b [n, k], which hold codes of `dtype`; returns (m, n, k)."""
    for name, array in (("a", a), ("b", b)):
        if array.dtype != dtype:
            raise ArrayDtypeError(f"{op}: {name} must be {dtype.name}, got {array.dtype.name}")
        if array.ndim != 2:
            raise ArrayShapeError(f"{op}: {name} must have 2 axes, got shape {array.shape}")
        storage = array.storage
        check_array(op, f"{name}.storage", storage, dtypes=(storage.dtype,), contiguous=False)
        if array.scales is not None and array.scales.dtype != float32:
            raise ArrayDtypeError(
                f"{op}: the scales of {name} must be float32, got {array.scales.dtype.name}"
            )
    (m, k), (n, inner) = a.shape, b.shape
    if k != inner:
        raise ArrayShapeError(
            f"{op}: a of shape {a.shape} and b of shape {b.shape} do not match: inner extents {k} "
            f"and {inner}"
        )
    if k == 0:
        raise ArrayShapeError(f"{op}: k must be at least 1, got 0")
    if (a.scales is None) != (b.scales is None):
        raise ConfigError(
            f"{op}: both operands must have scales, or neither; got "
            f"{'none' if a.scales is None else 'scales'} for a and "
            f"{'none' if b.scales is None else 'scales'} for b"
        )
    return m, n, k


def row_stride(op: str, name: str, array: QuantizedArray) -> int | None:
    """The stride of the scales: 1 per row, 0 per tensor or without scales, None for blocks."""
    block = array.block_shape
    if block is None:
        return 0
    rows, k = array.shape
    if block[1] < k:
        return None
    check_array(op, f"the scales of {name}", array.scales, dtypes=(float32,))
    return 1 if block[0] == 1 else 0 if block[0] >= rows else None


def check_result(
    op: str, m: int, n: int, bias: Array | None, out: Array | None, out_dtype: Any
) -> np.dtype[Any]:
    """Checks `out`, `out_dtype` and `bias`; returns the dtype of the result."""
    if out is not None:
        check_array(op, "out", out, dtypes=OUT_DTYPES, shape=(m, n))
    given = out_dtype if out is None else out.dtype
    dtype = bfloat16 if given is None else check_dtype(op, "out_dtype", given, OUT_DTYPES)
    if bias is not None:
        check_array(op, "bias", bias, dtypes=(dtype,), shape=(n,))
    return dtype
