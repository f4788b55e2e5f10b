"""The product of `linear_rope` with the rotation in its epilogue: plan and launch."""

from __future__ import annotations

from typing import Any

from cukit.core.arrays import Array, access_width
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, load_kernel
from cukit.core.parameters import parameter_structs
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

_PARAMETERS = parameter_structs("gemm/parameters.cuh")
_TABLE_ACCESS = 2  # elements of a table per load
TILINGS = {64: Tiling(128, 256), 128: Tiling(128, 128)}
"""By head_dim. Registers hold the cosines and sines of two rows besides the accumulators."""
_ROPE_BYTES_PER_US = 3.74e6  # the separate kernel, on an H200
_ROPE_LAUNCH_US = 3.0


class FusedLinearRope:
    """A launch of kernels_cu/gemm/linear_rope_sm90.cu."""

    def __init__(self, config: Sm90Config, period: int, head_dim: int, rotated_heads: int) -> None:
        product, tiling = config.product, config.tiling
        gemm = _PARAMETERS["GemmParameters"].pack(
            m=product.m,
            n=product.n,
            steps=-(-product.k // TILE_K),
            raster_group=config.raster_group,
        )
        parameters = _PARAMETERS["RotatedParameters"].pack(
            gemm=gemm, period=period, rotated=rotated_heads * head_dim
        )
        kernel = load_kernel(_spec(product.dtype, head_dim, tiling))
        self._launch = Launch(kernel, (config.num_blocks,), (parameters,))
        self._x = maps(product.k, (tiling.tile_m, TILE_K))
        self._w = maps(product.k, (tiling.tile_n, TILE_K))
        self._y = maps(product.n, (STORE_EXTENT, tiling.piece_columns(1)))

    def __call__(self, x: Array, w: Array, y: Array, cos: Array, sin: Array) -> None:
        self._launch(self._x(x), self._w(w), self._y(y), cos, sin)


def prepare_fused(
    x: Array, w: Array, cos: Array, sin: Array, rotated_heads: int, out: Array | None
) -> FusedLinearRope | None:
    """The launch for checked 16-bit arguments of `linear_rope`; None if the kernel does not support
    them or a product followed by `rope` is estimated to be faster."""
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
    if not prefers_fused(product, plan, tiling, rotated_heads * head_dim):
        return None
    config = configure(product, tiling, plan.num_sms)
    return FusedLinearRope(config, cos.shape[0], head_dim, rotated_heads)


def prefers_fused(product: Product, plan: Sm90Config, tiling: Tiling, rotated: int) -> bool:
    """Whether one kernel with `tiling` is estimated to be faster than the planned product and a
    second kernel that reads and writes `rotated` columns."""
    rope_us = _ROPE_LAUNCH_US + 2 * ITEM_BYTES * product.m * rotated / _ROPE_BYTES_PER_US
    product_us, fused_us = (
        estimate_us(product, each, plan.num_sms) for each in (plan.tiling, tiling)
    )
    return fused_us < product_us + rope_us


def fused_specs(device: Device) -> list[KernelSpec]:
    """The kernel variants of `linear_rope` on `device`: the fused kernel, or those of `linear`."""
    if device.arch != HOPPER:
        return linear_specs(device)
    return [
        _spec(dtype, head_dim, tiling) for dtype in DTYPES for head_dim, tiling in TILINGS.items()
    ]


def _spec(dtype: str, head_dim: int, tiling: Tiling) -> KernelSpec:
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
