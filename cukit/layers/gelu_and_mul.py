"""The GeGLU activation: GELU of the gate times the up projection."""

from __future__ import annotations

from functools import partial

from cukit.core.arrays import Array, adopt, empty, runs_kernel, write_out
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan
from cukit.core.overlap import check_overlap
from cukit.layers._approximate import check_approximate, gelu_macro, gelu_macros
from cukit.layers._gated import (
    check_gated,
    gated_specs,
    half_shape,
    prepare_gated,
    prepare_gated_backward,
)
from cukit.reference import activations as reference
from cukit.registry import register


def gelu_and_mul(x: Array, *, approximate: str = "tanh", out: Array | None = None) -> Array:
    """GeGLU: `y = gelu(gate) * up` with `gate, up = x[..., :H], x[..., H:]`.

    Args:
        x: float32|float16|bfloat16 [..., 2H], C-contiguous. float64 on the CPU only.
        approximate: `"none"`, `gelu(t) = t Phi(t)`, or `"tanh"`,
            `gelu(t) = t/2 (1 + tanh(sqrt(2/pi) (t + 0.044715 t^3)))`.
        out: output array for `y`; dtype of `x`, [..., H].

    Returns:
        `y`, [..., H], dtype of `x`.

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument; `out` overlaps `x`.
        ConfigError: `approximate` is neither `"none"` nor `"tanh"`.

    Runs on CuPy's current stream; computes in float32; deterministic.
    Paper: Shazeer, arXiv:2002.05202.

    >>> import numpy as np, cukit as ck
    >>> ck.gelu_and_mul(np.array([[0.0, 1.0, 5.0, 2.0]], np.float32)).round(3)
    array([[0.   , 1.682]], dtype=float32)
    """
    x, out = adopt("gelu_and_mul", x, out)
    check_overlap("gelu_and_mul", out, x=x)
    if not runs_kernel("gelu_and_mul", x, out):
        check_approximate("gelu_and_mul", approximate)
        check_gated("gelu_and_mul", x, out=out)
        return write_out(out, reference.gelu_and_mul(x, approximate=approximate))
    launch = _prepare(x, out, approximate)
    if out is None:
        out = empty(x, half_shape(x))
    launch(x, out)
    return out


def gelu_and_mul_backward(grad_out: Array, x: Array, *, approximate: str = "tanh") -> Array:
    """Gradient of :func:`gelu_and_mul` with respect to `x`, in one pass.

    Args:
        grad_out: gradient of `y`, [..., H], dtype of `x`.
        x: input of the forward, [..., 2H].
        approximate: as in the forward.

    Returns:
        `grad_x`, shape and dtype of `x`.

    Raises:
        ArrayError, ConfigError: as :func:`gelu_and_mul`.
    """
    grad_out, x = adopt("gelu_and_mul_backward", grad_out, x)
    if not runs_kernel("gelu_and_mul_backward", grad_out, x):
        check_approximate("gelu_and_mul_backward", approximate)
        check_gated("gelu_and_mul_backward", x, grad_out=grad_out)
        return reference.gelu_and_mul_backward(grad_out, x, approximate=approximate)
    launch = _prepare_backward(grad_out, x, approximate)
    grad_x = empty(x, x.shape)
    launch(grad_out, x, grad_x)
    return grad_x


@launch_plan
def _prepare(x: Array, out: Array | None, approximate: str) -> Launch:
    check_approximate("gelu_and_mul", approximate)
    return prepare_gated("gelu_and_mul", x, out, (gelu_macro(approximate),))


@launch_plan
def _prepare_backward(grad_out: Array, x: Array, approximate: str) -> Launch:
    check_approximate("gelu_and_mul_backward", approximate)
    macros = (gelu_macro(approximate),)
    return prepare_gated_backward("gelu_and_mul_backward", grad_out, x, macros)


def _specs(op: str, device: Device) -> list[KernelSpec]:
    return [spec for macro in gelu_macros() for spec in gated_specs(op, device, (macro,))]


register(
    name="gelu_and_mul",
    family="layers",
    function=gelu_and_mul,
    reference=reference.gelu_and_mul,
    specs=partial(_specs, "gelu_and_mul"),
)
register(
    name="gelu_and_mul_backward",
    family="layers",
    function=gelu_and_mul_backward,
    reference=reference.gelu_and_mul_backward,
    specs=partial(_specs, "gelu_and_mul_backward"),
)
