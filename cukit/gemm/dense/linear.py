"""Linear layers: a dense product with bias, activation or gating in its epilogue."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    adopt,
    bfloat16,
    check_array,
    check_same_dtype,
    empty,
    float16,
    is_contiguous,
    runs_kernel,
    write_out,
)
from cukit.core.kernel import launch_plan
from cukit.core.overlap import check_overlap
from cukit.core.scalars import check_choice, check_flag
from cukit.errors import ArrayError, ArrayLayoutError, ArrayShapeError
from cukit.gemm.dense._linear_launch import launch_linear, linear_specs, plan_for
from cukit.gemm.dense._linear_plan import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    Product,
    Sm80Config,
    Sm90Config,
    rounded_rows,
)
from cukit.reference import gemm as reference
from cukit.registry import register

KERNEL_DTYPES = (float16, bfloat16)

Weights = Array | tuple[Array, Array]


def linear(
    x: Array,
    w: Array,
    bias: Array | None = None,
    activation: str | None = None,
    *,
    out: Array | None = None,
    return_preactivation: bool = False,
) -> Any:
    """A linear layer, `y = f(x w^T + bias)`, in one kernel.

    Args:
        x: float16|bfloat16 [..., k], C-contiguous; float32|float64 on the CPU only.
        w: dtype of `x`, [n, k]: C-contiguous, or the transpose of a C-contiguous [k, n].
        bias: dtype of `x`, [n].
        activation: None, `"relu"`, `"gelu"` (with erf, accurate to 2.5e-7), `"gelu_tanh"` or
            `"silu"`.
        out: array to write `y` into; dtype of `x`, [..., n]. It must not overlap the operands.
        return_preactivation: also return `z = x w^T + bias`, which the backward needs.

    Returns:
        `y`, [..., n], dtype of `x`; with `return_preactivation` the pair `(y, z)`.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: an unknown activation.

    On Hopper the kernel uses TMA and wgmma (kernels_cu/gemm/linear_sm90.cu) with tiles that
    `plan_linear` chooses for the shape; other GPUs, and arrays with rows or addresses that are not
    multiples of 16 bytes, use mma.sync. Runs on CuPy's current stream and allocates nothing but the
    results, so it can be captured in a CUDA graph. Accumulates in float32 in a fixed order:
    deterministic.

    >>> import numpy as np, cukit as ck
    >>> ck.linear(np.ones((2, 8), np.float32), -np.ones((3, 8), np.float32), None, "relu").sum()
    np.float32(0.0)
    """
    x, w, bias, out = adopt("linear", x, w, bias, out)
    check_flag("linear", "return_preactivation", return_preactivation)
    launch = None
    if runs_kernel("linear", x, w, bias, out):
        launch = _prepare_linear(x, w, bias, activation, out, return_preactivation)
    else:
        _check_linear(x, w, bias, activation, out)
    check_overlap("linear", out, x=x, w=w, bias=bias)
    if launch is None:
        result = reference.linear(x, w, bias, activation, return_preactivation=return_preactivation)
        return _written(out, result)
    shape = (*x.shape[:-1], w.shape[0])
    y = empty(x, shape) if out is None else out
    z = empty(x, shape) if return_preactivation else None
    launch(x, w, None, bias, y, z)
    return y if z is None else (y, z)


def gated_linear(
    x: Array,
    w: Weights,
    activation: str = "silu",
    *,
    out: Array | None = None,
    return_preactivation: bool = False,
) -> Any:
    """A gated linear layer, `y = f(x gate^T) * (x up^T)`, in one kernel: SwiGLU, GeGLU.

    Args:
        x: float16|bfloat16 [..., k], C-contiguous; float32|float64 on the CPU only.
        w: dtype of `x`: [2n, k], the gate's rows followed by those of the up projection, or the
            pair `(w_gate, w_up)` of arrays [n, k].
        activation: of the gate: `"silu"`, `"gelu"`, `"gelu_tanh"` or `"relu"`.
        out: array to write `y` into; dtype of `x`, [..., n]. It must not overlap the operands.
        return_preactivation: also return `z = [x gate^T | x up^T]`, which the backward needs.

    Returns:
        `y`, [..., n], dtype of `x`; with `return_preactivation` the pair `(y, z)`, z [..., 2n].

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: an unknown activation.

    Both products share the loaded tiles of `x`. Kernels, streams and determinism: see
    :func:`linear`.
    Paper: Shazeer, arXiv:2002.05202.

    >>> import numpy as np, cukit as ck
    >>> ck.gated_linear(np.ones((2, 8), np.float32), np.ones((6, 8), np.float32)).round(1)[0]
    array([64., 64., 64.], dtype=float32)
    """
    gate: Array
    if isinstance(w, tuple) and len(w) != 2:
        raise ArrayError(
            f"gated_linear: w must be an array or a pair of arrays, got a tuple of {len(w)}"
        )
    gate, up = w if isinstance(w, tuple) else (w, None)
    x, gate, up, out = adopt("gated_linear", x, gate, up, out)
    check_flag("gated_linear", "return_preactivation", return_preactivation)
    launch = None
    if runs_kernel("gated_linear", x, gate, up, out):
        launch = _prepare_gated(x, gate, up, activation, out, return_preactivation)
    else:
        _check_gated(x, gate, up, activation, out)
    check_overlap("gated_linear", out, x=x, w_gate=gate, w_up=up)
    if launch is None:
        weights = gate if up is None else (gate, up)
        result = reference.gated_linear(
            x, weights, activation, return_preactivation=return_preactivation
        )
        return _written(out, result)
    if up is None:
        half = gate.shape[0] // 2
        gate, up = gate[:half], gate[half:]
    n = gate.shape[0]
    y = empty(x, (*x.shape[:-1], n)) if out is None else out
    z = empty(x, (*x.shape[:-1], 2 * n)) if return_preactivation else None
    launch(x, gate, up, None, y, z)
    return y if z is None else (y, z)


def _written(out: Array | None, result: Any) -> Any:
    """The reference's result, with its first array written to `out` if `out` is given."""
    if isinstance(result, tuple):
        return write_out(out, result[0]), result[1]
    return write_out(out, result)


def _plan_linear(
    x: Array, w: Array, bias: Array | None, activation: str | None, out: Array | None, keeps: bool
) -> Sm90Config | Sm80Config | None:
    """Checks a call and plans it; None, for the reference, if there is nothing to multiply."""
    _check_linear(x, w, bias, activation, out)
    check_array("linear", "x", x, dtypes=KERNEL_DTYPES)
    n, k = w.shape
    if w.size == 0 or x.size == 0:
        return None
    major = "K" if w.flags.c_contiguous else "MN"
    product = Product(
        x.size // k, n, k, x.dtype.name, major_b=major, activation=activation, keeps=keeps
    )
    return plan_for(product, x, w, bias, out)


def _with_rounded_rows(key: tuple[Any, ...]) -> Hashable:
    """The key of a call's checks and plan: `key` of (device, x, w, bias or second weight,
    activation, out, keeps) with rounded_rows in place of the leading axes of x and out."""
    device, x, w, other, activation, out, keeps = key
    if x is None or w is None or not x[0][:-1] or 0 in x[0] or not is_contiguous(x):
        return key
    *rows, k = x[0]
    if out is not None:
        if out[0][:-1] != x[0][:-1] or not is_contiguous(out):
            return key
        out = out[0][-1], out[2:]
    return device, rounded_rows(math.prod(rows)), k, x[2:], w, other, activation, out, keeps


def _plan_gated(
    x: Array, gate: Array, up: Array | None, activation: str, out: Array | None, keeps: bool
) -> Sm90Config | Sm80Config | None:
    """As :func:`_plan_linear`, for `gated_linear`."""
    _check_gated(x, gate, up, activation, out)
    check_array("gated_linear", "x", x, dtypes=KERNEL_DTYPES)
    n, k = gate.shape
    if up is None:
        n //= 2
        up = gate[n:]
    if up.size == 0 or x.size == 0:
        return None
    product = Product(
        x.size // k, n, k, x.dtype.name, activation=activation, gated=True, keeps=keeps
    )
    return plan_for(product, x, gate, up, out)


def _launch(config: Sm90Config | Sm80Config | None, x: Array, w: Array, *_: Any) -> Any:
    """The launch of a planned call."""
    return None if config is None else launch_linear(config.at_rows(x.size // w.shape[1]))


_prepare_linear = launch_plan(_launch, plan=_plan_linear, shorten=_with_rounded_rows)
_prepare_gated = launch_plan(_launch, plan=_plan_gated, shorten=_with_rounded_rows)


def check_weight(
    op: str,
    name: str,
    x: Array,
    w: Array,
    rows: int | None = None,
    *,
    contiguous: bool | None = True,
) -> None:
    """Checks that `x` is [..., k] and the weight is [rows, k]; contiguous: as for check_array."""
    check_array(op, "x", x, dtypes=FLOAT_DTYPES, min_ndim=1)
    check_array(op, name, w, shape=(rows, x.shape[-1]), contiguous=contiguous)


def _check_linear(
    x: Array, w: Array, bias: Array | None, activation: str | None, out: Array | None
) -> None:
    check_choice("linear", "activation", activation, tuple(ACTIVATIONS))
    check_weight("linear", "w", x, w, contiguous=None)
    if not (w.flags.c_contiguous or w.flags.f_contiguous):
        raise ArrayLayoutError(
            "linear: w must be C-contiguous or the transpose of a C-contiguous array, "
            f"got strides {w.strides} for shape {w.shape}"
        )
    if bias is not None:
        check_array("linear", "bias", bias, shape=(w.shape[0],))
    if out is not None:
        check_array("linear", "out", out, shape=(*x.shape[:-1], w.shape[0]))
    check_same_dtype("linear", x=x, w=w, bias=bias, out=out)


def _check_gated(
    x: Array, gate: Array, up: Array | None, activation: str, out: Array | None
) -> None:
    check_choice("gated_linear", "activation", activation, GATED_ACTIVATIONS)
    check_weight("gated_linear", "w" if up is None else "w_gate", x, gate)
    n = gate.shape[0]
    if up is not None:
        check_weight("gated_linear", "w_up", x, up, n)
    elif n % 2:
        raise ArrayShapeError(
            f"gated_linear: w holds gate and up rows, so axis 0 must be even, got {gate.shape}"
        )
    else:
        n //= 2
    if out is not None:
        check_array("gated_linear", "out", out, shape=(*x.shape[:-1], n))
    check_same_dtype("gated_linear", x=x, w=gate, w_up=up, out=out)


register(
    name="linear",
    family="gemm",
    function=linear,
    reference=reference.linear,
    specs=linear_specs,
)
register(
    name="gated_linear",
    family="gemm",
    function=gated_linear,
    reference=reference.gated_linear,
    specs=lambda device: linear_specs(device, gated=True),
)
