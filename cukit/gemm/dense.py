"""Dense matrix products: cuBLAS on the GPU, NumPy on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    adopt,
    check_array,
    check_same_dtype,
    empty,
    float32,
    runs_kernel,
)
from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError, ConfigError
from cukit.gemm.cublas import Matrix, gemm
from cukit.reference import gemm as reference_gemm
from cukit.registry import register


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
    """The matrix product op(a) @ op(b), summed in float32 whatever the dtype.

    All axes of an operand but its last are flattened to rows, so that activations
    `[batch, seq_len, features]` go in as they are, and `transpose_a` sums over every token.

    a: float32|float16|bfloat16|float64 [..., k], or [..., m] with `transpose_a` (rows are k).
    b: dtype of `a`, [k, n], or [n, k] with `transpose_b`.
    out: written in place and returned; the dtype of `a`, or float32.
    accumulate: add to what `out` holds.
    out_dtype: of the result where `out` is not given: the dtype of `a` (default) or float32.

    Any operand may be a slice with gaps between its rows, as long as its last axis is contiguous
    and its leading axes collapse into one stride. `out` must not overlap an operand.

    Returns [..., n]; [m, n] with `transpose_a`. float32 operands are multiplied without TF32, and
    partial sums never in 16 bits. Asynchronous on CuPy's current stream; CuPy refuses cuBLAS calls
    while a stream is being captured. Deterministic for one shape on one stream.
    Raises ArrayShapeError, ArrayDtypeError, ArrayLayoutError, ConfigError.

    >>> import numpy as np
    >>> matmul(np.ones((2, 3, 4), np.float32), np.ones((5, 4), np.float32), transpose_b=True).shape
    (2, 3, 5)
    """
    a, b, out = adopt("matmul", a, b, out)
    left = _as_matrix("a", a, transpose_a)
    right = _as_matrix("b", b, transpose_b)
    m, k = (left.columns, left.rows) if transpose_a else (left.rows, left.columns)
    n, inner = (right.rows, right.columns) if transpose_b else (right.columns, right.rows)
    if k != inner:
        raise ArrayShapeError(
            f"matmul: a of shape {a.shape} (transpose_a={transpose_a}) and b of shape {b.shape} "
            f"(transpose_b={transpose_b}) do not match: inner extents {k} and {inner}"
        )
    check_same_dtype("matmul", a=a, b=b)
    shape = (m, n) if transpose_a else (*a.shape[:-1], n)
    if accumulate and out is None:
        raise ConfigError("matmul: accumulate=True needs out")
    dtype = out.dtype if out is not None else np.dtype(a.dtype if out_dtype is None else out_dtype)
    if dtype not in (a.dtype, float32) or (dtype == float32 and a.dtype.itemsize > 4):
        name = "out_dtype" if out is None else "out"
        raise ArrayDtypeError(f"matmul: {name} must be {a.dtype.name} or float32, got {dtype.name}")
    if out is not None:
        check_array("matmul", "out", out, shape=shape, contiguous=False)
    if not runs_kernel("matmul", a, b, out):
        return reference_gemm.matmul(
            a, b, transpose_a=transpose_a, transpose_b=transpose_b, out=out,
            accumulate=accumulate, out_dtype=dtype,
        )  # fmt: skip
    result = empty(a, shape, dtype) if out is None else out
    target = _as_matrix("out", result)
    if m and n and k:
        gemm(left, right, target, beta=float(accumulate))
    elif not accumulate:
        result.fill(0)
    return result


def _as_matrix(name: str, array: Array, transposed: bool = False) -> Matrix:
    """The array as rows of its last axis, or ArrayLayoutError where no single stride does it."""
    check_array("matmul", name, array, dtypes=FLOAT_DTYPES, contiguous=False)
    if array.ndim == 0:
        raise ArrayShapeError(f"matmul: {name} must have at least one axis")
    *leading_extents, columns = array.shape
    rows = 1
    stride = 0
    for extent, step in zip(reversed(leading_extents), reversed(array.strides[:-1]), strict=True):
        if extent == 1:
            continue
        if rows == 1:
            stride = step
        elif step != stride * rows:
            raise ArrayLayoutError(
                f"matmul: the leading axes of {name} must collapse into one, got strides "
                f"{array.strides} for shape {array.shape}"
            )
        rows *= extent
    leading = stride // array.itemsize if rows > 1 else columns
    if array.size and (leading < columns or (rows > 1 and stride % array.itemsize)):
        raise ArrayLayoutError(
            f"matmul: the rows of {name} must not overlap or run backwards, got strides "
            f"{array.strides} for shape {array.shape}"
        )
    return Matrix(array, rows, columns, max(leading, 1), transposed)


register(name="matmul", family="gemm", function=matmul, reference=reference_gemm.matmul)
