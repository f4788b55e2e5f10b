"""Plans of grouped products: tilings, a cost model for Hopper, and the choice. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from cukit.core.kernel import KernelSpec
from cukit.gemm.dense._linear_plan import (
    ACTIVATIONS,
    ITEM_BYTES,
    ROW_BYTES,
    TILE_K,
    Product,
    Sm80Config,
    Tiling,
    rounded_rows,
)

MAX_GROUPS = 512
STATIC_BYTES = 3072
"""Static shared memory: the first tile of each group, and barriers."""


class Layout(NamedTuple):
    """Where the rows of the groups are stored."""

    groups: int
    rows: int  # of all groups together
    longest: int  # upper bound on a group's rows
    fixed_capacity: bool
    """Whether each group has `longest` rows reserved; otherwise groups are contiguous."""


@dataclass(frozen=True)
class GroupedProblem:
    """The product that a variant is selected for.

    ragged: the extent that differs between groups: "m", `out[r] = f(a[r] b[g]^T)`, where operand a
        holds the groups' rows; or "k", `out[g] = sum of a[r]^T b[r]`, where both operands hold
        them.
    product: the extents; the ragged one is the total over all groups.
    """

    product: Product
    groups: int
    ragged: str = "m"

    @property
    def extents(self) -> tuple[int, ...]:
        """The extents that all groups share."""
        product = self.product
        return (product.n, product.k) if self.ragged == "m" else (product.m, product.n)

    @property
    def rows_each(self) -> float:
        """Mean number of rows of a group."""
        return (self.product.m if self.ragged == "m" else self.product.k) / self.groups


def max_groups(groups: int) -> int:
    """The largest number of groups of the variant that is compiled for `groups` groups."""
    return 64 if groups <= 64 else MAX_GROUPS


@dataclass(frozen=True)
class GroupedConfig:
    """The launch configuration of one call on Hopper.

    product, ragged: of the product computed; for a transposed tiling, with operands swapped.
    """

    product: Product
    ragged: str
    groups: int
    tiling: Tiling
    num_blocks: int
    raster_group: int
    """Tile rows of a rasterisation group."""

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        tiling, product = self.tiling, self.product
        stages = tiling.num_stages(product, STATIC_BYTES)
        parts = 1 + product.gated
        defines = (
            ("DTYPE", product.dtype),
            ("RAGGED", self.ragged.upper()),
            ("TILE_M", tiling.tile_m),
            ("TILE_N", tiling.tile_n),
            ("STAGES", stages),
            ("CONSUMERS", tiling.consumers),
            ("BLOCKS_PER_SM", tiling.blocks_per_sm),
            ("THREADS", tiling.threads),
            ("MAJOR_A", product.major_a),
            ("MAJOR_B", product.major_b),
            ("PARTS", parts),
            ("ACTIVATION", ACTIVATIONS[product.activation]),
            ("KEEPS", product.keeps),
            ("GROUPS", max_groups(self.groups)),
        )
        shared = stages * tiling.stage_bytes(product) + tiling.epilogue_bytes(parts)
        entry = "grouped_gemm_sm90"
        return KernelSpec(f"gemm/{entry}.cu", entry, defines, tiling.threads, shared)


_WIDE = (*(Tiling(128, tile_n) for tile_n in (256, 192, 128, 64)), Tiling(256, 128))
_SMALL = tuple(Tiling(64, tile_n, consumers=1, blocks_per_sm=2) for tile_n in (128, 64))
_FEWEST_STAGES = 3
_MANY_ROUNDS = 8
"""With more rounds, the idle SMs of the last one do not matter."""
# Measured on an H200 (profiling/notes/grouped_gemm_sm90.md). The L2 rate is per SM; the tensor core
# rate is at the clock that the power limit allows.
_MEMORY_BYTES_PER_US = 4.1e6
_SM_BYTES_PER_US = 80e3
_SM_MACS_PER_US = 2048 * 1.6e3
_START_US = 4.0
_EPILOGUE_US = 1.0
_TRANSPOSED = 0.98
"""Factor on the computation with a transposed tiling and a K-major weight."""
_BESIDE_MEMORY = 0.1
"""Share of the computation time that is added to the estimate."""
_ROWS = (16, 32, 64, 128, 192, 256)


def candidates(problem: GroupedProblem) -> Iterator[Tiling]:
    """Every tiling that suits the layouts."""
    product = problem.product
    tilings = [each for each in (*_WIDE, *_SMALL) if not product.gated or each.tile_n >= 128]
    if problem.ragged == "m" and not product.gated:
        tilings += [Tiling(128, rows, transposed=True) for rows in _ROWS]
    for tiling in tilings:
        computed = product.swapped if tiling.transposed else product
        if tiling.num_stages(computed, STATIC_BYTES) >= _FEWEST_STAGES:
            yield tiling


def estimate_us(problem: GroupedProblem, tiling: Tiling, num_sms: int) -> float:
    """Estimated time of a product.

    A fixed start, the larger of the computation and memory times, and a share of the computation
    time. Computation is the sum over all rounds of tiles; each tile is bound by its multiplications
    or by its loads. A group's last tile is assumed to be half empty.
    """
    product, each = problem.product, problem.rows_each
    columns = product.n * (1 + product.gated)
    if problem.ragged == "m":
        moved = product.k * (product.m + problem.groups * columns) + product.m * product.n
        extent, other = tiling.tile_m, tiling.tile_n
        if tiling.transposed:
            extent, other = other, extent
        ragged_tiles = problem.groups * (each if each < 1 else max(1.0, each / extent + 0.5))
        tiles = ragged_tiles * -(-columns // other)
        steps = float(-(-product.k // TILE_K))
        filled = min(extent, each) + min(other, columns)
    else:
        moved = product.k * (product.m + product.n) + problem.groups * product.m * product.n
        tiles = float(
            problem.groups * -(-product.m // tiling.tile_m) * -(-product.n // tiling.tile_n)
        )
        steps = each / TILE_K + 0.5
        filled = min(tiling.tile_m, product.m) + min(tiling.tile_n, product.n)
    load = filled * ROW_BYTES / _SM_BYTES_PER_US
    multiply = tiling.tile_m * tiling.tile_n * TILE_K / _SM_MACS_PER_US
    busy = max(1.0, min(tiling.blocks_per_sm, -(-tiles // num_sms)))  # blocks on an SM
    rounds = tiles / num_sms
    if tiles < _MANY_ROUNDS * num_sms:
        rounds = -(-tiles // (num_sms * busy)) * busy
    stored = tiling.tile_m * tiling.tile_n / (128 * 256)
    computed = rounds * (steps * max(load, multiply) + _EPILOGUE_US * stored)
    if tiling.transposed and product.major_b == "K":
        computed *= _TRANSPOSED
    memory = ITEM_BYTES * moved / _MEMORY_BYTES_PER_US
    # Among memory-bound tilings, prefer the one with the least work.
    return _START_US + max(computed, memory) + _BESIDE_MEMORY * computed


def configure(problem: GroupedProblem, tiling: Tiling, num_sms: int) -> GroupedConfig:
    """The grid and rasterisation order for a tiling."""
    product, ragged = problem.product, problem.ragged
    if tiling.transposed:
        product, ragged = product.swapped, "n"
    tiles_m, tiles_n = tiling.tiles(product)
    if ragged == "m":
        tiles = (tiles_m + problem.groups) * tiles_n
    elif ragged == "n":
        tiles = tiles_m * (tiles_n + problem.groups)
    else:
        tiles = problem.groups * tiles_m * tiles_n
    blocks = min(tiles, num_sms * tiling.blocks_per_sm)
    raster_group = round((blocks * tiling.tile_n / (1 + product.gated) / tiling.tile_m) ** 0.5)
    return GroupedConfig(
        product, ragged, problem.groups, tiling, max(1, blocks), max(1, raster_group)
    )


_EXACT_ROWS = 64


def plan_grouped_sm90(problem: GroupedProblem, num_sms: int) -> GroupedConfig:
    """The configuration with the shortest estimated time.

    The total number of rows is rounded, so that similar problems share a cached choice. Estimates
    are approximate in any case, because the rows of each group are unknown on the host.
    """
    product = problem.product
    rows = product.m if problem.ragged == "m" else product.k
    rounded = problem
    if rows > _EXACT_ROWS:
        rows = rounded_rows(rows)
        like = replace(product, m=rows) if problem.ragged == "m" else replace(product, k=rows)
        rounded = replace(problem, product=like)
    return configure(problem, _fastest_tiling(rounded, num_sms), num_sms)


@cache
def _fastest_tiling(problem: GroupedProblem, num_sms: int) -> Tiling:
    return min(candidates(problem), key=lambda each: estimate_us(problem, each, num_sms))


def representative(dtype: str) -> list[GroupedProblem]:
    """One problem for each kind of variant: forward, gated, both gradients, few rows per group."""
    product = Product(32768, 6144, 7168, dtype)
    few = replace(product, m=1024)
    return [
        GroupedProblem(product, 4),
        GroupedProblem(replace(product, major_b="MN"), 4),
        GroupedProblem(replace(product, activation="silu", gated=True), 128),
        GroupedProblem(replace(product, activation="silu", gated=True, keeps=True), 128),
        GroupedProblem(few, 32),
        GroupedProblem(replace(few, major_b="MN"), 32),
        GroupedProblem(
            Product(6144, 7168, 32768, dtype, major_a="MN", major_b="MN"), 8, ragged="k"
        ),
    ]


# ---- Other architectures ----


@dataclass(frozen=True)
class GroupedSm80Config:
    """The launch configuration on mma.sync: one block for each tile that the groups may have."""

    problem: GroupedProblem
    tiles: Sm80Config

    @property
    def num_blocks(self) -> int:
        """Blocks of the grid; with ragged m, each group may add one partly filled tile."""
        tiles, groups = self.tiles, self.problem.groups
        if self.problem.ragged == "k":
            return groups * tiles.num_blocks
        return (tiles.tiles_m + groups) * tiles.tiles_n

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        tiles, problem = self.tiles, self.problem
        defines = (
            *tiles.defines,
            ("RAGGED", problem.ragged.upper()),
            ("GROUPS", max_groups(problem.groups)),
        )
        entry = "grouped_gemm_sm80"
        return KernelSpec(f"gemm/{entry}.cu", entry, defines, tiles.threads, tiles.shared_bytes)


def plan_grouped_sm80(problem: GroupedProblem, aligned: bool, num_sms: int) -> GroupedSm80Config:
    """Tiles of 128 x 128, or of 64 x 64 if groups are short or large tiles would leave SMs idle.

    aligned: whether rows of the operands can be copied 16 bytes at a time.
    """
    large, small = (
        GroupedSm80Config(problem, Sm80Config(problem.product, tile, aligned)) for tile in (128, 64)
    )
    short = problem.ragged == "m" and problem.rows_each <= small.tiles.tile
    return small if short or large.num_blocks < num_sms else large
