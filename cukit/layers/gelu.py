"""The Gaussian error linear unit."""

from __future__ import annotations

from functools import partial

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    access_width,
    adopt,
    check_array,
    check_same_dtype,
    empty,
    runs_kernel,
    write_out,
)
from cukit.core.device import Device
from cukit.core.kernel import NULL, KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.overlap import check_overlap
from cukit.layers._approximate import check_approximate, gelu_macro, gelu_macros
from cukit.layers._elementwise import ElementwiseConfig, plan_elementwise
from cukit.reference import activations as reference
from cukit.registry import register


def gelu(x: Array, *, approximate: str = "none", out: Array | None = None) -> Array:
    """Gaussian error linear unit: `y = x Phi(x)`, Phi the standard normal CDF, or its tanh form.

    Args:
        x: float32|float16|bfloat16, any shape, C-contiguous. float64 on the CPU only.
        approximate: `"none"`, or `"tanh"`: `y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
        out: output array for `y`; dtype and shape of `x`. May be `x` itself.

    Returns:
        `y`, shape and dtype of `x`.

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument; `out` overlaps `x`.
        ConfigError: `approximate` is neither `"none"` nor `"tanh"`.

    Runs on CuPy's current stream; computes in float32; deterministic.
    Paper: Hendrycks and Gimpel, arXiv:1606.08415.

    >>> import numpy as np, cukit as ck
    >>> ck.gelu(np.array([-1.0, 0.0, 1.0], np.float32)).round(3)
    array([-0.159,  0.   ,  0.841], dtype=float32)
    """
    x, out = adopt("gelu", x, out)
    check_overlap("gelu", out, itself="x", x=x)
    if not runs_kernel("gelu", x, out):
        _check("gelu", x, approximate, out=out)
        return write_out(out, reference.gelu(x, approximate=approximate))
    launch = _prepare(x, out, approximate)
    if out is None:
        out = empty(x, x.shape)
    launch(x, NULL, out)
    return out


def gelu_backward(grad_out: Array, x: Array, *, approximate: str = "none") -> Array:
    """Gradient of :func:`gelu` with respect to `x`.

    Args:
        grad_out: gradient of `y`; dtype and shape of `x`.
        x: input of the forward.
        approximate: as in the forward.

    Returns:
        `grad_x`, shape and dtype of `x`.

    Raises:
        ArrayError, ConfigError: as :func:`gelu`.
    """
    grad_out, x = adopt("gelu_backward", grad_out, x)
    if not runs_kernel("gelu_backward", grad_out, x):
        _check("gelu_backward", x, approximate, grad_out=grad_out)
        return reference.gelu_backward(grad_out, x, approximate=approximate)
    launch = _prepare_backward(grad_out, x, approximate)
    grad_x = empty(x, x.shape)
    launch(x, grad_out, grad_x)
    return grad_x


def _check(op: str, x: Array, approximate: str, **like_x: Array | None) -> None:
    check_approximate(op, approximate)
    check_array(op, "x", x, dtypes=FLOAT_DTYPES)
    for name, array in like_x.items():
        if array is not None or name == "grad_out":
            check_array(op, name, array, shape=x.shape)
    check_same_dtype(op, x=x, **like_x)


@launch_plan
def _prepare(x: Array, out: Array | None, approximate: str) -> Launch:
    _check("gelu", x, approximate, out=out)
    return _launch("gelu", x, out, approximate, backward=False)


@launch_plan
def _prepare_backward(grad_out: Array, x: Array, approximate: str) -> Launch:
    _check("gelu_backward", x, approximate, grad_out=grad_out)
    return _launch("gelu_backward", x, grad_out, approximate, backward=True)


def _launch(op: str, x: Array, other: Array | None, approximate: str, *, backward: bool) -> Launch:
    check_array(op, "x", x, dtypes=KERNEL_DTYPES)
    vec = access_width(0, x, other)
    config = plan_elementwise(x.size, x.itemsize, vec)
    spec = _spec(config, x.dtype.name, gelu_macro(approximate), backward)
    return Launch(load_kernel(spec), (config.num_blocks,), (np.int64(x.size),))


def _spec(
    config: ElementwiseConfig, dtype: str, activation: tuple[str, str], backward: bool
) -> KernelSpec:
    return config.spec("gelu", "gelu", ("DTYPE", dtype), activation, ("BACKWARD", backward))


def _specs(backward: bool, device: Device) -> list[KernelSpec]:
    return [
        _spec(
            plan_elementwise(8192 * 4096, dtype.itemsize, 16 // dtype.itemsize),
            dtype.name,
            activation,
            backward,
        )
        for dtype in KERNEL_DTYPES
        for activation in gelu_macros()
    ]


register(
    name="gelu",
    family="layers",
    function=gelu,
    reference=reference.gelu,
    specs=partial(_specs, False),
)
register(
    name="gelu_backward",
    family="layers",
    function=gelu_backward,
    reference=reference.gelu_backward,
    specs=partial(_specs, True),
)
