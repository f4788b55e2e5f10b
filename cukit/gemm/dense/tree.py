"""Matrix products with pairwise summation along k."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    access_width,
    adopt,
    bfloat16,
    check_array,
    check_same_dtype,
    empty,
    float16,
    float32,
    float64,
    namespace,
    runs_kernel,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.scalars import check_integer
from cukit.errors import ArrayDtypeError, ArrayShapeError
from cukit.gemm.dense._dense import check_call, multiply, result_dtype
from cukit.reference import gemm as reference
from cukit.reference.gemm import half_of
from cukit.registry import register

_OP = "tree_matmul"
_THREADS = 256
_WIDTH = 4  # float32 elements in 16 bytes


def tree_matmul(
    a: Array,
    b: Array,
    *,
    transpose_b: bool = False,
    leaf: int = 512,
    strassen: bool = False,
    out: Array | None = None,
    out_dtype: Any = None,
) -> Array:
    """`a @ op(b)` with pairwise summation: k is halved down to at most `leaf` terms.

    The rounding error of a sum of k terms grows with k if one accumulator adds them in sequence,
    and with leaf + log2(k / leaf) here. Pairwise summation helps long sums whose terms do not
    cancel, such as those of all-positive operands, and it helps most on tensor cores, whose
    accumulators truncate instead of rounding. For a 16-bit result and k up to many thousands, the
    rounding of the result exceeds either error: then `matmul` is as accurate, and faster.

    Args:
        a: float32|float16|bfloat16|float64 [..., k], C-contiguous except for gaps between rows.
        b: dtype of `a`, [k, n]; [n, k] with `transpose_b`.
        transpose_b: multiply by the transpose.
        leaf: the most terms that one accumulator adds, at least 1.
        strassen: apply one level of Strassen's algorithm first: seven half-size products instead of
            eight. All extents must be even; float32 and float64 only, because it multiplies sums of
            the operands' quadrants, which 16 bits would round. Its error is bounded in the norm of
            the matrices, not per element: small elements lose digits if others are large.
        out: written in place; dtype of `a` or float32, [..., n]. Must not overlap an operand.
        out_dtype: of the result if `out` is not given: the dtype of `a` (default) or float32.

    Returns:
        `out` or a new array [..., n].

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: a leaf below 1.

    Partial sums are float32 (float64 for float64) and take log2(k / leaf) arrays of the result's
    shape. Runs on CuPy's current stream; CuPy cannot capture its cuBLAS calls in a graph.
    Deterministic on one stream. Pairwise summation: Higham, "The accuracy of floating point
    summation" (1993); Strassen, "Gaussian elimination is not optimal" (1969).

    >>> import numpy as np, cukit as ck
    >>> ones = np.full((1, 1 << 20), 0.1, np.float32)
    >>> round(float(ck.tree_matmul(ones, ones, transpose_b=True, leaf=64)[0, 0]), 1)
    10485.8
    """
    a, b, out = adopt(_OP, a, b, out)
    check_call(_OP, a, b, out, transpose_b=transpose_b, strassen=strassen)
    check_integer(_OP, "leaf", leaf, least=1)
    on_kernel = runs_kernel(_OP, a, b, out)
    dtype = _check(a, b, transpose_b, strassen, out, out_dtype)
    if not on_kernel:
        return reference.tree_matmul(
            a,
            b,
            transpose_b=transpose_b,
            leaf=leaf,
            strassen=strassen,
            out=out,
            out_dtype=dtype,
        )
    n = b.shape[0] if transpose_b else b.shape[1]
    result = empty(a, (*a.shape[:-1], n), dtype) if out is None else out
    if not result.size:
        return result
    if strassen:
        _strassen(a, b, transpose_b, leaf, result)
    else:
        _tree(a, b, transpose_b, leaf, result)
    return result


def _tree(a: Array, b: Array, transpose_b: bool, leaf: int, out: Array) -> None:
    """out = a @ op(b)."""
    k = a.shape[-1]
    if k <= leaf:
        multiply(a, b, transpose_b=transpose_b, out=out)
        return
    partial_dtype = float64 if a.dtype == float64 else float32
    left = out if out.dtype == partial_dtype else empty(out, out.shape, partial_dtype)
    right = empty(out, out.shape, partial_dtype)
    middle = half_of(k, leaf)
    halves = slice(None, middle), slice(middle, None)
    for half, into in zip(halves, (left, right), strict=True):
        _tree(a[..., half], b[:, half] if transpose_b else b[half], transpose_b, leaf, into)
    _add(left, right, out)


def _add(a: Array, b: Array, out: Array) -> None:
    """out = a + b; `a` may be `out`."""
    if out.dtype == float64:  # the kernel does not support float64
        namespace(out).add(a, b, out=out)
    else:
        _prepare_add(a, b, out)(a, b, out)


@launch_plan
def _prepare_add(a: Array, b: Array, out: Array) -> Launch:
    width = min(access_width(out.size, a, b), access_width(out.size, out), _WIDTH)
    blocks = -(-out.size // (_THREADS * width))
    spec = _add_spec(out.dtype.name, width)
    return Launch(load_kernel(spec), (blocks,), (np.int64(out.size),))


def _add_spec(dtype: str, width: int) -> KernelSpec:
    defines = (("DTYPE", dtype), ("WIDTH", width), ("THREADS", _THREADS))
    return KernelSpec("gemm/tree_add.cu", "tree_add", defines, _THREADS)


def _strassen(a: Array, b: Array, transpose_b: bool, leaf: int, out: Array) -> None:
    """out = a @ op(b), with one level of Strassen's algorithm above the tree."""
    rows = a.reshape(-1, a.shape[-1])
    into = out.reshape(-1, out.shape[-1])
    m, k, n = (extent // 2 for extent in (*rows.shape, into.shape[1]))
    a11, a12, a21, a22 = rows[:m, :k], rows[:m, k:], rows[m:, :k], rows[m:, k:]
    if transpose_b:
        b11, b12, b21, b22 = b[:n, :k], b[n:, :k], b[:n, k:], b[n:, k:]
    else:
        b11, b12, b21, b22 = b[:k, :n], b[:k, n:], b[k:, :n], b[k:, n:]

    def product(left: Array, right: Array) -> Array:
        result = empty(out, (m, n))
        _tree(left, right, transpose_b, leaf, result)
        return result

    p1 = product(a11 + a22, b11 + b22)
    p2 = product(a21 + a22, b11)
    p3 = product(a11, b12 - b22)
    p4 = product(a22, b21 - b11)
    p5 = product(a11 + a12, b22)
    p6 = product(a21 - a11, b11 + b12)
    p7 = product(a12 - a22, b21 + b22)
    into[:m, :n] = p1 + p4 - p5 + p7
    into[:m, n:] = p3 + p5
    into[m:, :n] = p2 + p4
    into[m:, n:] = p1 - p2 + p3 + p6


def _check(
    a: Array,
    b: Array,
    transpose_b: bool,
    strassen: bool,
    out: Array | None,
    out_dtype: Any,
) -> np.dtype[Any]:
    """Checks the arguments; returns the dtype of the result."""
    check_array(_OP, "a", a, dtypes=FLOAT_DTYPES, min_ndim=2, contiguous=False)
    check_array(_OP, "b", b, dtypes=FLOAT_DTYPES, ndim=2, contiguous=False)
    check_same_dtype(_OP, a=a, b=b)
    dtype = result_dtype(_OP, a, out, out_dtype)
    n, k = b.shape if transpose_b else b.shape[::-1]
    if a.shape[-1] != k:
        raise ArrayShapeError(
            f"{_OP}: a of shape {a.shape} and b of shape {b.shape} (transpose_b={transpose_b}) do "
            f"not match: inner extents {a.shape[-1]} and {k}"
        )
    if out is not None:
        check_array(_OP, "out", out, shape=(*a.shape[:-1], n))
    if strassen:
        if a.dtype in (float16, bfloat16):
            raise ArrayDtypeError(f"{_OP}: strassen takes float32 and float64, got {a.dtype.name}")
        m = a.size // max(a.shape[-1], 1)
        if m % 2 or n % 2 or k % 2:
            raise ArrayShapeError(f"{_OP}: strassen needs even extents, got {m} x {k} x {n}")
    return dtype


def _specs(device: Device) -> list[KernelSpec]:
    return [_add_spec(dtype, _WIDTH) for dtype in ("float32", "float16", "bfloat16")]


register(
    name=_OP, family="gemm", function=tree_matmul, reference=reference.tree_matmul, specs=_specs
)
