"""Products of int8 matrices with scales (W8A8), accumulated exactly."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukit.core.arrays import Array, adopt, check_addresses, check_array, int32, runs_kernel
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, launch_plan
from cukit.core.narrow_dtype import int8
from cukit.core.overlap import check_overlap
from cukit.core.quantized_array import QuantizedArray
from cukit.core.scalars import check_dtype
from cukit.errors import ConfigError
from cukit.gemm.quantized._matmul_8bit_launch import Prepared8Bit, prepare_8bit
from cukit.gemm.quantized._matmul_8bit_operands import (
    OUT_DTYPES,
    Checked,
    both_operands,
    check_operands,
    check_result,
    parts_of,
    row_stride,
)
from cukit.gemm.quantized._matmul_8bit_plan import Product8Bit, specs
from cukit.reference import gemm_8bit as reference
from cukit.registry import register

_OP = "matmul_int8"
_INT8 = np.dtype(np.int8)


def matmul_int8(
    a: QuantizedArray,
    b: QuantizedArray,
    *,
    bias: Array | None = None,
    column_sums: Array | None = None,
    out_dtype: Any = None,
    out: Array | None = None,
) -> Array:
    """The product `a b^T` of int8 matrices, accumulated exactly in int32.

    `out[i, j] = sum_k (a[i, k] - zero[i]) b[j, k] * a_scale[i] * b_scale[j] + bias[j]`

    Args:
        a: int8 [m, k]; activations. float32 scales, one per row or per tensor, or none; int8 zero
            points in the shape of the scales, or none.
        b: int8 [n, k]; weights. Scales as for `a`; no zero points.
        bias: dtype of the result, [n].
        column_sums: int32 [n], the sum of each row of `b.storage`. Used only if `a` has zero
            points; computed by each call if not given.
        out_dtype: bfloat16 (default), float16 or float32.
        out: array to write into, [m, n], on the GPU 16-byte aligned; must not overlap the operands.

    Returns:
        `out` or a new array [m, n]; without scales the exact int32 sums, for which a bias and other
        dtypes are not supported.

    Raises:
        ArrayError: dtype, shape or layout of an argument.
        ConfigError: scales of one operand only, or for blocks other than rows or tensors; zero
            points of `b`; a bias without scales.

    Any m and n, and k of at least 1. Sums can overflow int32, and wrap around, for k above 131,000
    (65,000 with zero points). Rows of codes that are not 16-byte aligned are copied first. A NaN
    scale makes its row or column NaN; results beyond the dtype's range become infinite. Runs on
    CuPy's current stream; deterministic.

    >>> import numpy as np, cukit as ck
    >>> codes = np.arange(6, dtype=np.int8).reshape(2, 3)
    >>> a = ck.QuantizedArray(codes, ck.int8, (2, 3))
    >>> ck.matmul_int8(a, a)
    array([[ 5, 14],
           [14, 50]], dtype=int32)
    """
    left, right = parts_of(_OP, "a", a, int8), parts_of(_OP, "b", b, int8)
    bias, column_sums, out = adopt(_OP, bias, column_sums, out)
    others = (column_sums, bias, out)
    parts = {**left.arrays("a"), **right.arrays("b")}
    check_overlap(_OP, out, bias=bias, column_sums=column_sums, **parts)
    if not runs_kernel(_OP, *left[:3], *right[:3], *others):
        dtype = _check(a, b, *others, out_dtype).dtype
        return reference.matmul_int8(a, b, bias=bias, out_dtype=dtype, out=out)
    prepared = _prepare(*left, *right, *others, out_dtype)
    if left.zero_points is not None and column_sums is None:
        column_sums = right.storage.sum(axis=1, dtype=int32)
    return prepared(left, right, out, column_sums, bias)


def _check(
    a: QuantizedArray,
    b: QuantizedArray,
    column_sums: Array | None,
    bias: Array | None,
    out: Array | None,
    out_dtype: Any,
) -> Checked:
    m, n, k = check_operands(_OP, a, b, int8)
    if a.scales is None:
        if bias is not None:
            raise ConfigError(f"{_OP}: bias requires operands with scales")
        if out_dtype is not None:
            check_dtype(_OP, "out_dtype without scales", out_dtype, (int32,))
        if out is not None:
            check_array(_OP, "out without scales", out, dtypes=(int32,), shape=(m, n))
        return Checked(m, n, k, int32, 0, 0)
    a_stride, b_stride = (_row_stride(name, array) for name, array in (("a", a), ("b", b)))
    if b.zero_points is not None:
        raise ConfigError(f"{_OP}: b must not have zero points")
    if a.zero_points is not None:
        check_array(_OP, "the zero points of a", a.zero_points, dtypes=(_INT8,))
        if column_sums is not None:
            check_array(_OP, "column_sums", column_sums, dtypes=(int32,), shape=(n,))
    dtype = check_result(_OP, m, n, bias, out, out_dtype)
    return Checked(m, n, k, dtype, a_stride, b_stride)


def _row_stride(name: str, array: QuantizedArray) -> int:
    stride = row_stride(_OP, name, array)
    if stride is None:
        raise ConfigError(
            f"{_OP}: {name} must have one scale per row or per tensor, got blocks of "
            f"{array.block_shape}"
        )
    return stride


@launch_plan
def _prepare(*values: Any) -> Prepared8Bit:
    checked = _check(*both_operands(values), *values[8:])
    check_addresses(_OP, out=values[10])
    return prepare_8bit("Int8", checked)


def _specs(device: Device) -> list[KernelSpec]:
    names = (*(dtype.name for dtype in OUT_DTYPES), "int32")
    return specs([Product8Bit("Int8", name) for name in names], device)


register(
    name=_OP,
    family="gemm",
    function=matmul_int8,
    reference=reference.matmul_int8,
    specs=_specs,
)
