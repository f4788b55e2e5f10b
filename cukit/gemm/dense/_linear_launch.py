"""Launches of the kernels of dense products, for checked arrays."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

from cukit.core.arrays import ACCESS_BYTES, Array, address_of
from cukit.core.device import Device, current_device
from cukit.core.kernel import NULL, KernelSpec, Launch, Launches, launch_plan, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.core.tensor_map import TensorMapCache, encode_tensor_map
from cukit.gemm.dense._linear_plan import (
    ACTIVATIONS,
    DTYPES,
    GATED_ACTIVATIONS,
    HOPPER,
    ITEM_BYTES,
    ROW_BYTES,
    TILE_K,
    Product,
    Sm80Config,
    Sm90Config,
    Tiling,
    candidates,
    configure,
    plan_linear,
    representative_configs,
)

_PARAMETERS = parameter_structs("gemm/parameters.cuh")
_SWIZZLE_ROWS = 8  # the period of the 128-byte swizzle
_MIN_BOX_ROWS = 32
STORE_EXTENT = 64  # rows that a warpgroup stores at a time; also the elements in 128 bytes


def prepare_linear(product: Product, *arrays: Array | None) -> LinearSm90 | LinearSm80:
    """A launch of `product` on the current device, for arrays like `arrays`."""
    return launch_linear(plan_for(product, *arrays))


def plan_for(product: Product, *arrays: Array | None) -> Sm90Config | Sm80Config:
    """The plan of `product` on the current device, for arrays like `arrays`."""
    aligned = all(array is None or address_of(array) % ACCESS_BYTES == 0 for array in arrays)
    return plan_linear(product, aligned, current_device())


def launch_linear(config: Sm90Config | Sm80Config) -> LinearSm90 | LinearSm80:
    """A launch of a planned product."""
    return LinearSm90(config) if isinstance(config, Sm90Config) else LinearSm80(config)


class LinearSm90:
    """A launch of kernels_cu/gemm/linear_sm90.cu; takes checked arrays."""

    __slots__ = ("_a", "_b", "_kept", "_kept_up", "_launch", "_out", "config")

    def __init__(self, config: Sm90Config) -> None:
        product, tiling = config.product, config.tiling
        steps = -(-product.k // TILE_K)
        parts = 1 + product.gated
        box_a = box_rows(tiling.tile_m, product.m)
        box_b = box_rows(tiling.tile_n // parts, product.n)
        if tiling.cluster > 1:
            box_a, box_b = tiling.tile_m, tiling.tile_n // tiling.cluster
        parameters = _PARAMETERS["LinearParameters"].pack(
            gemm=_PARAMETERS["GemmParameters"].pack(
                m=product.m, n=product.n, steps=steps, raster_group=config.raster_group
            ),
            box_a=box_a,
            box_b=box_b,
        )
        self.config = config
        self._launch = _launches(tiling, *product.variant)((config.num_blocks,), (parameters,))
        self._a = _operand(product.dtype, product.k, product.major_a, product.m, box_a)
        self._b = _operand(product.dtype, product.k, product.major_b, product.n, box_b)
        if tiling.transposed:
            out_columns, box = product.m, (tiling.tile_n, STORE_EXTENT)
        else:
            out_columns, box = product.n, (STORE_EXTENT, tiling.piece_columns(parts))
        self._out = maps(out_columns, box)
        self._kept = maps(out_columns * parts, box, slice(0, out_columns))
        self._kept_up = maps(out_columns * parts, box, slice(out_columns, None))

    def __call__(
        self,
        a: Array,
        b: Array,
        up: Array | None,
        bias: Array | None,
        out: Array,
        kept: Array | None,
    ) -> None:
        """a, b: the operands in the caller's order; a transposed tiling swaps them here."""
        if self.config.tiling.transposed:
            a, b = b, a
        map_a, map_out = self._a(a), self._out(out)
        self._launch(
            map_a,
            self._b(b),
            map_a if up is None else self._b(up),
            map_out,
            map_out if kept is None else self._kept(kept),
            map_out if kept is None or up is None else self._kept_up(kept),
            NULL if bias is None else bias,
            out,
            NULL if kept is None else kept,
        )


@launch_plan
def _launches(
    tiling: Tiling,
    dtype: str,
    major_a: str,
    major_b: str,
    activation: str | None,
    gated: bool,
    keeps: bool,
) -> Launches:
    """The launches of a variant, for products of all extents."""
    product = Product(0, 0, 0, dtype, major_a, major_b, activation, gated, keeps)
    return Launches(load_kernel(Sm90Config(product, tiling, 0, 0, 0).spec()))


class LinearSm80:
    """A launch of kernels_cu/gemm/linear_sm80.cu; takes checked arrays."""

    __slots__ = ("_launch", "config")

    def __init__(self, config: Sm80Config) -> None:
        product = config.product
        parameters = _PARAMETERS["DenseParameters"].pack(m=product.m, n=product.n, k=product.k)
        self.config = config
        self._launch = Launch(load_kernel(config.spec()), (config.num_blocks,), (parameters,))

    def __call__(
        self,
        a: Array,
        b: Array,
        up: Array | None,
        bias: Array | None,
        out: Array,
        kept: Array | None,
    ) -> None:
        self._launch(
            a,
            b,
            NULL if up is None else up,
            NULL if bias is None else bias,
            out,
            NULL if kept is None else kept,
        )


def box_rows(tile: int, extent: int) -> int:
    """Rows of the TMA box that loads a tile: the whole tile, or a fraction of it.

    A box that is mostly outside the matrix is slow, because TMA fills the rest with zeros. Smaller
    boxes leave fewer rows outside in the last tile, but each extra copy costs the producer time, so
    the box is halved only while at least 32 rows are outside.
    """
    if extent <= tile:
        return -(-extent // _SWIZZLE_ROWS) * _SWIZZLE_ROWS
    box = tile
    while (
        -extent % box >= _MIN_BOX_ROWS
        and box % (2 * _SWIZZLE_ROWS) == 0
        and box >= 2 * _MIN_BOX_ROWS
    ):
        box //= 2
    return box


@launch_plan
def _operand(dtype: str, k: int, major: str, extent: int, tile: int) -> TensorMapCache:
    """Tensor maps of contiguous operands, shared by all products with an operand of this
    description. The maps of a weight do not depend on the number of tokens."""
    if major == "K":
        return maps(k, (tile, TILE_K))
    return maps(extent, (TILE_K, ROW_BYTES // ITEM_BYTES))


_ALL_COLUMNS = slice(None)


def maps(columns: int, box: tuple[int, int], part: slice = _ALL_COLUMNS) -> TensorMapCache:
    """Tensor maps of the columns `part` of arrays [..., columns] with leading axes flattened. An
    array that is not C-contiguous is mapped as its transpose."""
    return TensorMapCache(partial(_encode, columns, box, part))


def _encode(columns: int, box: tuple[int, int], part: slice, array: Array) -> Any:
    stored = array if array.flags.c_contiguous else array.T
    matrix = stored if stored.ndim == 2 else stored.reshape(-1, columns)
    if part != _ALL_COLUMNS:
        matrix = matrix[:, part]
    return encode_tensor_map(matrix, box, swizzle_bytes=box[1] * ITEM_BYTES)


def linear_specs(device: Device, *, gated: bool = False) -> list[KernelSpec]:
    """Every tiling of a bfloat16 product without options, and each option with some tilings."""
    activations = GATED_ACTIVATIONS if gated else tuple(ACTIVATIONS)
    products = [
        Product(4096, 4096, 4096, dtype, activation=activation, gated=gated, keeps=keeps)
        for dtype, activation in zip(itertools.cycle(DTYPES), activations, strict=False)
        for keeps in (False, True)
    ]
    specs = [Sm80Config(product, 128, aligned=True).spec() for product in products]
    specs += [Sm80Config(products[0], tile, aligned=False).spec() for tile in (128, 64)]
    if device.arch == HOPPER:
        for tokens in (4096, 128, 96, 64, 48, 32, 16):
            first = dataclasses.replace(products[0], m=tokens, dtype="bfloat16")
            specs += [configure(first, each, device.num_sms).spec() for each in candidates(first)]
        specs += _representative(products, device)
    return list(dict.fromkeys(specs))


def product_specs(device: Device) -> list[KernelSpec]:
    """Variants of the backward's products, whose operands are MN-major."""
    products = [
        Product(4096, 4096, 4096, dtype, major_a=major_a, major_b="MN")
        for dtype in DTYPES
        for major_a in ("K", "MN")
    ]
    specs = [
        Sm80Config(product, 128, aligned).spec()
        for product in products
        for aligned in (True, False)
    ]
    return specs + (_representative(products, device) if device.arch == HOPPER else [])


def _representative(products: list[Product], device: Device) -> list[KernelSpec]:
    return [
        config.spec()
        for product in products
        for config in representative_configs(product, device.num_sms)
    ]
