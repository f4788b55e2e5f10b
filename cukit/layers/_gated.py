"""Checks and plans shared by silu_and_mul and gelu_and_mul, `[..., 2H]` -> `[..., H]`."""

from __future__ import annotations

import math

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    access_width,
    check_array,
    check_same_dtype,
)
from cukit.core.compiler import MacroValue
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, load_kernel
from cukit.errors import ArrayShapeError
from cukit.layers._elementwise import ElementwiseConfig, plan_elementwise

Macros = tuple[tuple[str, MacroValue], ...]


def half_shape(x: Array) -> tuple[int, ...]:
    """Shape of the result: the last extent halved."""
    return (*x.shape[:-1], x.shape[-1] // 2)


def check_gated(op: str, x: Array, **like_result: Array | None) -> None:
    """Checks that `x` is `[..., 2H]` and the other arrays `[..., H]` of the same dtype."""
    check_array(op, "x", x, dtypes=FLOAT_DTYPES)
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ArrayShapeError(
            f"{op}: the last extent of x must be even, because it holds gate and up; "
            f"got shape {x.shape}"
        )
    for name, array in like_result.items():
        if array is not None or name == "grad_out":
            check_array(op, name, array, shape=half_shape(x))
    check_same_dtype(op, x=x, **like_result)


def prepare_gated(op: str, x: Array, out: Array | None, macros: Macros) -> Launch:
    """Checks the arguments and plans a forward launch."""
    check_gated(op, x, out=out)
    check_array(op, "x", x, dtypes=KERNEL_DTYPES)
    *_, hidden = half_shape(x)
    vec = access_width(hidden, x, out)
    config = plan_elementwise(x.size // 2, x.itemsize, vec)
    return _launch(op, x, config, macros)


def prepare_gated_backward(op: str, grad_out: Array, x: Array, macros: Macros) -> Launch:
    """Checks the arguments and plans a backward launch."""
    check_gated(op, x, grad_out=grad_out)
    check_array(op, "x", x, dtypes=KERNEL_DTYPES)
    *_, hidden = half_shape(x)
    vec = access_width(hidden, x, grad_out)
    config = plan_elementwise(x.size // 2, x.itemsize, vec)
    return _launch(op, x, config, macros)


def gated_specs(op: str, device: Device, macros: Macros = ()) -> list[KernelSpec]:
    """The kernel variants for long rows of each dtype."""
    return [
        plan_elementwise(8192 * 4096, dtype.itemsize, 16 // dtype.itemsize).spec(
            op, op, ("DTYPE", dtype.name), *macros
        )
        for dtype in KERNEL_DTYPES
    ]


def _launch(op: str, x: Array, config: ElementwiseConfig, macros: Macros) -> Launch:
    *lead, hidden = half_shape(x)
    kernel = load_kernel(config.spec(op, op, ("DTYPE", x.dtype.name), *macros))
    vecs_per_row = hidden // config.vec
    scalars = (np.int64(math.prod(lead) * vecs_per_row), np.int32(vecs_per_row))
    return Launch(kernel, (config.num_blocks,), scalars)
