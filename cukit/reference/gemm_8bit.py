"""Products of quantised matrices: int8 and float8 codes with scales."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cukit.reference._xp import array_namespace
from cukit.reference.narrow import broadcast_factors, decode

Array = Any


def matmul_int8(
    a: Any,
    b: Any,
    *,
    bias: Array | None = None,
    column_sums: Array | None = None,
    out_dtype: Any = None,
    out: Array | None = None,
) -> Array:
    """a b^T of int8 arrays with scales. Sums are exact; without scales the result is int32.

    column_sums: ignored; the sums of `b` are recomputed.
    """
    xp = array_namespace(a.storage)
    # float64 represents sums of up to 2^38 products of two codes exactly.
    sums = xp.matmul(a.storage.astype(xp.float64), b.storage.astype(xp.float64).T)
    if a.scales is None:
        return _result(sums, None, np.int32, out)
    if a.zero_points is not None:
        sums = sums - a.zero_points.astype(xp.float64) * b.storage.astype(xp.float64).sum(axis=1)
    with np.errstate(invalid="ignore"):  # NaN scales
        scaled = sums * a.scales.astype(xp.float64) * b.scales.astype(xp.float64).T
    return _result(scaled, bias, out_dtype, out)


def matmul_fp8(
    a: Any,
    b: Any,
    *,
    bias: Array | None = None,
    out_dtype: Any = None,
    out: Array | None = None,
    fast_accumulation: bool = False,
) -> Array:
    """a b^T of float8 arrays, accumulated in float64; `fast_accumulation` has no effect."""
    xp = array_namespace(a.storage)
    with np.errstate(invalid="ignore"):  # NaN and infinite scales
        product = xp.matmul(quantized_values(a), quantized_values(b).T)
    return _result(product, bias, out_dtype, out)


def quantized_values(array: Any) -> Array:
    """The values of a QuantizedArray in float64."""
    xp = array_namespace(array.storage)
    codes = decode(array.storage, array.dtype.name, array.shape[-1]).astype(xp.float64)
    if array.scales is None:
        return codes
    return codes * broadcast_factors(array.scales, array.shape, array.block_shape)


def _result(values: Array, bias: Array | None, out_dtype: Any, out: Array | None) -> Array:
    """The values plus bias, in the dtype of `out`, else in `out_dtype`, else in bfloat16."""
    if bias is not None:
        values = values + bias.astype(values.dtype)
    with np.errstate(over="ignore"):  # values out of range become infinite
        result = values.astype(result_dtype(out_dtype) if out is None else out.dtype)
    if out is None:
        return result
    out[...] = result
    return out


def result_dtype(given: Any) -> Any:
    """The given dtype; default bfloat16."""
    return ml_dtypes.bfloat16 if given is None or given == "bfloat16" else given
