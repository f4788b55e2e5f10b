"""Tile sizes of the attention kernels for each head width, and the shared memory they need.

The tables of class sm80 list tilings in order of preference, as measured on an H200; the first that
fits the GPU is used. Later entries are for GPUs with less shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from cukit.core.device import KIB, Device
from cukit.errors import UnsupportedDeviceError

HEAD_WIDTHS = (64, 96, 128, 192, 256)
"""Tile widths. Heads of other sizes are zero-padded to the next width."""

KEY_WIDTHS = (64, 96, 128, 256)
"""Tile widths of class sm80's backward, whose warps halve the columns of a tile (except at 96)."""

UNEQUAL_KEY_WIDTHS = (64, 128, 256)
"""The same where k and v have different head_dims."""

MAX_HEAD_DIM = HEAD_WIDTHS[-1]

ITEM_BYTES = 2  # float16, bfloat16
FLOAT_BYTES = 4
WARPGROUP_ROWS = 64  # rows of one warpgroup's wgmma
BOX_COLUMNS = 64  # 16-bit columns of a TMA box: rows of 128 swizzled bytes
WARP = 32
RAW_STAGES = 2  # pipeline stages of FP8 V before it is transposed or widened
RESERVED_BYTES = KIB  # shared memory that the driver reserves per block


def _boxed(width: int) -> int:
    """`width`, rounded up to whole TMA boxes of 16-bit columns."""
    return -(-width // BOX_COLUMNS) * BOX_COLUMNS


@dataclass(frozen=True)
class ForwardTiling:
    """A block owns tile_m queries, 16 * m_tiles per warp, and loops over tiles of tile_n keys."""

    tile_m: int
    m_tiles: int
    tile_n: int
    blocks_per_sm: int = 1
    q_in_registers: bool = False

    def shared_bytes(self, width: int, value_width: int) -> int:
        """Bytes of Q and two stages of K and of V; the epilogue reuses all of it for the output."""
        inputs = width * (self.tile_m + 2 * self.tile_n) + value_width * 2 * self.tile_n
        return ITEM_BYTES * max(inputs, value_width * self.tile_m)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.tile_m // (16 * self.m_tiles) * WARP


@dataclass(frozen=True)
class WarpgroupTiling:
    """Hopper's forward: a persistent block loops over query tiles, 64 rows per consumer warpgroup,
    and within each over tiles of tile_n keys."""

    consumers: int
    """Consumer warpgroups, in addition to one producer warpgroup."""
    tile_n: int
    num_stages: int = 2
    query_stages: int = 2
    """With two, the next tile's queries are loaded while the current tile is multiplied."""
    cost: float = 1.0
    """Time per score, relative to the first tiling."""
    ping_pong_cost: float | None = None
    """The same with ping-pong scheduling, in plain causal calls; None: never scheduled that way."""
    blocks_per_sm: int = 1
    biased_tile_n: int | None = None
    """tile_n with a bias, if different: the larger tile would spill registers."""

    def shared_bytes(self, width: int, value_width: int) -> int:
        """Bytes of the stages of Q, K and V, in boxes of 64 columns."""
        columns, value_columns = _boxed(width), _boxed(value_width)
        rows = self.query_stages * self.tile_m + self.num_stages * self.tile_n
        return ITEM_BYTES * (columns * rows + value_columns * self.num_stages * self.tile_n)

    @property
    def tile_m(self) -> int:
        """Queries per tile."""
        return WARPGROUP_ROWS * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 4 * WARP * (self.consumers + 1)


@dataclass(frozen=True)
class Float8Tiling(WarpgroupTiling):
    """The same for FP8 inputs, whose V is prepared for wgmma: transposed or, with FP16
    probabilities, widened to FP16."""

    promotion_interval: int = 0
    """Key tiles after which the FP8 accumulators are added to partial outputs in shared memory
    (DeepSeek-V3's promotion), because the tensor core keeps about 14 bits; 0: never."""
    precise: bool = False
    """P and V are multiplied in FP16."""
    prepares: bool = False
    """Each block prepares the V tiles it reads; otherwise a separate kernel does so beforehand."""

    def value_bytes(self, value_width: int) -> int:
        """Bytes of one prepared V tile."""
        if self.precise:
            return ITEM_BYTES * self.tile_n * _boxed(value_width)
        return value_width * self.tile_n

    def shared_bytes(self, width: int, value_width: int) -> int:
        """Bytes of the stages of Q, K, V as loaded and V as prepared, and the partial outputs."""
        rows = self.query_stages * self.tile_m + self.num_stages * self.tile_n
        stored = float8_box_columns(width) * -(-width // float8_box_columns(width)) * rows
        values = self.num_stages * self.value_bytes(value_width)
        raw = self.prepares * RAW_STAGES * self.raw_bytes(value_width)
        # Per consumer thread: partial outputs as BF16, and two row maxima.
        kept = 4 * WARP * self.consumers * (value_width // 2 * 2 + 2 * 4)
        return stored + raw + values + (kept if self.promotion_interval else 0)

    def raw_bytes(self, value_width: int) -> int:
        """Bytes of one V tile as TMA loads it."""
        columns = float8_box_columns(value_width)
        return columns * -(-value_width // columns) * self.tile_n


def float8_box_columns(width: int) -> int:
    """FP8 columns of a TMA box: rows of 64 or 128 swizzled bytes."""
    return 64 if width <= 64 else 128


@dataclass(frozen=True)
class KeyTiling:
    """Backward: a block owns tile_n keys and loops over tiles of tile_m queries.

    The warps are arranged in score_warps, key_warps and query_warps rows over the products
    queries x keys, keys x head_dim and queries x head_dim; a warp computes its dQ in query_passes
    passes.
    """

    tile_m: int
    tile_n: int
    warps: int
    score_warps: int
    key_warps: int
    query_warps: int
    num_stages: int = 2
    blocks_per_sm: int = 1
    query_passes: int = 1

    def shared_bytes(self, width: int, value_width: int) -> int:
        """Bytes of K, V, the stages of Q and dO, P and dS, and the stages of lse and delta."""
        rows = self.tile_n + self.num_stages * self.tile_m
        tiles = ITEM_BYTES * (width + value_width) * rows
        scores = 2 * ITEM_BYTES * self.tile_m * self.tile_n
        return tiles + scores + 8 * self.num_stages * self.tile_m

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """Macros of the kernel."""
        return (
            ("TILE_M", self.tile_m),
            ("TILE_N", self.tile_n),
            ("STAGES", self.num_stages),
            ("THREADS", self.threads),
            ("BLOCKS_PER_SM", self.blocks_per_sm),
            ("SCORE_WARPS", self.score_warps),
            ("KEY_WARPS", self.key_warps),
            ("QUERY_WARPS", self.query_warps),
            ("QUERY_PASSES", self.query_passes),
        )

    def register_limited(self, width: int) -> KeyTiling:
        """The same with dQ in two passes (fewer registers) if a warp's columns can be halved."""
        columns = width // (self.warps // self.query_warps)
        return replace(self, query_passes=2) if columns % 32 == 0 else self


@dataclass(frozen=True)
class WarpgroupKeyTiling:
    """Hopper's backward: a block owns tile_n keys and loops over tiles of tile_m queries, with one
    producer and two consumer warpgroups."""

    tile_m: int
    tile_n: int
    num_stages: int = 2
    score_tiles: int = 2
    """Tiles of dS (of P where dQ is not accumulated) in shared memory."""
    accumulates_grad_q: bool = True
    """Whether this kernel accumulates dQ too, staged through shared memory."""
    threads: int = 3 * 4 * WARP
    ordered: bool = False
    """Whether blocks add to dQ in a fixed order (deterministic)."""

    def softcapped(self) -> WarpgroupKeyTiling:
        """The same with room for softcap derivatives beside P, in place of a third pipeline stage;
        unchanged if dQ is accumulated."""
        return self if self.accumulates_grad_q else replace(self, num_stages=2, score_tiles=4)

    def shared_bytes(self, width: int, value_width: int) -> int:
        """Bytes of K, V, the stages of Q and dO in boxes of 64 columns, P or dS, and dQ."""
        columns, value_columns = _boxed(width), _boxed(value_width)
        rows = self.tile_n + self.num_stages * self.tile_m
        tiles = ITEM_BYTES * (columns + value_columns) * rows
        scores = self.score_tiles * ITEM_BYTES * self.tile_m * self.tile_n
        widest = max(columns, value_columns)
        return tiles + scores + self.accumulates_grad_q * FLOAT_BYTES * self.tile_m * widest

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """Macros of the kernel."""
        return (
            ("TILE_M", self.tile_m),
            ("TILE_N", self.tile_n),
            ("STAGES", self.num_stages),
            ("THREADS", self.threads),
            ("DETERMINISTIC", int(self.ordered)),
        )


@dataclass(frozen=True)
class WarpgroupQueryTiling:
    """dQ of Hopper's wide heads: a block owns tile_m queries and loops over tiles of tile_n keys,
    with one producer and two consumer warpgroups."""

    tile_m: int = 2 * WARPGROUP_ROWS
    tile_n: int = 64
    key_stages: int = 2
    value_stages: int = 2
    threads: int = 3 * 4 * WARP

    def shared_bytes(self, width: int, value_width: int) -> int:
        """Bytes of Q, dO and the stages of K and V, in boxes of 64 columns."""
        columns, value_columns = _boxed(width), _boxed(value_width)
        rows = self.tile_m + self.key_stages * self.tile_n
        value_rows = self.tile_m + self.value_stages * self.tile_n
        return ITEM_BYTES * (columns * rows + value_columns * value_rows)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """Macros of the kernel."""
        return (
            ("TILE_M", self.tile_m),
            ("TILE_N", self.tile_n),
            ("KEY_STAGES", self.key_stages),
            ("VALUE_STAGES", self.value_stages),
            ("THREADS", self.threads),
        )


@dataclass(frozen=True)
class QueryTiling:
    """Deterministic dQ: a block owns tile_m queries, 16 per warp, and loops over tiles of tile_n
    keys."""

    tile_m: int
    tile_n: int
    blocks_per_sm: int = 1

    def shared_bytes(self, width: int, value_width: int) -> int:
        """Bytes of Q, dO, and two stages of K and of V."""
        return ITEM_BYTES * (width + value_width) * (self.tile_m + 2 * self.tile_n)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.tile_m // 16 * WARP

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """Macros of the kernel."""
        return (
            ("TILE_M", self.tile_m),
            ("TILE_N", self.tile_n),
            ("THREADS", self.threads),
            ("BLOCKS_PER_SM", self.blocks_per_sm),
        )


FORWARD_TILINGS: dict[int, tuple[ForwardTiling, ...]] = {
    64: (ForwardTiling(128, 2, 64, 2, q_in_registers=True),),
    96: (ForwardTiling(128, 2, 64, 2), ForwardTiling(128, 2, 32, 2)),
    128: (
        ForwardTiling(128, 2, 64, 2),
        ForwardTiling(128, 2, 32, 2),
        ForwardTiling(64, 1, 32, 2),
    ),
    192: (ForwardTiling(128, 1, 64), ForwardTiling(64, 1, 32)),
    256: (ForwardTiling(128, 1, 64), ForwardTiling(128, 1, 32), ForwardTiling(64, 1, 32)),
}
# For options that need the row and column of a score in registers.
REGISTER_LIMITED_FORWARD_TILINGS = FORWARD_TILINGS | {
    64: (ForwardTiling(128, 2, 64, 2),),
    96: (ForwardTiling(128, 2, 32, 2),),
    128: (ForwardTiling(128, 2, 32, 2), ForwardTiling(64, 1, 32, 2)),
}
# Keyed by the largest head_dim of k and of v. All of these fit Hopper; the plan picks the one with
# the lowest estimated time. Short tiles leave room for more stages, which four warpgroups need to
# overlap; long tiles need fewer barriers per multiply.
WARPGROUP_TILINGS: dict[tuple[int, int], tuple[WarpgroupTiling, ...]] = {
    (64, 64): (
        WarpgroupTiling(3, 128, num_stages=3),
        WarpgroupTiling(4, 64, num_stages=4, cost=1.04),
        WarpgroupTiling(2, 128, num_stages=3, cost=1.2),
    ),
    (96, 96): (
        WarpgroupTiling(3, 96, num_stages=3, query_stages=1),
        WarpgroupTiling(2, 128, query_stages=1, cost=1.09),
    ),
    (128, 128): (
        WarpgroupTiling(
            2, 128, num_stages=3, query_stages=1, ping_pong_cost=0.97, biased_tile_n=112
        ),
        WarpgroupTiling(3, 64, num_stages=4, query_stages=1, cost=0.975),
    ),
    (192, 128): (WarpgroupTiling(2, 128, query_stages=1, biased_tile_n=96),),
    (192, 192): (WarpgroupTiling(2, 112, query_stages=1, biased_tile_n=80),),
    (256, 256): (
        WarpgroupTiling(2, 80, query_stages=1, biased_tile_n=48),
        WarpgroupTiling(2, 64, query_stages=1, cost=1.02),
    ),
}


# FP8, keyed by the same widths. Tiles are as long as the registers allow. "window_or_varlen" and
# "register_limited" (per-score options) need shorter ones. "short": where few query tiles read the
# same V, a separate kernel that prepares V would take longer than it saves.
FLOAT8_TILINGS: dict[str, dict[tuple[int, int], Float8Tiling]] = {
    "plain": {
        (64, 64): Float8Tiling(3, 160, promotion_interval=6),
        (128, 128): Float8Tiling(2, 224, promotion_interval=4),
        (256, 256): Float8Tiling(2, 128, query_stages=1, promotion_interval=8),
    },
    "window_or_varlen": {
        (64, 64): Float8Tiling(3, 128, promotion_interval=7),
        (128, 128): Float8Tiling(2, 160, promotion_interval=6),
        (256, 256): Float8Tiling(2, 96, query_stages=1, promotion_interval=10),
    },
    "register_limited": {
        (128, 128): Float8Tiling(2, 128, promotion_interval=7),
        (256, 256): Float8Tiling(2, 64, query_stages=1, promotion_interval=16),
    },
    "short": {
        (64, 64): Float8Tiling(2, 128, promotion_interval=7, prepares=True),
        (128, 128): Float8Tiling(2, 128, num_stages=3, promotion_interval=7, prepares=True),
    },
}
PRECISE_TILINGS: dict[str, dict[tuple[int, int], Float8Tiling]] = {
    "plain": {
        (64, 64): Float8Tiling(3, 128, precise=True),
        (128, 128): Float8Tiling(2, 128, precise=True),
        (256, 256): Float8Tiling(2, 96, query_stages=1, precise=True),
    },
    "register_limited": {
        (128, 128): Float8Tiling(2, 128, precise=True),
        (256, 256): Float8Tiling(2, 64, query_stages=1, precise=True),
    },
    "short": {
        (128, 128): Float8Tiling(2, 128, precise=True, prepares=True),
    },
}

Entry = TypeVar("Entry")


def entry_for(table: dict[tuple[int, int], Entry], width: int, value_width: int) -> Entry | None:
    """The first entry whose head_dims of k and v are at least these."""
    for (max_width, max_value_width), entry in table.items():
        if width <= max_width and value_width <= max_value_width:
            return entry
    return None


def warpgroup_tilings(width: int, value_width: int) -> tuple[WarpgroupTiling, ...]:
    """The tilings for these head_dims of k and v, each at most 256."""
    tilings = entry_for(WARPGROUP_TILINGS, width, value_width)
    if tilings is None:
        raise ValueError(f"no tiling for widths {width} and {value_width}")
    return tilings


WARPGROUP_KEY_TILINGS: dict[int, WarpgroupKeyTiling] = {
    64: WarpgroupKeyTiling(128, 128),
    128: WarpgroupKeyTiling(64, 128),
    192: WarpgroupKeyTiling(64, 64, num_stages=3, score_tiles=3, accumulates_grad_q=False),
    256: WarpgroupKeyTiling(64, 64, accumulates_grad_q=False),
}
NARROW_STUDENT_TILING = WarpgroupKeyTiling(96, 128)
"""For the divergence of a student of up to 64 columns from a wider teacher."""
LONG_KEY_WIDTH = 128
LONG_KEY_TILING = WarpgroupKeyTiling(80, 128)
"""For LONG_KEY_WIDTH: fewer shared-memory reads per query, but more fully masked rows."""
WARPGROUP_QUERY_TILINGS: dict[int, WarpgroupQueryTiling] = {
    192: WarpgroupQueryTiling(key_stages=3),
    256: WarpgroupQueryTiling(value_stages=1),
}
KEY_TILINGS: dict[int, tuple[KeyTiling, ...]] = {
    64: (KeyTiling(128, 128, 8, 4, 4, 4), KeyTiling(64, 128, 8, 2, 4, 2)),
    96: (
        KeyTiling(64, 64, 4, 2, 4, 4, 2, 2),
        KeyTiling(64, 64, 4, 2, 4, 4, 1, 2),
        KeyTiling(64, 64, 4, 2, 4, 4, 2, 1),
    ),
    128: (
        KeyTiling(64, 64, 4, 2, 2, 2, 2, 2),
        KeyTiling(64, 128, 8, 2, 4, 2),
        KeyTiling(64, 64, 8, 2, 4, 2, 1),
    ),
    256: (
        KeyTiling(64, 64, 8, 4, 4, 2, query_passes=2),
        KeyTiling(64, 64, 8, 4, 4, 2, 1, query_passes=2),
        KeyTiling(32, 32, 4, 2, 2, 2, 1, query_passes=2),
    ),
}
QUERY_TILINGS: dict[int, tuple[QueryTiling, ...]] = {
    64: (QueryTiling(128, 64),),
    96: (QueryTiling(128, 64),),
    128: (QueryTiling(128, 64), QueryTiling(64, 32)),
    256: (QueryTiling(128, 32), QueryTiling(64, 32), QueryTiling(64, 16)),
}

Tiling = TypeVar("Tiling", ForwardTiling, KeyTiling, QueryTiling)


def first_fit(tilings: Sequence[Tiling], width: int, value_width: int, device: Device) -> Tiling:
    """The first tiling whose blocks_per_sm blocks fit in the shared memory of an SM."""
    for tiling in tilings:
        needed = tiling.shared_bytes(width, value_width)
        per_sm = tiling.blocks_per_sm * (needed + RESERVED_BYTES)
        if needed <= device.shared_bytes_per_block and per_sm <= device.shared_bytes_per_sm:
            return tiling
    smallest = min(tiling.shared_bytes(width, value_width) for tiling in tilings)
    raise UnsupportedDeviceError(
        f"attention with head_dim up to {max(width, value_width)} needs {smallest} bytes of "
        f"shared memory per block, {device.name} has {device.shared_bytes_per_block}"
    )
