"""The gradient of a gated layer through the linear layer after it, in one kernel."""

from __future__ import annotations

from typing import Any

from cukit.core.arrays import Array
from cukit.core.kernel import KernelSpec, Launch, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.gemm.dense._linear_launch import STORE_EXTENT, maps
from cukit.gemm.dense._linear_plan import (
    ACTIVATIONS,
    ITEM_BYTES,
    ROW_BYTES,
    TILE_K,
    Product,
    Sm80Config,
    Sm90Config,
    Tiling,
    configure,
)

_PARAMETERS = parameter_structs("gemm/parameters.cuh")["GemmParameters"]
TILING = Tiling(128, 128)
_STAGES = 5  # the most that fit into shared memory beside a tile's preactivation
_ALTERNATING = True  # consumer warpgroups compute alternate tiles; False: halves of each tile
_MIN_ROUNDS = 2


def fused_gradient(
    product: Product, plan: Sm90Config | Sm80Config, activation: str
) -> GatedGradientSm90 | None:
    """A launch of `product` (grad_out times the next layer's weight) and the gradient of
    `activation` as one kernel; None if they must run as two kernels, the product with `plan`."""
    if isinstance(plan, Sm80Config) or product.n % TILING.tile_n:
        return None
    num_sms = plan.num_sms
    tiles_m, tiles_n = TILING.tiles(product)
    if tiles_m * tiles_n < _MIN_ROUNDS * num_sms or product.m < TILING.tile_m:
        return None  # too few tiles to keep every SM busy
    return GatedGradientSm90(configure(product, TILING, num_sms), activation)


class GatedGradientSm90:
    """A launch of kernels_cu/gemm/gated_gradient_sm90.cu; takes checked arrays."""

    def __init__(self, config: Sm90Config, activation: str) -> None:
        product, tiling = config.product, config.tiling
        parameters = _PARAMETERS.pack(
            m=product.m,
            n=product.n,
            steps=-(-product.k // TILE_K),
            raster_group=config.raster_group,
        )
        kernel = load_kernel(fused_spec(product.dtype, activation))
        self._launch = Launch(kernel, (config.num_blocks,), (parameters,))
        self._grad_out = maps(product.k, (tiling.tile_m, TILE_K))
        self._w = maps(product.n, (TILE_K, TILE_K))
        self._z = maps(2 * product.n, (STORE_EXTENT, STORE_EXTENT))
        self._grad = maps(2 * product.n, (STORE_EXTENT, STORE_EXTENT))

    def __call__(self, grad_out: Array, w: Array, z: Array, grad: Array) -> None:
        self._launch(self._grad_out(grad_out), self._w(w), self._z(z), self._grad(grad))


def fused_spec(dtype: str, activation: str) -> KernelSpec:
    """A variant of gated_gradient_sm90.cu."""
    defines: Any = (
        ("DTYPE", dtype),
        ("TILE_M", TILING.tile_m),
        ("TILE_N", TILING.tile_n),
        ("STAGES", _STAGES),
        ("THREADS", TILING.threads),
        ("ALTERNATING", _ALTERNATING),
        ("ACTIVATION", ACTIVATIONS[activation]),
    )
    preactivation = 2 * TILING.tile_m * TILING.tile_n * ITEM_BYTES
    shared = _STAGES * (TILING.tile_m + TILING.tile_n) * ROW_BYTES + preactivation
    name = "gated_gradient_sm90"
    return KernelSpec(f"gemm/{name}.cu", name, defines, TILING.threads, shared)
