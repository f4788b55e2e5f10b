"""Checked products: cuBLAS on the GPU, NumPy on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    adopt,
    check_array,
    check_same_dtype,
    empty,
    float32,
    float64,
    is_gpu_array,
    runs_kernel,
)
from cukit.core.kernel import launch_plan
from cukit.core.overlap import check_overlap
from cukit.core.scalars import check_dtype, check_flag
from cukit.errors import ArrayLayoutError, ArrayShapeError, ConfigError
from cukit.gemm.dense.cublas import Matrix, gemm
from cukit.reference import gemm as reference


def multiply(
    a: Array,
    b: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: Array | None = None,
    accumulate: bool = False,
    out_dtype: Any = None,
    tf32: bool = False,
) -> Array:
    """Computes :func:`cukit.matmul` with cuBLAS on the GPU and with the reference elsewhere.

    tf32: on the GPU, multiply float32 operands in TF32.
    """
    a, b, out = adopt("matmul", a, b, out)
    flags = {"transpose_a": transpose_a, "transpose_b": transpose_b, "accumulate": accumulate}
    check_call("matmul", a, b, out, **flags)
    on_gpu = runs_kernel("matmul", a, b, out) and is_gpu_array(a)
    plan = _recall_plan if on_gpu else plan_product
    product = plan("matmul", a, b, out, transpose_a, transpose_b, accumulate, out_dtype)
    if not on_gpu:
        return reference.matmul(
            a,
            b,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            out=out,
            accumulate=accumulate,
            out_dtype=product.dtype,
        )
    return run_product(product, a, b, out, accumulate=accumulate, tf32=tf32)


def check_call(op: str, a: Array, b: Array, out: Array | None, **flags: bool) -> None:
    """Makes the checks that a cached plan does not cover.

    Flags must be bools (1 == True would find the same plan), and `out` must not overlap an operand.
    """
    for name, flag in flags.items():
        check_flag(op, name, flag)
    check_overlap(op, out, a=a, b=b)


def run_product(
    product: CheckedProduct, a: Array, b: Array, out: Array | None, *, accumulate: bool, tf32: bool
) -> Array:
    """Computes a checked product with cuBLAS, or with NumPy in the emulator."""
    result = empty(a, product.shape, product.dtype) if out is None else out
    if product.empty_sum:
        if not accumulate:
            result.fill(0)
    elif result.size:
        gemm(a, b, result, product.layouts, beta=float(accumulate), tf32=tf32)
    return result


class CheckedProduct(NamedTuple):
    """A checked call: shape and dtype of the result, and the layouts of a, b and the result."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layouts: tuple[Matrix, Matrix, Matrix]
    empty_sum: bool
    """Whether k is 0."""


def plan_product(
    op: str,
    a: Array,
    b: Array,
    out: Array | None,
    transpose_a: bool,
    transpose_b: bool,
    accumulate: bool,
    out_dtype: Any,
) -> CheckedProduct:
    """Checks a call of `op` and derives the layouts of its operands and of the result."""
    left, right = _layout(op, "a", a, transpose_a), _layout(op, "b", b, transpose_b)
    m, k = (left.columns, left.rows) if transpose_a else (left.rows, left.columns)
    n, inner = (right.rows, right.columns) if transpose_b else (right.columns, right.rows)
    if k != inner:
        raise ArrayShapeError(
            f"{op}: a of shape {a.shape} (transpose_a={transpose_a}) and b of shape {b.shape} "
            f"(transpose_b={transpose_b}) do not match: inner extents {k} and {inner}"
        )
    check_same_dtype(op, a=a, b=b)
    shape = (m, n) if transpose_a else (*a.shape[:-1], n)
    if accumulate and out is None:
        raise ConfigError(f"{op}: accumulate=True needs out")
    dtype = result_dtype(op, a, out, out_dtype)
    target = Matrix(m, n, max(n, 1))
    if out is not None:
        check_array(op, "out", out, shape=shape, contiguous=False)
        target = _layout(op, "out", out)
    return CheckedProduct(shape, dtype, (left, right, target), k == 0)


_recall_plan = launch_plan(plan_product)


def result_dtype(op: str, a: Array, out: Array | None, out_dtype: Any) -> np.dtype[Any]:
    """The dtype of the result: that of `out`, else `out_dtype`, else that of `a`.

    Raises ArrayError unless it is the dtype of `a` or, for a 16-bit `a`, float32.
    """
    if out is None and out_dtype is None:
        return a.dtype  # type: ignore[no-any-return]
    allowed = (a.dtype,) if a.dtype in (float32, float64) else (a.dtype, float32)
    if out is None:
        return check_dtype(op, "out_dtype", out_dtype, allowed)
    return check_dtype(op, "out", out.dtype, allowed)


def _layout(op: str, name: str, array: Array, transposed: bool = False) -> Matrix:
    """The array as a matrix: leading axes are flattened to rows, the last axis holds the columns.

    Raises ArrayLayoutError unless the leading axes collapse into one stride.
    """
    check_array(op, name, array, dtypes=FLOAT_DTYPES, min_ndim=1, contiguous=False)
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
                f"{op}: the leading axes of {name} must collapse into one, got strides "
                f"{array.strides} for shape {array.shape}"
            )
        rows *= extent
    leading = stride // array.itemsize if rows > 1 else columns
    if array.size and (leading < columns or (rows > 1 and stride % array.itemsize)):
        raise ArrayLayoutError(
            f"{op}: the rows of {name} must not overlap or run backwards, got strides "
            f"{array.strides} for shape {array.shape}"
        )
    return Matrix(rows, columns, max(leading, 1), transposed)
