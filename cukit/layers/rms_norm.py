"""Root-mean-square normalisation with a fused residual addition."""

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


def rms_norm(
    x: Array,
    weight: Array,
    eps: float = 1e-6,
    residual: Array | None = None,
    *,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """Root-mean-square normalisation: `y = s / sqrt(mean(s^2) + eps) * weight`.

    `s` is `x`. With `residual`, `s` is the sum `x + residual`, rounded to the dtype of `x` and also
    returned.

    Args:
        x: float32|float16|bfloat16 [..., hidden], C-contiguous. float64 on the CPU only.
        weight: dtype of `x`, [hidden].
        eps: added to the mean square.
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
    Paper: Zhang and Sennrich, arXiv:1910.07467.

    >>> import numpy as np, cukit as ck
    >>> ck.rms_norm(np.array([[3.0, 4.0]], np.float32), np.ones(2, np.float32)).round(3)
    array([[0.849, 1.131]], dtype=float32)
    """
    x, weight, residual, out = adopt("rms_norm", x, weight, residual, out)
    check_overlap("rms_norm", out, itself="x", x=x, weight=weight, residual=residual)
    if not runs_kernel("rms_norm", x, weight, residual, out):
        _check(x, weight, residual, out, eps)
        result = reference.rms_norm(x, weight, eps, residual)
        if residual is None:
            return write_out(out, result)
        return write_out(out, result[0]), result[1]
    launch = _prepare(x, weight, residual, out, eps)
    if out is None:
        out = empty(x, x.shape)
    if residual is None:
        launch(x, NULL, weight, out, NULL)
        return out
    new_residual = empty(x, x.shape)
    launch(x, residual, weight, out, new_residual)
    return out, new_residual


def rms_norm_backward(
    grad_out: Array,
    x: Array,
    weight: Array,
    eps: float = 1e-6,
    *,
    grad_residual: Array | None = None,
) -> tuple[Array, Array]:
    """Gradients of :func:`rms_norm`.

    Args:
        grad_out: gradient of `y`; dtype and shape of `x`.
        x: the normalised input `s`: `x` of the forward, or its second result with `residual`.
        weight: [hidden], dtype of `x`.
        eps: as in the forward.
        grad_residual: gradient of the forward's second result, dtype and shape of `x`; added to
            `grad_x`, which is then the gradient of both `x` and `residual`.

    Returns:
        `(grad_x, grad_weight)`, dtypes of `x` and `weight`.

    Raises:
        ArrayError, ConfigError: as :func:`rms_norm`.

    Deterministic: weight gradients are summed in a fixed order, without atomics.
    """
    grad_out, x, weight, grad_residual = adopt(
        "rms_norm_backward", grad_out, x, weight, grad_residual
    )
    if not runs_kernel("rms_norm_backward", grad_out, x, weight, grad_residual):
        _check_backward(grad_out, x, weight, grad_residual, eps)
        return reference.rms_norm_backward(grad_out, x, weight, eps, grad_residual=grad_residual)
    launch = _prepare_backward(grad_out, x, weight, grad_residual, eps)
    grad_x = empty(x, x.shape)
    partial = empty(x, (launch.grid[0], x.shape[-1]), np.float32)
    launch(grad_out, x, weight, grad_residual, grad_x, partial)
    return grad_x, column_sum(partial, weight.dtype)


def plan_rms_norm(
    rows: int,
    cols: int,
    dtype: str,
    itemsize: int,
    vec: int,
    residual: bool,
    device: Device,
    *,
    split: RowSplit | None = None,
) -> NormConfig:
    """The launch configuration of the forward: one pass per block.

    split: for tuning.
    """
    split = split or split_row("rms_norm", cols, itemsize, vec)
    loads = "Kept" if residual else input_cache(2 * rows * cols * itemsize, device)
    return NormConfig("rms_norm", dtype, residual, split, split.passes(rows), loads)


def plan_rms_norm_backward(
    rows: int,
    cols: int,
    dtype: str,
    itemsize: int,
    vec: int,
    residual: bool,
    device: Device,
    *,
    split: RowSplit | None = None,
    prefetch: RowPrefetch | None = None,
) -> NormConfig:
    """The launch configuration of the backward.

    A persistent grid fills a quarter to a half of the GPU's thread slots, because the column sums
    take registers. split, prefetch: for tuning.
    """
    sums = 1
    split = split or split_persistent_row("rms_norm_backward", cols, itemsize, vec, sums)
    prefetch = prefetch or plan_prefetch(split, vec * itemsize, sums, device)
    num_blocks = min(split.passes(rows), device.num_sms * prefetch.blocks_per_sm)
    full = split.fits(cols)
    return NormConfig(
        "rms_norm_backward", dtype, residual, split, num_blocks, prefetch=prefetch, full=full
    )


def _check(x: Array, weight: Array, residual: Array | None, out: Array | None, eps: float) -> None:
    check_norm("rms_norm", x, weight, None, {"residual": residual, "out": out}, eps)


def _check_backward(
    grad_out: Array, x: Array, weight: Array, grad_residual: Array | None, eps: float
) -> None:
    others = {"grad_out": grad_out, "grad_residual": grad_residual}
    check_norm("rms_norm_backward", x, weight, None, others, eps)


@launch_plan
def _prepare(
    x: Array, weight: Array, residual: Array | None, out: Array | None, eps: float
) -> Launch:
    _check(x, weight, residual, out, eps)
    check_array("rms_norm", "x", x, dtypes=KERNEL_DTYPES)
    rows, cols = rows_and_cols(x)
    vec = access_width(cols, x, weight, residual, out)
    config = plan_rms_norm(
        rows, cols, x.dtype.name, x.itemsize, vec, residual is not None, current_device()
    )
    scalars = (np.int32(rows), np.int32(cols), np.float32(eps))
    return Launch(load_kernel(config.spec()), (config.num_blocks,), scalars)


@launch_plan
def _prepare_backward(
    grad_out: Array, x: Array, weight: Array, grad_residual: Array | None, eps: float
) -> Launch:
    _check_backward(grad_out, x, weight, grad_residual, eps)
    check_array("rms_norm_backward", "x", x, dtypes=KERNEL_DTYPES)
    rows, cols = rows_and_cols(x)
    vec = access_width(cols, grad_out, x, weight, grad_residual)
    config = plan_rms_norm_backward(
        rows, cols, x.dtype.name, x.itemsize, vec, grad_residual is not None, current_device()
    )
    scalars = (np.int32(rows), np.int32(cols), np.float32(eps))
    return Launch(load_kernel(config.spec()), (config.num_blocks,), scalars)


def _specs(device: Device) -> list[KernelSpec]:
    return [
        plan_rms_norm(
            8192, cols, dtype.name, dtype.itemsize, 16 // dtype.itemsize, residual, device
        ).spec()
        for dtype in KERNEL_DTYPES
        for cols in REPRESENTATIVE_COLS
        for residual in (False, True)
    ]


def _specs_backward(device: Device) -> list[KernelSpec]:
    norms = [
        plan_rms_norm_backward(
            8192, cols, dtype.name, dtype.itemsize, 16 // dtype.itemsize, residual, device
        ).spec()
        for dtype in KERNEL_DTYPES
        for cols in REPRESENTATIVE_COLS
        for residual in (False, True)
    ]
    return norms + [column_sum_spec(dtype.name) for dtype in KERNEL_DTYPES]


register(
    name="rms_norm",
    family="layers",
    function=rms_norm,
    reference=reference.rms_norm,
    specs=_specs,
)
register(
    name="rms_norm_backward",
    family="layers",
    function=rms_norm_backward,
    reference=reference.rms_norm_backward,
    specs=_specs_backward,
)
