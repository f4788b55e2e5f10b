"""A linear layer that projects to attention heads and rotates some of them by position (RoPE)."""

from __future__ import annotations

import math

from cukit.core.arrays import (
    Array,
    adopt,
    check_array,
    check_same_dtype,
    empty,
    float32,
    runs_kernel,
    write_out,
)
from cukit.core.kernel import launch_plan
from cukit.core.overlap import check_overlap
from cukit.core.scalars import check_integer
from cukit.errors import ArrayShapeError
from cukit.gemm.dense.fused_rope import FusedLinearRope, fused_specs, prepare_fused
from cukit.gemm.dense.linear import KERNEL_DTYPES, check_weight, linear
from cukit.layers.rope import rope
from cukit.reference import gemm as reference
from cukit.registry import register


def linear_rope(
    x: Array, w: Array, cos: Array, sin: Array, rotated_heads: int, *, out: Array | None = None
) -> Array:
    """Queries, keys and values of an attention layer: `x w^T` with the first heads rotated.

    The rotation is that of :func:`rope` without `interleaved`.

    Args:
        x: float16|bfloat16 [..., k], C-contiguous; float32|float64 on the CPU only.
        w: dtype of `x`, [heads * head_dim, k]: the rows of the rotated heads, then of the others.
        cos, sin: float32 [positions, head_dim / 2]. Row r of `x`, leading axes flattened, is at
            position `r % positions`; the number of rows must be a multiple of `positions`.
        rotated_heads: number of heads that are rotated, those of queries and keys.
        out: array to write into; dtype of `x`, [..., heads * head_dim]. It must not overlap the
            operands.

    Returns:
        [..., heads * head_dim], dtype of `x`.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: `rotated_heads` is not 0 to `heads`.

    On Hopper, for head_dims of 64 and 128 and many tokens, the rotation is part of the product's
    epilogue (kernels_cu/gemm/linear_rope_sm90.cu) if the cost model estimates this to be faster;
    otherwise it is a second kernel.
    Paper: Su et al., arXiv:2104.09864.
    """
    x, w, cos, sin, out = adopt("linear_rope", x, w, cos, sin, out)
    kernel = runs_kernel("linear_rope", x, w, cos, sin, out)
    if kernel:
        launch = _prepare(x, w, cos, sin, rotated_heads, out)
    else:
        _check(x, w, cos, sin, rotated_heads, out)
    check_overlap("linear_rope", out, x=x, w=w, cos=cos, sin=sin)
    if not kernel:
        return write_out(out, reference.linear_rope(x, w, cos, sin, rotated_heads))
    y = empty(x, (*x.shape[:-1], w.shape[0])) if out is None else out
    if launch is not None:
        launch(x, w, y, cos, sin)
        return y
    linear(x, w, out=y)
    if not y.size or not rotated_heads:
        return y
    heads = y.reshape(-1, cos.shape[0], w.shape[0] // (2 * cos.shape[1]), 2 * cos.shape[1])
    rope(heads[:, :, :rotated_heads], heads[:, :, :0], cos, sin, inplace=True)
    return y


@launch_plan
def _prepare(
    x: Array, w: Array, cos: Array, sin: Array, rotated_heads: int, out: Array | None
) -> FusedLinearRope | None:
    _check(x, w, cos, sin, rotated_heads, out)
    check_array("linear_rope", "x", x, dtypes=KERNEL_DTYPES)
    return prepare_fused(x, w, cos, sin, rotated_heads, out)


def _check(
    x: Array, w: Array, cos: Array, sin: Array, rotated_heads: int, out: Array | None
) -> None:
    op = "linear_rope"
    check_weight(op, "w", x, w)
    check_array(op, "cos", cos, dtypes=(float32,), shape=(None, None))
    check_array(op, "sin", sin, dtypes=(float32,), shape=cos.shape)
    rows = math.prod(x.shape[:-1])
    head_dim = 2 * cos.shape[1]
    if cos.size == 0 or rows % cos.shape[0] or w.shape[0] % head_dim:
        raise ArrayShapeError(
            f"{op}: cos must be [positions, head_dim / 2], where positions divides the rows of x "
            f"({rows}) and head_dim those of w ({w.shape[0]}), got {cos.shape}"
        )
    check_integer(op, "rotated_heads", rotated_heads, least=0, most=w.shape[0] // head_dim)
    if out is not None:
        check_array(op, "out", out, shape=(*x.shape[:-1], w.shape[0]))
    check_same_dtype(op, x=x, w=w, out=out)


register(
    name="linear_rope",
    family="layers",
    function=linear_rope,
    reference=reference.linear_rope,
    specs=fused_specs,
)
