"""Layer normalisation with a fused residual addition."""

from __future__ import annotations

import numpy as np

from cukit.core.arrays import (
    KERNEL_DTYPES,
    Array,
    access_width,
    adopt,
    check_array,
    empty,
    runs_kernel,
    write_out,
)
from cukit.core.column_sum import column_sum, column_sum_spec
from cukit.core.device import Device, current_device
from cukit.core.kernel import NULL, KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.overlap import check_overlap
from cukit.core.scalars import check_flag
from cukit.layers._rows import (
    REPRESENTATIVE_COLS,
    NormConfig,
    RowPrefetch,
    RowSplit,
    check_norm,
    input_cache,
    plan_prefetch,
    rows_and_cols,
    split_persistent_row,
    split_row,
)
from cukit.reference import norms as reference
from cukit.registry import register


def layer_norm(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    eps: float = 1e-5,
    residual: Array | None = None,
    *,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """Layer normalisation: `y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias`.

    `s` is `x`, or with `residual` the sum `x + residual` rounded to the dtype of `x`, which is also
    returned.

    Args:
        x: float32|float16|bfloat16 [..., hidden], C-contiguous. float64 on the CPU only.
        weight: dtype of `x`, [hidden].
        bias: dtype of `x`, [hidden].
        eps: added to the variance.
        residual: added to `x` before the normalisation; dtype and shape of `x`.
        out: output array for `y`; dtype and shape of `x`. May be `x` itself.

    Returns:
        `y`, shaped like `x`; with `residual`, the pair `(y, x + residual)`.

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument; on the GPU, more than
            65536 columns (32768 for float32 or if rows are not 4-byte aligned); `out` overlaps an
            input.
        ConfigError: `eps` is negative or not a number.

    Runs on CuPy's current stream; accumulates in float32; deterministic.
    Paper: Ba, Kiros and Hinton, arXiv:1607.06450.

    >>> import numpy as np, cukit as ck
    >>> ck.layer_norm(np.array([[1.0, 3.0]], np.float32), np.ones(2, np.float32)).round(3)
    array([[-1.,  1.]], dtype=float32)
    """
    x, weight, bias, residual, out = adopt("layer_norm", x, weight, bias, residual, out)
    check_overlap("layer_norm", out, itself="x", x=x, weight=weight, bias=bias, residual=residual)
    if not runs_kernel("layer_norm", x, weight, bias, residual, out):
        _check(x, weight, bias, residual, out, eps)
        result = reference.layer_norm(x, weight, bias, eps, residual)
        if residual is None:
            return write_out(out, result)
        return write_out(out, result[0]), result[1]
    launch = _prepare(x, weight, bias, residual, out, eps)
    if out is None:
        out = empty(x, x.shape)
    if residual is None:
        launch(x, NULL, weight, bias, out, NULL)
        return out
    new_residual = empty(x, x.shape)
    launch(x, residual, weight, bias, out, new_residual)
    return out, new_residual


def layer_norm_backward(
    grad_out: Array,
    x: Array,
    weight: Array,
    eps: float = 1e-5,
    *,
    has_bias: bool = True,
    grad_residual: Array | None = None,
) -> tuple[Array, Array, Array | None]:
    """Gradients of :func:`layer_norm`.

    Args:
        grad_out: gradient of `y`; dtype and shape of `x`.
        x: the normalised input `s`: `x` of the forward, or its second result with `residual`.
        weight: [hidden], dtype of `x`.
        eps: as in the forward.
        has_bias: compute `grad_bias`.
        grad_residual: gradient of the forward's second result, dtype and shape of `x`; added to
            `grad_x`, which is then the gradient of both `x` and `residual`.

    Returns:
        `(grad_x, grad_weight, grad_bias)`, dtype of `x`; `grad_bias` is None unless `has_bias`.

    Raises:
        ArrayError, ConfigError: as :func:`layer_norm`.

    Deterministic: weight and bias gradients are summed in a fixed order, without atomics.
    """
    op = "layer_norm_backward"
    grad_out, x, weight, grad_residual = adopt(op, grad_out, x, weight, grad_residual)
    if not runs_kernel(op, grad_out, x, weight, grad_residual):
        _check_backward(grad_out, x, weight, grad_residual, eps, has_bias)
        return reference.layer_norm_backward(
            grad_out, x, weight, eps, has_bias=has_bias, grad_residual=grad_residual
        )
    launch = _prepare_backward(grad_out, x, weight, grad_residual, eps, has_bias)
    cols = x.shape[-1]
    grad_x = empty(x, x.shape)
    partial = empty(x, (launch.grid[0], 2 * cols if has_bias else cols), np.float32)
    launch(grad_out, x, weight, grad_residual, grad_x, partial)
    sums = column_sum(partial, weight.dtype)
    return (grad_x, sums[:cols], sums[cols:]) if has_bias else (grad_x, sums, None)


def plan_layer_norm(
    rows: int,
    cols: int,
    dtype: str,
    itemsize: int,
    vec: int,
    residual: bool,
    bias: bool,
    device: Device,
    *,
    split: RowSplit | None = None,
) -> NormConfig:
    """The launch configuration of the forward: one pass per block.

    Blocks are smaller than those of rms_norm, because two reductions synchronise the block. split:
    for tuning.
    """
    split = split or split_row("layer_norm", cols, itemsize, vec, 4, short_rows_per_thread=2)
    loads = "Kept" if residual else input_cache(2 * rows * cols * itemsize, device)
    return NormConfig("layer_norm", dtype, residual, split, split.passes(rows), loads, bias=bias)


def plan_layer_norm_backward(
    rows: int,
    cols: int,
    dtype: str,
    itemsize: int,
    vec: int,
    residual: bool,
    bias: bool,
    device: Device,
    *,
    split: RowSplit | None = None,
    prefetch: RowPrefetch | None = None,
) -> NormConfig:
    """The launch configuration of the backward.

    A persistent grid fills a quarter to a half of the GPU's thread slots, because the column sums
    take registers. split, prefetch: for tuning.
    """
    sums = 2 if bias else 1
    split = split or split_persistent_row("layer_norm_backward", cols, itemsize, vec, sums)
    prefetch = prefetch or plan_prefetch(split, vec * itemsize, sums, device)
    num_blocks = min(split.passes(rows), device.num_sms * prefetch.blocks_per_sm)
    return NormConfig(
        "layer_norm_backward", dtype, residual, split, num_blocks,
        prefetch=prefetch, full=split.fits(cols), bias=bias,
    )  # fmt: skip


def _check(
    x: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    out: Array | None,
    eps: float,
) -> None:
    check_norm("layer_norm", x, weight, bias, {"residual": residual, "out": out}, eps)


def _check_backward(
    grad_out: Array,
    x: Array,
    weight: Array,
    grad_residual: Array | None,
    eps: float,
    has_bias: bool,
) -> None:
    check_flag("layer_norm_backward", "has_bias", has_bias)
    others = {"grad_out": grad_out, "grad_residual": grad_residual}
    check_norm("layer_norm_backward", x, weight, None, others, eps)


@launch_plan
def _prepare(
    x: Array,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    out: Array | None,
    eps: float,
) -> Launch:
    _check(x, weight, bias, residual, out, eps)
    check_array("layer_norm", "x", x, dtypes=KERNEL_DTYPES)
    rows, cols = rows_and_cols(x)
    vec = access_width(cols, x, weight, bias, residual, out)
    config = plan_layer_norm(
        rows,
        cols,
        x.dtype.name,
        x.itemsize,
        vec,
        residual is not None,
        bias is not None,
        current_device(),
    )
    scalars = (np.int32(rows), np.int32(cols), np.float32(eps))
    return Launch(load_kernel(config.spec()), (config.num_blocks,), scalars)


@launch_plan
def _prepare_backward(
    grad_out: Array,
    x: Array,
    weight: Array,
    grad_residual: Array | None,
    eps: float,
    has_bias: bool,
) -> Launch:
    _check_backward(grad_out, x, weight, grad_residual, eps, has_bias)
    check_array("layer_norm_backward", "x", x, dtypes=KERNEL_DTYPES)
    rows, cols = rows_and_cols(x)
    vec = access_width(cols, grad_out, x, weight, grad_residual)
    config = plan_layer_norm_backward(
        rows,
        cols,
        x.dtype.name,
        x.itemsize,
        vec,
        grad_residual is not None,
        has_bias,
        current_device(),
    )
    scalars = (np.int32(rows), np.int32(cols), np.float32(eps))
    return Launch(load_kernel(config.spec()), (config.num_blocks,), scalars)


def _specs(device: Device) -> list[KernelSpec]:
    return [
        plan_layer_norm(
            8192, cols, dtype.name, dtype.itemsize, 16 // dtype.itemsize, residual, bias, device
        ).spec()
        for dtype in KERNEL_DTYPES
        for cols in REPRESENTATIVE_COLS
        for residual in (False, True)
        for bias in (False, True)
    ]


def _specs_backward(device: Device) -> list[KernelSpec]:
    norms = [
        plan_layer_norm_backward(
            8192, cols, dtype.name, dtype.itemsize, 16 // dtype.itemsize, residual, bias, device
        ).spec()
        for dtype in KERNEL_DTYPES
        for cols in REPRESENTATIVE_COLS
        for residual in (False, True)
        for bias in (False, True)
    ]
    return norms + [column_sum_spec(dtype.name) for dtype in KERNEL_DTYPES]


register(
    name="layer_norm",
    family="layers",
    function=layer_norm,
    reference=reference.layer_norm,
    specs=_specs,
)
register(
    name="layer_norm_backward",
    family="layers",
    function=layer_norm_backward,
    reference=reference.layer_norm_backward,
    specs=_specs_backward,
)
