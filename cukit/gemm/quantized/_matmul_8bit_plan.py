"""Plans of 8-bit products: tiles, stages, how results are stored. Pure; needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Literal

from cukit.core.device import KIB, Device
from cukit.core.kernel import KernelSpec
from cukit.gemm.dense._linear_plan import rounded_rows

Code = Literal["Int8", "Float8E4M3"]

TILE_K = 128
_SHARED_PER_BLOCK = 227 * KIB
_SHARED_PER_SM = 228 * KIB
_MAX_STAGES = 12


class ResultPath(IntEnum):
    """How the epilogue stores results (kernels_cu/common/hopper/scaled_epilogue.cuh)."""

    PAIRS = 0
    ROWS = 1
    STAGED = 2


@dataclass(frozen=True)
class Product8Bit:
    """The properties of a product, other than its extents, that a kernel is compiled for."""

    code: Code
    out: str
    """Name of the result's dtype."""
    promoted: bool = False
    """Whether FP8 sums over 128 elements of k are added in float32 outside the tensor cores."""
    blocks: bool = False
    """Whether scales are per block; otherwise per row or per tensor."""


@dataclass(frozen=True)
class Tiling8Bit:
    """The tile of a thread block.

    splits: blocks of a cluster that share the k steps of a tile.
    """

    tile_m: int
    tile_n: int
    splits: int = 1

    def __str__(self) -> str:
        name = f"{self.tile_m}x{self.tile_n}"
        return name + (f" split {self.splits}" if self.splits > 1 else "")

    @property
    def consumers(self) -> int:
        """Consumer warpgroups, which divide the rows of a tile among them."""
        return min(2, self.tile_m // 64)

    @property
    def blocks_per_sm(self) -> int:
        """Resident blocks per SM: two if tiles are small, so that one computes while
        the other loads or stores."""
        return 2 if self.consumers == 1 and self.tile_n <= 64 else 1

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        """Tiles along each axis of the result."""
        return -(-m // self.tile_m), -(-n // self.tile_n)

    @property
    def exchanged_bytes(self) -> int:
        """Shared memory that receives partial sums from the other blocks of a split.

        Each block adds up one slice of the tile: a multiple of 8 columns.
        """
        slices = self.splits
        while self.tile_n % (8 * slices):
            slices //= 2
        return (self.splits - 1) * self.tile_m * self.tile_n // slices * 4


def scale_bytes(rows: int) -> int:
    """Shared memory for the scales of a stage: one per row of a, two for b."""
    return -(-4 * (rows + 2) // KIB) * KIB


def piece_columns(tile_n: int) -> int:
    """Columns of the result that one TMA store writes."""
    return next(width for width in (64, 32, 16) if tile_n % width == 0)


@dataclass(frozen=True)
class Config8Bit:
    """The launch configuration of one call on Hopper."""

    product: Product8Bit
    tiling: Tiling8Bit
    result: ResultPath
    partials: int
    """Sets of partial sums that a warpgroup keeps in registers: 0 without promotion."""
    num_blocks: int
    """Blocks of the grid."""
    raster_group: int
    """Tile rows of a rasterisation group."""

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage: tiles of a and b, and their scales if they are per block."""
        operands = (self.tiling.tile_m + self.tiling.tile_n) * TILE_K
        return operands + scale_bytes(self.tiling.tile_m) * self.product.blocks

    @property
    def epilogue_bytes(self) -> int:
        """Shared memory of the epilogue, which follows the stages."""
        if self.tiling.splits > 1:
            return self.tiling.exchanged_bytes
        if self.result != ResultPath.STAGED:
            return 0
        return self.tiling.tile_m * self.tiling.tile_n * 2

    @property
    def num_stages(self) -> int:
        """The stages that fit into shared memory alongside the barriers."""
        room = min(_SHARED_PER_BLOCK, _SHARED_PER_SM // self.tiling.blocks_per_sm - KIB) - KIB
        return min(_MAX_STAGES, (room - self.epilogue_bytes) // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per block."""
        return self.num_stages * self.stage_bytes + self.epilogue_bytes

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        tiling = self.tiling
        threads = 128 * (tiling.consumers + 1)
        defines = (
            ("CODE", self.product.code),
            ("OUT", self.product.out),
            ("TILE_M", tiling.tile_m),
            ("TILE_N", tiling.tile_n),
            ("CONSUMERS", tiling.consumers),
            ("STAGES", self.num_stages),
            ("CLUSTER", tiling.splits),
            ("SPLITS", tiling.splits),
            ("PARTIALS", self.partials),
            ("BLOCKS", int(self.product.blocks)),
            ("RESULT", int(self.result)),
            ("BLOCKS_PER_SM", tiling.blocks_per_sm),
            ("THREADS", threads),
        )
        entry = "matmul_8bit_sm90"
        return KernelSpec(f"gemm/{entry}.cu", entry, defines, threads, self.shared_bytes)


_WIDE = (192, 176)
_NARROW = (128, 96, 64, 48, 32, 16)
_SPLITS = (2, 4)


def candidates(product: Product8Bit, m: int, n: int, k: int, num_sms: int) -> Iterator[Tiling8Bit]:
    """The tilings to choose from; accumulators and partial sums of each fit into registers."""
    if m > 64:
        if not product.promoted:
            yield Tiling8Bit(128, 256)
        yield Tiling8Bit(256, 128)
        yield from (Tiling8Bit(128, tile_n) for tile_n in _WIDE)
    for tile_m in (64,) if m <= 64 else (128, 64):
        yield from (Tiling8Bit(tile_m, tile_n) for tile_n in _NARROW)
        if m <= _MAX_SPLIT_ROWS:
            yield from _splits(tile_m, m, n, k, num_sms)


def _splits(tile_m: int, m: int, n: int, k: int, num_sms: int) -> Iterator[Tiling8Bit]:
    """Tilings that split k so that all clusters are resident at once and all blocks have steps."""
    for splits in _SPLITS:
        for tile_n in _NARROW:
            tiling = Tiling8Bit(tile_m, tile_n, splits)
            tiles_m, tiles_n = tiling.tiles(m, n)
            resident = tiles_m * tiles_n <= _resident_clusters(tiling, num_sms)
            if resident and splits <= -(-k // TILE_K):
                yield tiling


def _result_path(product: Product8Bit, tiling: Tiling8Bit, n: int) -> ResultPath:
    if product.out in ("float32", "int32") or n % 8:
        return ResultPath.PAIRS
    return ResultPath.STAGED if tiling.splits == 1 else ResultPath.ROWS


def partials_of(tiling: Tiling8Bit) -> int:
    """Sets of partial sums that fit into registers.

    With two, one is promoted while the other accumulates the next products.
    """
    return 2 if tiling.tile_m == 64 * tiling.consumers and tiling.tile_n <= 128 else 1


def configure(product: Product8Bit, tiling: Tiling8Bit, m: int, n: int, num_sms: int) -> Config8Bit:
    """The grid and rasterisation order: tiles in flight cover a nearly square region."""
    tiles_m, tiles_n = tiling.tiles(m, n)
    tiles = tiles_m * tiles_n
    slots = num_sms * tiling.blocks_per_sm // tiling.splits
    clusters = tiles if tiling.splits > 1 else min(tiles, slots)
    raster_group = round((min(clusters, slots) * tiling.tile_n / tiling.tile_m) ** 0.5)
    return Config8Bit(
        product,
        tiling,
        _result_path(product, tiling, n),
        partials_of(tiling) if product.promoted else 0,
        clusters * tiling.splits,
        max(1, min(raster_group, tiles_m)),
    )


# ---- The choice ----

# Measured on an H200 (profiling/notes/matmul_8bit_sm90.md).
_START_US = 4.0  # launch, first loads, last stores
_PRODUCT_US = 2.27e-5  # per element of a tile and k step
_WIDE_COST = 1.06  # factor for tiles of 176 or 192 columns
_SCALED_PARTIALS = 1.15  # factor for two sets of partial sums with scales per block
_SELECTED_SCALES = 1.25  # factor for a narrow tile that spans two blocks of scales
_SM_BYTES_PER_US = 86e3  # from L2 to an SM
_STEP_US = {1: 0.28, 2: 0.25}  # least time of a k step, by consumer warpgroups
_EPILOGUE_US = 0.2
_EPILOGUE_ELEMENT_US = 3.4e-5
_SPLIT_US = {1: 0.0, 2: 3.5, 4: 6.0}
_FIRST_BYTE_US = 5.2  # launch and memory latency
_MEMORY_BYTES_PER_US = 3.2e6
_MAX_SPLIT_ROWS = 512

_CLUSTERS = {1: 132, 2: 66, 4: 30}
"""Resident clusters of an H200 with 132 SMs, by blocks per cluster. Clusters of 4 leave SMs idle,
because not every GPC has a multiple of 4 SMs."""


def _resident_clusters(tiling: Tiling8Bit, num_sms: int) -> int:
    """Resident clusters (blocks, without splits) of a GPU, scaled from those of an H200."""
    return _CLUSTERS[tiling.splits] * num_sms // _CLUSTERS[1] * tiling.blocks_per_sm


def cost_us(
    product: Product8Bit, tiling: Tiling8Bit, m: int, n: int, k: int, num_sms: int
) -> float:
    """The estimated time of a tiling on an H200."""
    tiles_m, tiles_n = tiling.tiles(m, n)
    tiles = tiles_m * tiles_n
    rounds = -(-tiles // max(1, _resident_clusters(tiling, num_sms)))
    share = tiling.blocks_per_sm if tiles * tiling.splits > num_sms else 1  # blocks on an SM
    area = tiling.tile_m * tiling.tile_n
    selected = product.blocks and tiling.tile_n < 128 and 128 % tiling.tile_n != 0
    loaded = (min(m, tiling.tile_m) + tiling.tile_n) * TILE_K
    product_us = area * _PRODUCT_US
    if selected:
        product_us *= _SELECTED_SCALES
    elif tiling.tile_n in _WIDE:
        product_us *= _WIDE_COST
    elif product.blocks and partials_of(tiling) == 2:
        product_us *= _SCALED_PARTIALS
    step = max(
        share * product_us,
        share * loaded / _SM_BYTES_PER_US,
        _STEP_US[tiling.consumers],
    )
    steps = -(-k // TILE_K) / tiling.splits
    tile = steps * step + share * (_EPILOGUE_US + area * _EPILOGUE_ELEMENT_US)
    busy = _START_US + rounds * tile + _SPLIT_US[tiling.splits]
    memory = _FIRST_BYTE_US + (m * k + n * k + 2 * m * n) / _MEMORY_BYTES_PER_US
    return max(busy, memory) + busy / 8  # among memory-bound tilings, prefer the one with less work


def plan_matmul_8bit_sm90(product: Product8Bit, m: int, n: int, k: int, num_sms: int) -> Config8Bit:
    """The configuration with the shortest estimated time.

    Values of m for which `rounded_rows(m)` is the same share a tiling.
    """
    best = _fastest_tiling(product, rounded_rows(m), n, k, num_sms)
    return configure(product, best, m, n, num_sms)


@cache
def _fastest_tiling(product: Product8Bit, m: int, n: int, k: int, num_sms: int) -> Tiling8Bit:
    tilings = candidates(product, m, n, k, num_sms)
    return min(tilings, key=lambda t: cost_us(product, t, m, n, k, num_sms))


# ---- Other architectures ----


@dataclass(frozen=True)
class Config8BitSm80:
    """The launch configuration of one call on GPUs without TMA: one block per tile."""

    product: Product8Bit
    tile_m: int
    tile_n: int
    num_blocks: int
    raster_group: int
    """Tile rows of a rasterisation group."""

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        stage_bytes = (self.tile_m + self.tile_n) * TILE_K
        defines = (
            ("CODE", self.product.code),
            ("OUT", self.product.out),
            ("TILE_M", self.tile_m),
            ("TILE_N", self.tile_n),
            ("STAGES", _STAGES_SM80),
            ("PARTIALS", int(self.product.promoted)),
            ("BLOCKS", int(self.product.blocks)),
            ("THREADS", 256),
        )
        entry = "matmul_8bit_sm80"
        shared_bytes = _STAGES_SM80 * stage_bytes
        return KernelSpec(f"gemm/{entry}.cu", entry, defines, 256, shared_bytes)


_STAGES_SM80 = 3
_TILES_SM80 = ((128, 128), (64, 64), (32, 64))


def configure_sm80(
    product: Product8Bit, tile: tuple[int, int], m: int, n: int, num_sms: int
) -> Config8BitSm80:
    """The grid and rasterisation order: tiles in flight cover a nearly square region."""
    tile_m, tile_n = tile
    tiles_m = -(-m // tile_m)
    blocks = tiles_m * -(-n // tile_n)
    raster_group = round((min(blocks, num_sms) * tile_n / tile_m) ** 0.5)
    return Config8BitSm80(product, tile_m, tile_n, blocks, max(1, min(raster_group, tiles_m)))


@cache
def plan_matmul_8bit_sm80(product: Product8Bit, m: int, n: int, num_sms: int) -> Config8BitSm80:
    """The largest tile with at least one block per SM; else 64 x 64, or 32 x 64 if m <= 32."""
    for tile in _TILES_SM80:
        config = configure_sm80(product, tile, m, n, num_sms)
        if config.num_blocks >= num_sms:
            return config
    return configure_sm80(product, _TILES_SM80[1 if m > 32 else 2], m, n, num_sms)


def specs(products: Iterable[Product8Bit], device: Device) -> list[KernelSpec]:
    """Representative kernel variants: wide and narrow tiles, splits, every way to store results."""
    if device.arch != "sm_90":
        return [
            configure_sm80(product, tile, 1024, 1024, device.num_sms).spec()
            for product in products
            for tile in _TILES_SM80
        ]
    return [
        configure(product, tiling, 1024, n, device.num_sms).spec()
        for product in products
        for tiling, n in (
            (Tiling8Bit(128, 192 if product.promoted else 256), 1024),
            (Tiling8Bit(256, 128), 1024),
            (Tiling8Bit(128, 176), 1024),
            (Tiling8Bit(128, 96), 1024),
            (Tiling8Bit(64, 128), 1023),
            (Tiling8Bit(64, 64, splits=4), 1024),
        )
    ]
