"""Linear layers with quantised weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cukit.reference._xp import array_namespace, working_dtype
from cukit.reference.narrow import decode, dequantize

Array = Any
Quantized = Any
"""An object with the attributes of a QuantizedArray."""


def quantized_linear(
    x: Array | Quantized,
    weight: Quantized,
    bias: Array | None = None,
    *,
    out_dtype: Any = None,
) -> Array:
    """x [..., k] times the transpose of the dequantised weight [n, k], plus bias [n].

    Accumulated in float64 if x is float64, else in float32; rounded to `out_dtype`, by default the
    dtype of x, or float32 if x is quantised.
    """
    rows = _values(x) if hasattr(x, "storage") else x
    xp = array_namespace(rows)
    wide = working_dtype(rows)
    flat = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1]).astype(wide)
    product = xp.matmul(flat, _values(weight).astype(wide).T)
    if bias is not None:
        product = product + bias.astype(wide)
    dtype = rows.dtype if out_dtype is None else np.dtype(out_dtype)
    return product.reshape(*rows.shape[:-1], weight.shape[0]).astype(dtype, copy=False)


def _values(array: Quantized) -> Array:
    """The values of a quantised array in float32."""
    codes = decode(array.storage, array.dtype.name, array.shape[-1])
    if array.scales is None:
        return codes
    return dequantize(codes, array.scales, array.zero_points, array.block_shape)
