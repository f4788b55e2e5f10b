"""A linear layer that projects to attention heads and rotates some of them by position (RoPE)."""

from __future__ import annotations

from typing import Any

from cukit.core.arrays import (
    Array,
    access_width,
    adopt,
    check_array,
    check_same_dtype,
    empty,
    float32,
    runs_kernel,
    write_out,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.overlap import check_overlap
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import check_integer
from cukit.errors import ArrayShapeError
from cukit.gemm.dense._linear_launch import STORE_EXTENT, linear_specs, maps, plan_for
from cukit.gemm.dense._linear_plan import (
    DTYPES,
    HOPPER,
    ITEM_BYTES,
    ROW_BYTES,
    TILE_K,
    Product,
    Sm90Config,
    Tiling,
    configure,
    estimate_us,
)
from cukit.gemm.dense.linear import KERNEL_DTYPES, check_weight, linear
from cukit.layers.rope import rope
from cukit.reference import gemm as reference
from cukit.registry import register

_PARAMETERS = parameter_structs("gemm/parameters.cuh")
_TABLE_ACCESS = 2  # elements of a table per load
TILINGS = {64: Tiling(128, 256), 128: Tiling(128, 128)}
"""By head_dim. Registers hold the cosines and sines of two rows besides the accumulators."""
_ROPE_BYTES_PER_US = 3.74e6  # the separate kernel, on an H200
_ROPE_LAUNCH_US = 3.0


def linear_rope(
    x: Array, w: Array, cos: Array, sin: Array, rotated_heads: int, *, out: Array | None = None
) -> Array:
    """Queries, keys and values of an attention layer: `x w^T` with the first heads rotated.

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
    heads = y.reshape(-1, cos.shape[0], w.shape[0] // (2 * cos.shape[1]), 2 * cos.shape[1])
    if heads.size and rotated_heads:
        rope(heads[:, :, :rotated_heads], heads[:, :, :0], cos, sin, inplace=True)
    return y


class FusedLinearRope:
    """A launch of kernels_cu/gemm/linear_rope_sm90.cu."""

    def __init__(self, config: Sm90Config, period: int, head_dim: int, rotated_heads: int) -> None:
        product, tiling = config.product, config.tiling
        gemm = _PARAMETERS["GemmParameters"].pack(
            m=product.m, n=product.n, steps=-(-product.k // TILE_K), group=config.group
        )
        parameters = _PARAMETERS["RotatedParameters"].pack(
            gemm=gemm, period=period, rotated=rotated_heads * head_dim
        )
        kernel = load_kernel(rotated_spec(product.dtype, head_dim, tiling))
        self._launch = Launch(kernel, (config.num_blocks,), (parameters,))
        self._x = maps(product.k, (tiling.tile_m, TILE_K))
        self._w = maps(product.k, (tiling.tile_n, TILE_K))
        self._y = maps(product.n, (STORE_EXTENT, tiling.piece_columns(1)))

    def __call__(self, x: Array, w: Array, y: Array, cos: Array, sin: Array) -> None:
        self._launch(self._x(x), self._w(w), self._y(y), cos, sin)


def rotated_spec(dtype: str, head_dim: int, tiling: Tiling) -> KernelSpec:
    """A variant of linear_rope_sm90.cu."""
    stages = tiling.num_stages(Product(0, 0, 0, dtype))
    defines: Any = (
        ("DTYPE", dtype),
        ("TILE_M", tiling.tile_m),
        ("TILE_N", tiling.tile_n),
        ("HEAD_DIM", head_dim),
        ("STAGES", stages),
        ("THREADS", tiling.threads),
    )
    shared = stages * (tiling.tile_m + tiling.tile_n) * ROW_BYTES + tiling.epilogue_bytes(1)
    name = "linear_rope_sm90"
    return KernelSpec(f"gemm/{name}.cu", name, defines, tiling.threads, shared)


@launch_plan
def _prepare(
    x: Array, w: Array, cos: Array, sin: Array, rotated_heads: int, out: Array | None
) -> FusedLinearRope | None:
    _check(x, w, cos, sin, rotated_heads, out)
    check_array("linear_rope", "x", x, dtypes=KERNEL_DTYPES)
    n, k = w.shape
    head_dim = 2 * cos.shape[1]
    if w.size == 0 or x.size == 0 or head_dim not in TILINGS:
        return None
    if access_width(_TABLE_ACCESS, cos, sin) < _TABLE_ACCESS:
        return None  # the separate kernel reads tables of any alignment
    product = Product(x.size // k, n, k, x.dtype.name)
    plan = plan_for(product, x, w, out)
    tiling = TILINGS[head_dim]
    if not isinstance(plan, Sm90Config) or product.m < tiling.tile_m or n < tiling.tile_n:
        return None
    rotated = rotated_heads * head_dim
    if not prefers_fused(product, plan, tiling, rotated):
        return None
    config = configure(product, tiling, plan.num_sms)
    return FusedLinearRope(config, cos.shape[0], head_dim, rotated_heads)


def prefers_fused(product: Product, plan: Sm90Config, tiling: Tiling, rotated: int) -> bool:
    """Whether one kernel with `tiling` is faster than the planned product and a second kernel that
    reads and writes `rotated` columns."""
    rope_us = _ROPE_LAUNCH_US + 2 * ITEM_BYTES * product.m * rotated / _ROPE_BYTES_PER_US
    product_us, fused_us = (
        estimate_us(product, each, plan.num_sms) for each in (plan.tiling, tiling)
    )
    return fused_us < product_us + rope_us


def _check(
    x: Array, w: Array, cos: Array, sin: Array, rotated_heads: int, out: Array | None
) -> None:
    op = "linear_rope"
    check_weight(op, "w", x, w)
    check_array(op, "cos", cos, dtypes=(float32,), shape=(None, None))
    check_array(op, "sin", sin, dtypes=(float32,), shape=cos.shape)
    rows = x.size // max(1, x.shape[-1])
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


def _specs(device: Device) -> list[KernelSpec]:
    if device.arch != HOPPER:
        return linear_specs(device)
    return [
        rotated_spec(dtype, head_dim, tiling)
        for dtype in DTYPES
        for head_dim, tiling in TILINGS.items()
    ]


register(
    name="linear_rope",
    family="layers",
    function=linear_rope,
    reference=reference.linear_rope,
    specs=_specs,
)
