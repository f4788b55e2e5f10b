"""Linear layers with a quantised weight."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cukit.reference._xp import array_namespace, working_dtype
from cukit.reference.narrow import decode, dequantize

Array = Any


def quantized_linear(
    x: Array,
    codes: Array,
    scales: Array,
    zero_points: Array | None,
    bias: Array | None = None,
    *,
    name: str,
    shape: tuple[int, int],
    block: tuple[int, int],
    out_dtype: Any = None,
) -> Array:
    """x [..., k] times the transpose of the weight [n, k] that `codes` stand for, plus bias [n].

    codes: storage of the format `name` ("int4", "int8") for a weight of `shape`; a scale and a zero
    point serve `block` elements. Summed in float64 where x is float64, else in float32.
    """
    xp = array_namespace(x)
    weight = dequantize(decode(codes, name, shape[1]), scales, zero_points, block)
    wide = working_dtype(x)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(wide)
    product = xp.matmul(rows, weight.astype(wide).T)
    if bias is not None:
        product = product + bias.astype(wide)
    result_dtype = x.dtype if out_dtype is None else np.dtype(out_dtype)
    return product.reshape(*x.shape[:-1], shape[0]).astype(result_dtype, copy=False)
