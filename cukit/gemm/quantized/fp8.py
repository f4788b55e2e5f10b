"""Products of FP8 matrices with scales per tensor, row or block."""

from __future__ import annotations

from typing import Any

from cukit.core.arrays import Array, adopt, check_addresses, check_array, float32, runs_kernel
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, launch_plan
from cukit.core.narrow_dtype import float8_e4m3
from cukit.core.overlap import check_overlap
from cukit.core.quantized_array import QuantizedArray
from cukit.core.scalars import check_flag
from cukit.core.support import Support
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
from cukit.gemm.quantized._matmul_8bit_plan import TILE_K, Product8Bit, specs
from cukit.reference import gemm_8bit as reference
from cukit.registry import register

_OP = "matmul_fp8"


def matmul_fp8(
    a: QuantizedArray,
    b: QuantizedArray,
    *,
    bias: Array | None = None,
    out_dtype: Any = None,
    out: Array | None = None,
    fast_accumulation: bool = False,
) -> Array:
    """The product `a b^T` of FP8 matrices, accumulated in float32.

    `out[i, j] = sum_k a[i, k] a_scale[i, k] b[j, k] b_scale[j, k] + bias[j]`

    Args:
        a: float8_e4m3 [m, k]; activations. float32 scales: one per tensor or row; or one per 128
            elements of a row, [m, ceil(k / 128)]; or none. Scales per 128 elements should be
            column-major with 16-byte aligned columns (`quantize(..., scale_layout="column")`);
            other layouts are copied to this one.
        b: float8_e4m3 [n, k]; weights. Scales as for `a`; if `a` has one per 128 elements, one per
            block of 128 x 128, [ceil(n / 128), ceil(k / 128)].
        bias: dtype of the result, [n].
        out_dtype: bfloat16 (default), float16 or float32.
        out: array to write into, [m, n], on the GPU 16-byte aligned; must not overlap the operands.
        fast_accumulation: accumulate over all of k in Hopper's tensor cores, which keep about 14
            bits of a sum of FP8 products. Otherwise the tensor cores sum 128 products at a time,
            and these sums are added in float32. Not available with scales per block.

    Returns:
        `out` or a new array [m, n].

    Raises:
        ArrayError: dtype, shape or layout of an argument.
        ConfigError: combinations of scales other than those above; fast_accumulation with scales
            per block.

    Any m and n, and k of at least 1. Rows of codes that are not 16-byte aligned are copied first.
    With a scale of 0, finite codes give 0. NaN codes and NaN or infinite scales make only the
    results that they contribute to NaN (or infinite); results beyond the dtype's range become
    infinite. Runs on CuPy's current stream; deterministic.

    Scales per block and the promotion of sums: DeepSeek-AI, "DeepSeek-V3 Technical Report",
    arXiv:2412.19437, section 3.3.

    >>> import numpy as np, cukit as ck
    >>> x = ck.QuantizedArray.encode(np.eye(3, dtype=np.float32), ck.float8_e4m3)
    >>> ck.matmul_fp8(x, x, out_dtype=np.float32)[0]
    array([1., 0., 0.], dtype=float32)
    """
    left, right = parts_of(_OP, "a", a, float8_e4m3), parts_of(_OP, "b", b, float8_e4m3)
    bias, out = adopt(_OP, bias, out)
    check_flag(_OP, "fast_accumulation", fast_accumulation)
    check_overlap(_OP, out, bias=bias, **left.arrays("a"), **right.arrays("b"))
    if not runs_kernel(_OP, *left[:2], *right[:2], bias, out):
        dtype = _check(a, b, bias, out, out_dtype, fast_accumulation).dtype
        return reference.matmul_fp8(a, b, bias=bias, out_dtype=dtype, out=out)
    prepared = _prepare(*left, *right, bias, out, out_dtype, fast_accumulation)
    return prepared(left, right, out, bias=bias)


def _check(
    a: QuantizedArray,
    b: QuantizedArray,
    bias: Array | None,
    out: Array | None,
    out_dtype: Any,
    fast_accumulation: bool,
) -> Checked:
    m, n, k = check_operands(_OP, a, b, float8_e4m3)
    dtype = check_result(_OP, m, n, bias, out, out_dtype)
    strides = row_stride(_OP, "a", a), row_stride(_OP, "b", b)
    if None not in strides:
        return Checked(m, n, k, dtype, *strides)
    blocks = (a.block_shape, b.block_shape)
    if blocks != ((1, TILE_K), (TILE_K, TILE_K)):
        raise ConfigError(
            f"{_OP}: scales must be per tensor or per row, or for blocks of (1, 128) of a and "
            f"(128, 128) of b, got {blocks[0]} and {blocks[1]}"
        )
    if fast_accumulation:
        raise ConfigError(f"{_OP}: fast_accumulation needs scales per tensor or per row")
    check_array(_OP, "the scales of b", b.scales, dtypes=(float32,))
    return Checked(m, n, k, dtype, None, None)


@launch_plan
def _prepare(*values: Any) -> Prepared8Bit:
    bias, out, out_dtype, fast_accumulation = values[8:]
    checked = _check(*both_operands(values), bias, out, out_dtype, fast_accumulation)
    check_addresses(_OP, out=out)
    return prepare_8bit("Float8E4M3", checked, promoted=not fast_accumulation)


def _specs(device: Device) -> list[KernelSpec]:
    products = [
        Product8Bit("Float8E4M3", dtype.name, promoted, blocks)
        for dtype in OUT_DTYPES
        for promoted, blocks in ((False, False), (True, False), (True, True))
    ]
    return specs(products, device)


register(
    name=_OP,
    family="gemm",
    function=matmul_fp8,
    reference=reference.matmul_fp8,
    specs=_specs,
    support=Support("sm_89"),
)
