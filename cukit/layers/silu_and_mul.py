"""The SwiGLU activation: SiLU of the gate times the up projection."""

from __future__ import annotations

from functools import partial

from cukit.core.arrays import Array, adopt, empty, runs_kernel, write_out
from cukit.core.kernel import Launch, launch_plan
from cukit.core.overlap import check_overlap
from cukit.layers._gated import (
    check_gated,
    gated_specs,
    half_shape,
    prepare_gated,
    prepare_gated_backward,
)
from cukit.reference import activations as reference
from cukit.registry import register


def silu_and_mul(x: Array, *, out: Array | None = None) -> Array:
    """SwiGLU: `y = silu(gate) * up` with `gate, up = x[..., :H], x[..., H:]`.

    `silu(t) = t / (1 + exp(-t))`.

    Args:
        x: float32|float16|bfloat16 [..., 2H], C-contiguous. float64 on the CPU only.
        out: output array for `y`; dtype of `x`, [..., H].

    Returns:
        `y`, [..., H], dtype of `x`.

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument; `out` overlaps `x`.

    Runs on CuPy's current stream; computes in float32; deterministic.
    Paper: Shazeer, arXiv:2002.05202.

    >>> import numpy as np, cukit as ck
    >>> ck.silu_and_mul(np.array([[0.0, 1.0, 5.0, 2.0]], np.float32)).round(3)
    array([[0.   , 1.462]], dtype=float32)
    """
    x, out = adopt("silu_and_mul", x, out)
    check_overlap("silu_and_mul", out, x=x)
    if not runs_kernel("silu_and_mul", x, out):
        check_gated("silu_and_mul", x, out=out)
        return write_out(out, reference.silu_and_mul(x))
    launch = _prepare(x, out)
    if out is None:
        out = empty(x, half_shape(x))
    launch(x, out)
    return out


def silu_and_mul_backward(grad_out: Array, x: Array) -> Array:
    """Gradient of :func:`silu_and_mul` with respect to `x`, in one pass.

    Args:
        grad_out: gradient of `y`, [..., H], dtype of `x`.
        x: input of the forward, [..., 2H].

    Returns:
        `grad_x`, shape and dtype of `x`.

    Raises:
        ArrayError: as :func:`silu_and_mul`.
    """
    grad_out, x = adopt("silu_and_mul_backward", grad_out, x)
    if not runs_kernel("silu_and_mul_backward", grad_out, x):
        check_gated("silu_and_mul_backward", x, grad_out=grad_out)
        return reference.silu_and_mul_backward(grad_out, x)
    launch = _prepare_backward(grad_out, x)
    grad_x = empty(x, x.shape)
    launch(grad_out, x, grad_x)
    return grad_x


@launch_plan
def _prepare(x: Array, out: Array | None) -> Launch:
    return prepare_gated("silu_and_mul", x, out, ())


@launch_plan
def _prepare_backward(grad_out: Array, x: Array) -> Launch:
    return prepare_gated_backward("silu_and_mul_backward", grad_out, x, ())


register(
    name="silu_and_mul",
    family="layers",
    function=silu_and_mul,
    reference=reference.silu_and_mul,
    specs=partial(gated_specs, "silu_and_mul"),
)
register(
    name="silu_and_mul_backward",
    family="layers",
    function=silu_and_mul_backward,
    reference=reference.silu_and_mul_backward,
    specs=partial(gated_specs, "silu_and_mul_backward"),
)
