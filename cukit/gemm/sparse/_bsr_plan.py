"""Plans of block-sparse products: the choice of kernel and tiling. Needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cukit.core.arrays import HostArray
from cukit.core.compiler import MacroValue
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec

TILE_SM80 = 128
"""Rows and columns of a tile of the sm80 kernels."""

_HOPPER = "sm_90"
_ITEM_BYTES = 2
_CONSUMERS = 2
_BOX = 64  # rows and columns that one TMA store writes
_WARPGROUP_ROWS = 64  # m of a wgmma
_ROW_ELEMENTS = 64  # 16-bit elements of a 128-byte row
_THREADS_SM90 = 384
_THREADS_SM80 = 256
_STAGES_SM80 = 3
_STAGE_BYTES_SM80 = 2 * TILE_SM80 * 64 * _ITEM_BYTES


@dataclass(frozen=True)
class BsrTiling:
    """A tile of the Hopper kernels: block rows by columns.

    block: the pattern's block size.
    columns: columns of a tile; tile_k: extent of a k step.
    """

    block: int
    columns: int
    tile_k: int
    num_stages: int
    cluster: int = 1
    """Thread blocks per cluster; their tiles are horizontally adjacent and share each tile of the
    sparse operand."""

    @property
    def part_k(self) -> int:
        """Extent along k of the part of a stage that belongs to one entry."""
        return min(self.tile_k, self.block)

    @property
    def stage_entries(self) -> int:
        """Entries that share a stage."""
        return self.tile_k // self.part_k

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return max(self.block, _WARPGROUP_ROWS)

    @property
    def slots(self) -> int:
        """Block rows of a tile."""
        return self.rows // self.block

    @property
    def width(self) -> int:
        """Columns of a tile per consumer warpgroup."""
        return self.columns // (_CONSUMERS * _WARPGROUP_ROWS // self.rows)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: stages of both operands, and buffers for TMA stores."""
        stages = self.num_stages * (self.rows + self.columns) * self.tile_k
        buffers = 2 if self.width > _BOX else 1
        return _ITEM_BYTES * (stages + _CONSUMERS * buffers * _BOX * _BOX)


TILINGS = {
    16: (BsrTiling(16, 512, 32, 5), BsrTiling(16, 256, 32, 8)),
    32: (BsrTiling(32, 512, 32, 5), BsrTiling(32, 256, 32, 8)),
    64: (BsrTiling(64, 512, 32, 5), BsrTiling(64, 256, 64, 4), BsrTiling(64, 128, 64, 7)),
    128: (
        BsrTiling(128, 256, 64, 4, cluster=2),
        BsrTiling(128, 256, 64, 4),
        BsrTiling(128, 128, 64, 6),
    ),
}
"""Tilings of sparse times dense, by block size, widest first. Clusters gain 5 % where the sparse
block is a third of a stage's bytes, and nothing where it is a ninth."""

SAMPLED_TILINGS = {
    block: (
        BsrTiling(block, 512, 32, 5),
        BsrTiling(block, 256, 64, 4),
        BsrTiling(block, 128, 64, 7),
    )
    for block in (16, 32, 64)
} | {128: TILINGS[128][1:]}
"""Tilings of sampled products, by block size."""

SLOTS_SM90 = {block: tilings[0].slots for block, tilings in TILINGS.items()}
"""Block rows of a tile, by block size."""


_RATES = {16: (369e6, 228e6), 32: (510e6, 406e6), 64: (480e6, 447e6), 128: (600e6, 600e6)}
"""FLOPs per microsecond of the Hopper kernel's tiles, by block size, for a plain and a transposed
dense operand: measured on an H200 with random patterns of density 0.1, 8192 x 8192 times 4096
columns."""

_DENSE_RATE = 850e6
_EXPANSION_BYTES = 1.8e6
"""Bytes of the expanded matrix that are written per microsecond."""
_EXPANSION_US = 15.0
"""Launch overhead of an expansion, which rules it out for small matrices."""


def prefers_dense(
    entries: int, block: int, m: int, n: int, k: int, *, dense_transposed: bool = False
) -> bool:
    """Whether a dense product of the expanded operand [m, k] with n columns is faster.

    entries: block columns in which a group of block rows has a block, summed over the groups.
    """
    rows = max(block, _WARPGROUP_ROWS)
    sparse_us = 2.0 * entries * rows * block * n / _RATES[block][dense_transposed]
    dense_us = 2.0 * m * n * k / _DENSE_RATE + _ITEM_BYTES * m * k / _EXPANSION_BYTES
    return sparse_us > dense_us + _EXPANSION_US


class Transposed(NamedTuple):
    """Which matrices of out = sparse @ dense are given transposed."""

    sparse: bool
    dense: bool
    out: bool


@dataclass(frozen=True)
class BsrMatmulConfig:
    """The launch configuration of a product sparse @ dense."""

    dtype: str
    block: int
    transposed: Transposed
    tiling: BsrTiling | None
    """Tiling of the Hopper kernel; None selects the sm80 kernel."""
    wide_box: bool = False
    """Whether one TMA box has all columns of a consumer warpgroup. Small boxes are limited by the
    rate at which TMA starts copies."""

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        flags = {
            f"{name.upper()}_TRANSPOSED": value for name, value in self.transposed._asdict().items()
        }
        if self.tiling is not None:
            flags["BOX"] = self.wide_box
        return _spec("bsr_matmul", self.dtype, self.block, self.tiling, flags)


@dataclass(frozen=True)
class BsrSampledConfig:
    """The launch configuration of a sampled product: a dense product, computed only in the blocks
    of a pattern."""

    dtype: str
    block: int
    a_transposed: bool
    b_transposed: bool
    tiling: BsrTiling | None
    """As in BsrMatmulConfig."""

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        flags = {"A_TRANSPOSED": self.a_transposed, "B_TRANSPOSED": self.b_transposed}
        return _spec("bsr_sampled", self.dtype, self.block, self.tiling, flags)


def _spec(
    op: str, dtype: str, block: int, tiling: BsrTiling | None, flags: dict[str, bool]
) -> KernelSpec:
    common: tuple[tuple[str, MacroValue], ...] = (
        ("DTYPE", dtype),
        ("BLOCK", block),
        *flags.items(),
    )
    if tiling is None:
        defines = (*common, ("STAGES", _STAGES_SM80), ("THREADS", _THREADS_SM80))
        shared_bytes = _STAGES_SM80 * _STAGE_BYTES_SM80
        return KernelSpec(f"gemm/{op}_sm80.cu", f"{op}_sm80", defines, _THREADS_SM80, shared_bytes)
    defines = (
        *common,
        ("COLUMNS", tiling.columns),
        ("TILE_K", tiling.tile_k),
        ("STAGES", tiling.num_stages),
        ("CLUSTER", tiling.cluster),
        ("THREADS", _THREADS_SM90),
    )
    shared_bytes = tiling.shared_bytes
    return KernelSpec(f"gemm/{op}_sm90.cu", f"{op}_sm90", defines, _THREADS_SM90, shared_bytes)


def plan_bsr_matmul(
    block: int, block_rows: int, n: int, dtype: str, transposed: Transposed, device: Device
) -> BsrMatmulConfig:
    """On Hopper, the widest tiling with at least two tiles per SM, else the narrowest.

    With wider tiles, each stored block is read fewer times, and with clusters fewer still. Too few
    tiles would leave SMs idle, as would clusters that are partly outside the result. A transposed
    dense operand is read in rows of tile_k elements, which must be at least as long as a block's
    rows, up to 128 bytes.

    block_rows, n: of the product sparse @ dense.
    """
    tiling = None
    if device.arch == _HOPPER:
        row = min(block, _ROW_ELEMENTS) if transposed.dense else 0
        *wide, tiling = (each for each in TILINGS[block] if each.tile_k >= row)
        for candidate in reversed(wide):
            tiles = -(-n // candidate.columns)
            full_clusters = tiles % candidate.cluster == 0
            if full_clusters and block_rows // candidate.slots * tiles >= 2 * device.num_sms:
                tiling = candidate
    wide_box = tiling is not None and not transposed.dense and n % _BOX == 0
    return BsrMatmulConfig(dtype, block, transposed, tiling, wide_box)


def plan_bsr_sampled(
    starts: HostArray,
    block: int,
    dtype: str,
    a_transposed: bool,
    b_transposed: bool,
    device: Device,
) -> BsrSampledConfig:
    """On Hopper, the tiling with the least estimated time, unused columns of its tiles included.

    starts: entries before each group of `SLOTS_SM90[block]` block rows.
    """

    def columns(tiling: BsrTiling) -> float:
        tiles = -(-np.diff(starts) // (tiling.columns // block))
        return float(tiles.sum() * tiling.columns * _COLUMN_COST[tiling.width])

    tiling = min(SAMPLED_TILINGS[block], key=columns) if device.arch == _HOPPER else None
    return BsrSampledConfig(dtype, block, a_transposed, b_transposed, tiling)


_COLUMN_COST = {256: 1.0, 128: 1.1, 64: 1.7}
"""Relative time per column of a tile, by columns per consumer; loads of a limit narrow tiles."""
