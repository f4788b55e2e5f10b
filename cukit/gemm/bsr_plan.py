"""Plans of block-sparse products: tilings, and which block of the grid computes which tiles."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from cukit.core.device import Device
from cukit.core.kernel import KernelSpec

HostArray = np.ndarray[Any, Any]

_ITEM_BYTES = 2
_THREADS_SM90 = 384
_CONSUMERS = 2
_BOX = 64  # rows and columns of a piece on its way to memory


@dataclass(frozen=True)
class BsrTiling:
    """How the Hopper kernels cut the result into tiles: block rows by columns."""

    block: int
    columns: int
    tile_k: int
    num_stages: int

    @property
    def width(self) -> int:
        """Columns of one consumer warpgroup."""
        return self.columns // (_CONSUMERS * _BOX // self.block)

    @property
    def shared_bytes(self) -> int:
        """The stages of both operands, and pieces of the result on their way to memory."""
        stages = self.num_stages * (self.block + self.columns) * self.tile_k
        buffers = 2 if self.width > _BOX else 1
        return _ITEM_BYTES * (stages + _CONSUMERS * buffers * _BOX * _BOX)


TILINGS = {
    64: (BsrTiling(64, 512, 32, 5), BsrTiling(64, 256, 64, 4), BsrTiling(64, 128, 64, 7)),
    128: (BsrTiling(128, 256, 64, 4), BsrTiling(128, 128, 64, 6)),
}
"""By block size, widest first."""


@dataclass(frozen=True)
class BsrMatmulConfig:
    """How one sparse times dense product runs on Hopper."""

    dtype: str
    tiling: BsrTiling
    sparse_transposed: bool
    dense_transposed: bool
    out_transposed: bool

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        defines = (
            *_tiling_defines(self.dtype, self.tiling),
            ("SPARSE_TRANSPOSED", self.sparse_transposed),
            ("DENSE_TRANSPOSED", self.dense_transposed),
            ("OUT_TRANSPOSED", self.out_transposed),
        )
        return _spec("bsr_matmul_sm90", defines, self.tiling)


def _tiling_defines(dtype: str, tiling: BsrTiling) -> tuple[tuple[str, Any], ...]:
    return (
        ("DTYPE", dtype),
        ("BLOCK", tiling.block),
        ("COLUMNS", tiling.columns),
        ("TILE_K", tiling.tile_k),
        ("STAGES", tiling.num_stages),
        ("THREADS", _THREADS_SM90),
    )


def _spec(entry: str, defines: tuple[tuple[str, Any], ...], tiling: BsrTiling) -> KernelSpec:
    return KernelSpec(f"gemm/{entry}.cu", entry, defines, _THREADS_SM90, tiling.shared_bytes)


def choose_tiling(block: int, block_rows: int, columns: int, num_sms: int) -> BsrTiling:
    """The widest tiles of which there are two for each SM; else the narrowest.

    Wide tiles read each stored block least often; with few of them, some SMs would be idle.
    """
    *wide, narrowest = TILINGS[block]
    for tiling in wide:
        if block_rows * -(-columns // tiling.columns) >= 2 * num_sms:
            return tiling
    return narrowest


def deal_tiles(items: HostArray, costs: HostArray, num_blocks: int) -> HostArray:
    """Gives tiles to the blocks of a grid, so that all end at about the same time.

    items: int32 [tiles, 4]: what a block has to know of a tile; costs: int [tiles]: in any unit. Each
    tile goes to the block that is free first, in the order given.

    Returns int32 [turns, blocks, 4]: what each block does at each turn; a first number of -1 says
    that nothing is left. At most `num_blocks` blocks.
    """
    num_blocks = max(1, min(num_blocks, len(items)))
    turns = np.zeros(num_blocks, np.int64)
    places = np.empty((len(items), 2), np.int64)
    free = [(0, block) for block in range(num_blocks)]
    for index, cost in enumerate(costs.tolist()):
        at, block = free[0]
        places[index] = turns[block], block
        turns[block] += 1
        heapq.heapreplace(free, (at + cost, block))
    work = np.full((int(turns.max(initial=0)) + 1, num_blocks, 4), -1, np.int32)
    work[places[:, 0], places[:, 1]] = items
    return work


def matmul_work(indptr: HostArray, columns: int, tiling: BsrTiling, device: Device) -> HostArray:
    """The tiles of a sparse times dense product, dealt out: block row, first column, and entries
    from and to. A row without blocks has one entry, which follows all others.

    Tiles of the same columns come one after another, the longest rows first: those that run at one
    time then read the same columns of the dense matrix, and the last are short.
    """
    counts = np.diff(indptr)
    rows = np.argsort(-counts, kind="stable")
    starts = np.arange(0, columns, tiling.columns)
    items = np.empty((starts.size, rows.size, 4), np.int32)
    items[..., 0] = rows
    items[..., 1] = starts[:, None]
    items[..., 2] = np.where(counts[rows], indptr[rows], indptr[-1])
    items[..., 3] = np.where(counts[rows], indptr[rows + 1], indptr[-1] + 1)
    costs = np.tile(counts[rows] + _EPILOGUE_BLOCKS * 64 // tiling.block, starts.size)
    return deal_tiles(items.reshape(-1, 4), costs, device.num_sms)


_EPILOGUE_BLOCKS = 2
"""Time of a tile's epilogue, in products of a block of 64."""


@dataclass(frozen=True)
class BsrSampledConfig:
    """How one sampled product runs on Hopper."""

    dtype: str
    tiling: BsrTiling
    a_transposed: bool
    b_transposed: bool

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        defines = (
            *_tiling_defines(self.dtype, self.tiling),
            ("A_TRANSPOSED", self.a_transposed),
            ("B_TRANSPOSED", self.b_transposed),
        )
        return _spec("bsr_sampled_sm90", defines, self.tiling)


def choose_sampled_tiling(indptr: HostArray, block: int) -> BsrTiling:
    """The tiling whose tiles have the fewest columns together; of equals, the widest."""
    counts = np.diff(indptr)

    def columns(tiling: BsrTiling) -> float:
        tiles = -(-counts // (tiling.columns // block))
        return float(tiles.sum() * tiling.columns * _COLUMN_COST[tiling.width])

    return min(TILINGS[block], key=columns)


_COLUMN_COST = {256: 1.0, 128: 1.1, 64: 1.7}
"""Time of a column of a tile, by the columns of a consumer: narrow products wait for operand a."""


def sampled_work(indptr: HostArray, k: int, tiling: BsrTiling, device: Device) -> HostArray:
    """The tiles of a sampled product, dealt out: block row, first block, number of blocks, steps.

    A block row is cut into as few tiles as there can be, of about as many blocks each.
    """
    most = tiling.columns // tiling.block
    counts = np.diff(indptr)
    pieces = -(-counts // most)
    rows = np.repeat(np.arange(counts.size), pieces)
    within = np.arange(rows.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = counts[rows] * within // pieces[rows]
    end = counts[rows] * (within + 1) // pieces[rows]
    steps = np.full(rows.size, -(-k // tiling.tile_k))
    items = np.stack([rows, indptr[rows] + first, end - first, steps], axis=1).astype(np.int32)
    return deal_tiles(items, np.ones(rows.size, np.int64), device.num_sms)
