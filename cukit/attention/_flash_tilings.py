"""How the attention kernels may cut their work, per width of head, and what each cut needs.

The tables list tilings from the preferred one down: the first that fits a GPU is taken. They were
ordered by measurement on an H200; the later entries serve GPUs with less shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from cukit.core.device import KIB, Device
from cukit.errors import UnsupportedDeviceError

HEAD_WIDTHS = (64, 96, 128, 192, 256)
"""Widths of a tile: a head of any other size is padded with zeros to the next one."""

KEY_WIDTHS = (64, 96, 128, 256)
"""Those of class sm80's backward, whose warps cut the columns of a tile in halves, except 96."""

UNLIKE_KEY_WIDTHS = (64, 128, 256)
"""The same where the heads of k and of v are not alike."""

MAX_HEAD_DIM = HEAD_WIDTHS[-1]

ITEM_BYTES = 2  # float16, bfloat16
FLOAT_BYTES = 4
WARPGROUP_ROWS = 64  # queries of a warpgroup of Hopper's forward
PART = 64  # columns that the copy engine brings at once: rows of 128 swizzled bytes
_WARP = 32
RAW_STAGES = 2  # of float8 values on their way to being prepared
_RESERVED_BYTES = KIB  # what the system takes of each block's shared memory


@dataclass(frozen=True)
class ForwardTiling:
    """A block takes tile_m queries, 16 * m_tiles a warp, and walks over tile_n keys at a time."""

    tile_m: int
    m_tiles: int
    tile_n: int
    blocks_per_sm: int = 1
    q_in_registers: bool = False

    def shared_bytes(self, width: int, value_width: int) -> int:
        """Q, and two stages of K and of V; at the end the output, over all of them."""
        inputs = width * (self.tile_m + 2 * self.tile_n) + value_width * 2 * self.tile_n
        return ITEM_BYTES * max(inputs, value_width * self.tile_m)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.tile_m // (16 * self.m_tiles) * _WARP


@dataclass(frozen=True)
class WarpgroupTiling:
    """Hopper's forward: a block walks over tiles of 64 queries for each of its consumers, and in
    each over tile_n keys at a time."""

    consumers: int
    """Warpgroups that multiply; one more copies."""
    tile_n: int
    num_stages: int = 2
    query_stages: int = 2
    """With two, the next tile's queries come while this one's are multiplied."""
    cost: float = 1.0
    """Time of a score, as a multiple of the first tiling's."""
    turn_cost: float | None = None
    """The same of plain causal calls, where consumers multiply in turns; None: they never do."""
    blocks_per_sm: int = 1
    biased_tile_n: int | None = None
    """tile_n where a bias is added, if not the same: its registers would be spilled."""

    def shared_bytes(self, width: int, value_width: int) -> int:
        """The stages of Q, of K and of V, in parts of 64 columns."""
        columns, value_columns = (-(-each // PART) * PART for each in (width, value_width))
        rows = self.query_stages * self.tile_m + self.num_stages * self.tile_n
        return ITEM_BYTES * (columns * rows + value_columns * self.num_stages * self.tile_n)

    @property
    def tile_m(self) -> int:
        """Queries of a tile."""
        return WARPGROUP_ROWS * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 4 * _WARP * (self.consumers + 1)


@dataclass(frozen=True)
class Float8Tiling(WarpgroupTiling):
    """The same for float8 inputs, whose values are prepared: transposed or, for probabilities of
    sixteen bits, widened."""

    kept_tiles: int = 0
    """Tiles of keys that the tensor core adds up before their sum is kept elsewhere; 0: all."""
    precise: bool = False
    """Probabilities and values are multiplied as float16."""
    prepares: bool = False
    """Every block prepares the values it reads, tile by tile, instead of a kernel before it."""

    def value_bytes(self, value_width: int) -> int:
        """A tile of prepared values."""
        if self.precise:
            return ITEM_BYTES * self.tile_n * (-(-value_width // PART) * PART)
        return value_width * self.tile_n

    def shared_bytes(self, width: int, value_width: int) -> int:
        """The stages of Q, of K, of V as it comes and of V as it is multiplied."""
        rows = self.query_stages * self.tile_m + self.num_stages * self.tile_n
        stored = float8_part(width) * -(-width // float8_part(width)) * rows
        values = self.num_stages * self.value_bytes(value_width)
        raw = self.prepares * RAW_STAGES * self.raw_bytes(value_width)
        # Of every consumer's thread: its sums as bfloat16, and two maxima.
        kept = 4 * _WARP * self.consumers * (value_width // 2 * 2 + 2 * 4)
        return stored + raw + values + (kept if self.kept_tiles else 0)

    def raw_bytes(self, value_width: int) -> int:
        """A tile of values as the copy engine brings it."""
        part = float8_part(value_width)
        return part * -(-value_width // part) * self.tile_n


def float8_part(width: int) -> int:
    """Columns of eight bits that the copy engine brings at once: rows of 64 or 128 swizzled
    bytes."""
    return 64 if width <= 64 else 128


@dataclass(frozen=True)
class KeyTiling:
    """Backward: a block takes tile_n keys and walks over tile_m queries at a time.

    The warps split queries x keys, keys x head_dim and queries x head_dim into score_warps,
    key_warps and query_warps rows; a warp computes its dQ in query_passes parts.
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
        """K, V, stages of Q and dO, P and dS, stages of lse and delta."""
        rows = self.tile_n + self.num_stages * self.tile_m
        tiles = ITEM_BYTES * (width + value_width) * rows
        scores = 2 * ITEM_BYTES * self.tile_m * self.tile_n
        return tiles + scores + 8 * self.num_stages * self.tile_m

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * _WARP

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

    def crowded(self, width: int) -> KeyTiling:
        """The same with dQ in two parts, if a warp's columns can be parted: fewer registers."""
        columns = width // (self.warps // self.query_warps)
        return replace(self, query_passes=2) if columns % 32 == 0 else self


@dataclass(frozen=True)
class WarpgroupKeyTiling:
    """Hopper's backward: a block takes tile_n keys and walks over tile_m queries at a time; one
    warpgroup copies, two multiply."""

    tile_m: int
    tile_n: int
    num_stages: int = 2
    score_tiles: int = 2
    """Of dS or, where dQ is not summed up, of P, in shared memory."""
    sums_queries: bool = True
    """Whether dQ is summed up too, and leaves through shared memory."""
    threads: int = 3 * 4 * _WARP
    in_turn: bool = False
    """Whether blocks add to dQ in a fixed order."""

    def softcapped(self) -> WarpgroupKeyTiling:
        """The same where derivatives of the scores lie beside P: they take the place of a stage."""
        return self if self.sums_queries else replace(self, num_stages=2, score_tiles=4)

    def shared_bytes(self, width: int, value_width: int) -> int:
        """K, V, stages of Q and dO, P or dS, in parts of 64 columns, and dQ."""
        columns, value_columns = (-(-each // PART) * PART for each in (width, value_width))
        rows = self.tile_n + self.num_stages * self.tile_m
        tiles = ITEM_BYTES * (columns + value_columns) * rows
        scores = self.score_tiles * ITEM_BYTES * self.tile_m * self.tile_n
        widest = max(columns, value_columns)
        return tiles + scores + self.sums_queries * FLOAT_BYTES * self.tile_m * widest

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """Macros of the kernel."""
        return (
            ("TILE_M", self.tile_m),
            ("TILE_N", self.tile_n),
            ("STAGES", self.num_stages),
            ("THREADS", self.threads),
            ("DETERMINISTIC", int(self.in_turn)),
        )


@dataclass(frozen=True)
class WarpgroupQueryTiling:
    """dQ of Hopper's wide heads: a block takes tile_m queries and walks over tile_n keys; one
    warpgroup copies, two multiply."""

    tile_m: int = 2 * WARPGROUP_ROWS
    tile_n: int = 64
    key_stages: int = 2
    value_stages: int = 2
    threads: int = 3 * 4 * _WARP

    def shared_bytes(self, width: int, value_width: int) -> int:
        """Q, dO, the stages of K and of V, in parts of 64 columns."""
        columns, value_columns = (-(-each // PART) * PART for each in (width, value_width))
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
    """Deterministic dQ: a block takes tile_m queries, 16 a warp, and walks over tile_n keys."""

    tile_m: int
    tile_n: int
    blocks_per_sm: int = 1

    def shared_bytes(self, width: int, value_width: int) -> int:
        """Q, dO, and two stages of K and of V."""
        return ITEM_BYTES * (width + value_width) * (self.tile_m + 2 * self.tile_n)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.tile_m // 16 * _WARP

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
# For options that ask for a score's row and column, which takes registers that the others lack.
CROWDED_FORWARD_TILINGS = FORWARD_TILINGS | {
    64: (ForwardTiling(128, 2, 64, 2),),
    96: (ForwardTiling(128, 2, 32, 2),),
    128: (ForwardTiling(128, 2, 32, 2), ForwardTiling(64, 1, 32, 2)),
}
# By the most columns of a key and of a value. Of these the tiling that leaves least work is taken:
# they all fit Hopper. Short tiles have room for more stages, which four warpgroups need to drift
# apart; long ones multiply with fewer stops.
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
        WarpgroupTiling(2, 128, num_stages=3, query_stages=1, turn_cost=0.97, biased_tile_n=112),
        WarpgroupTiling(3, 64, num_stages=4, query_stages=1, cost=0.975),
    ),
    (192, 128): (WarpgroupTiling(2, 128, query_stages=1, biased_tile_n=96),),
    (192, 192): (WarpgroupTiling(2, 112, query_stages=1, biased_tile_n=80),),
    (256, 256): (
        WarpgroupTiling(2, 80, query_stages=1, biased_tile_n=48),
        WarpgroupTiling(2, 64, query_stages=1, cost=1.02),
    ),
}


# Float8, by the same widths. Tiles are as long as the registers allow; sequences of any lengths and
# windows ("busy") ask for shorter ones, and so do options that change single scores ("crowded").
# "short": where few tiles of queries read the same values, a pass over those before would not pay.
FLOAT8_TILINGS: dict[str, dict[tuple[int, int], Float8Tiling]] = {
    "plain": {
        (64, 64): Float8Tiling(3, 160, kept_tiles=6),
        (128, 128): Float8Tiling(2, 224, kept_tiles=4),
        (256, 256): Float8Tiling(2, 128, query_stages=1, kept_tiles=8),
    },
    "busy": {
        (64, 64): Float8Tiling(3, 128, kept_tiles=7),
        (128, 128): Float8Tiling(2, 160, kept_tiles=6),
        (256, 256): Float8Tiling(2, 96, query_stages=1, kept_tiles=10),
    },
    "crowded": {
        (128, 128): Float8Tiling(2, 128, kept_tiles=7),
        (256, 256): Float8Tiling(2, 64, query_stages=1, kept_tiles=16),
    },
    "short": {
        (64, 64): Float8Tiling(2, 128, kept_tiles=7, prepares=True),
        (128, 128): Float8Tiling(2, 128, num_stages=3, kept_tiles=7, prepares=True),
    },
}
PRECISE_TILINGS: dict[str, dict[tuple[int, int], Float8Tiling]] = {
    "plain": {
        (64, 64): Float8Tiling(3, 128, precise=True),
        (128, 128): Float8Tiling(2, 128, precise=True),
        (256, 256): Float8Tiling(2, 96, query_stages=1, precise=True),
    },
    "crowded": {
        (128, 128): Float8Tiling(2, 128, precise=True),
        (256, 256): Float8Tiling(2, 64, query_stages=1, precise=True),
    },
    "short": {
        (128, 128): Float8Tiling(2, 128, precise=True, prepares=True),
    },
}

Entry = TypeVar("Entry")


def entry_for(table: dict[tuple[int, int], Entry], width: int, value_width: int) -> Entry | None:
    """The entry of the narrowest widths of keys and values that hold these."""
    for (most, most_values), entry in table.items():
        if width <= most and value_width <= most_values:
            return entry
    return None


def warpgroup_tilings(width: int, value_width: int) -> tuple[WarpgroupTiling, ...]:
    """The tilings for keys and values of these widths, each at most 256."""
    tilings = entry_for(WARPGROUP_TILINGS, width, value_width)
    if tilings is None:
        raise ValueError(f"no tiling for widths {width} and {value_width}")
    return tilings


WARPGROUP_KEY_TILINGS: dict[int, WarpgroupKeyTiling] = {
    64: WarpgroupKeyTiling(128, 128),
    128: WarpgroupKeyTiling(64, 128),
    192: WarpgroupKeyTiling(64, 64, num_stages=3, score_tiles=3, sums_queries=False),
    256: WarpgroupKeyTiling(64, 64, sums_queries=False),
}
LONG_KEY_WIDTH = 128
LONG_KEY_TILING = WarpgroupKeyTiling(80, 128)
"""For heads of this width: fewer reads of shared memory a query, more queries that see no key."""
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
    """The first tiling whose blocks_per_sm blocks fit the shared memory of an SM of `device`."""
    for tiling in tilings:
        needed = tiling.shared_bytes(width, value_width)
        per_sm = tiling.blocks_per_sm * (needed + _RESERVED_BYTES)
        if needed <= device.shared_bytes_per_block and per_sm <= device.shared_bytes_per_sm:
            return tiling
    smallest = min(tiling.shared_bytes(width, value_width) for tiling in tilings)
    raise UnsupportedDeviceError(
        f"attention with head_dim up to {max(width, value_width)} needs {smallest} bytes of "
        f"shared memory a block, {device.name} has {device.shared_bytes_per_block}"
    )
