"""Dense matrix products."""

from __future__ import annotations

import math
from typing import Any

from cukit.reference._xp import array_namespace, upcast, working_dtype

Array = Any


def matmul(
    a: Array,
    b: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: Array | None = None,
    accumulate: bool = False,
    out_dtype: Any = None,
) -> Array:
    """op(a) @ op(b), with all axes of an operand but the last flattened to rows."""
    xp = array_namespace(a)
    left, right = upcast(working_dtype(a, b), _rows(a), _rows(b))
    product = xp.matmul(left.T if transpose_a else left, right.T if transpose_b else right)
    shape = product.shape if transpose_a else (*a.shape[:-1], product.shape[1])
    product = product.reshape(shape)
    if out is None:
        return product.astype(a.dtype if out_dtype is None else out_dtype, copy=False)
    if accumulate:
        product = product + out.astype(product.dtype, copy=False)
    out[...] = product.astype(out.dtype, copy=False)
    return out


def matmul_standard(
    xp: Any,
    a: Array,
    b: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out_dtype: Any = None,
) -> Array:
    """op(a) @ op(b) with nothing but what the array API standard has: `xp` is its namespace."""
    left, right = (xp.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1])) for x in (a, b))
    left = xp.matrix_transpose(left) if transpose_a else left
    product = xp.matmul(left, xp.matrix_transpose(right) if transpose_b else right)
    if not transpose_a:
        product = xp.reshape(product, (*a.shape[:-1], product.shape[1]))
    return product if out_dtype is None else xp.astype(product, out_dtype)


def _rows(array: Array) -> Array:
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])
