"""How a product with a quantised weight runs: a pure choice from shapes, dtypes and device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from cukit.core.compiler import KernelSpec
from cukit.core.device import KIB
from cukit.gemm.weight_only_layout import BLOCK_COLUMNS, BLOCK_ROWS, WeightDescription

__all__ = ["WeightOnlyConfig", "plan_weight_only"]

_WARPGROUP = 128
_MOST_TOKENS = 128
_TOKEN_STEP = 16
_FEW_TOKENS = 16
"""Up to so many, four consumers share a tile of x: more warps to decode."""
_MOST_STAGES = 12
_MAPPED_TOKENS = 64
_ORDERED_TOKENS = 64
_ROW_ELEMENTS = 8  # rows of a tensor map are multiples of 16 bytes
_SHARED_BYTES = 226 * KIB
_STAGE_ALIGNMENT = 1024


@dataclass(frozen=True)
class WeightOnlyConfig:
    """How one call runs."""

    dtype: str
    weight: WeightDescription
    tokens: int
    """Of a tile."""
    consumers: int
    """Warpgroups that multiply, with 64 rows of the weight each."""
    mapped_out: bool
    """Whether TMA stores the result."""
    ordered: bool
    """Whether the consumers issue their products in turns."""
    num_stages: int
    num_blocks: int
    """Blocks of the persistent grid."""
    group: int
    """Rows of tiles that are walked over together."""
    whole_tiles: int
    """Tiles that one block computes alone."""
    shared_tiles: int
    """Tiles whose steps all blocks share."""

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage: x, then the blocks of the weight."""
        return _stage_bytes(self.tokens, self.consumers, self.weight)

    @property
    def piece_bytes(self) -> int:
        """Scratch memory for pieces of tiles: two places a block."""
        if not self.shared_tiles:
            return 0
        return 2 * self.num_blocks * self.consumers * BLOCK_ROWS * self.tokens * 4

    @property
    def counters(self) -> int:
        """Counters of pieces that have arrived."""
        return self.shared_tiles * self.consumers

    @property
    def x_columns(self) -> int:
        """Columns of x that a row of 128 bytes in shared memory holds."""
        return 128 // _x_bytes(self.weight)

    @property
    def piece_tokens(self) -> int:
        """Tokens that TMA stores at a time."""
        return _piece_tokens(self.tokens)

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        threads = _WARPGROUP * (self.consumers + 1)
        defines = (
            ("DTYPE", self.dtype),
            ("FLOAT8", int(self.weight.float8)),
            ("BITS", self.weight.dtype.bits),
            ("GROUP", self.weight.group_size or 0),
            ("ZERO_POINTS", int(self.weight.has_zero_points)),
            ("SCALE", self.weight.scale_dtype.name),
            ("TOKENS", self.tokens),
            ("CONSUMERS", self.consumers),
            ("MAPPED_OUT", int(self.mapped_out)),
            ("ORDERED", int(self.ordered)),
            ("STAGES", self.num_stages),
            ("THREADS", threads),
        )
        entry = "weight_only_sm90"
        shared = self.num_stages * self.stage_bytes
        shared += _staging_bytes(self.tokens, self.consumers) if self.mapped_out else 0
        return KernelSpec(f"gemm/{entry}.cu", entry, defines, threads, shared)


def _x_bytes(weight: WeightDescription) -> int:
    """Of an element of x."""
    return 1 if weight.float8 else 2


def _stage_bytes(tokens: int, consumers: int, weight: WeightDescription) -> int:
    used = tokens * BLOCK_COLUMNS * _x_bytes(weight) + consumers * weight.block_bytes
    return -(-used // _STAGE_ALIGNMENT) * _STAGE_ALIGNMENT


def _piece_tokens(tokens: int) -> int:
    return math.gcd(tokens, 64)


def _staging_bytes(tokens: int, consumers: int) -> int:
    return consumers * _piece_tokens(tokens) * BLOCK_ROWS * 2


@cache
def plan_weight_only(
    tokens: int,
    weight: WeightDescription,
    dtype: str,
    num_sms: int,
    tile_tokens: int = 0,
    consumers: int = 0,
    share: int = -1,
) -> WeightOnlyConfig:
    """Tiles of equal numbers of tokens, the fewest that hold 128 each; see `WeightOnlyConfig`.

    Tiles that leave multiprocessors idle in a last round are cut along k instead, unless adding the
    pieces up takes longer than the round that is saved.
    """
    if not tile_tokens:
        across = -(-tokens // _MOST_TOKENS)
        tile_tokens = -(-tokens // (across * _TOKEN_STEP)) * _TOKEN_STEP
    if not consumers:
        consumers = 4 if tile_tokens <= _FEW_TOKENS else 2
    rows = consumers * BLOCK_ROWS
    tiles_n = -(-tokens // tile_tokens)
    tiles = -(-weight.shape[0] // rows) * tiles_n
    blocks = min(num_sms, tiles * weight.steps)
    left = tiles % blocks
    shared = left if left and _sharing_pays(tile_tokens, consumers, weight, left, blocks) else 0
    if share >= 0:
        shared = left if share else 0
    # A tile of x has bytes_x / bytes_w times the bytes of one of the weight; the tiles in flight read
    # the fewest where rows * bytes_w equals columns * bytes_x.
    mapped_out = tile_tokens >= _MAPPED_TOKENS and weight.shape[0] % _ROW_ELEMENTS == 0
    room = _SHARED_BYTES - (_staging_bytes(tile_tokens, consumers) if mapped_out else 0)
    ratio = tile_tokens * 8 * _x_bytes(weight) / (rows * weight.dtype.bits)
    group = max(1, round((blocks * ratio) ** 0.5))
    return WeightOnlyConfig(
        dtype,
        weight,
        tile_tokens,
        consumers,
        mapped_out,
        consumers == 2 and tile_tokens >= _ORDERED_TOKENS,
        min(_MOST_STAGES, room // _stage_bytes(tile_tokens, consumers, weight)),
        blocks if shared else min(blocks, tiles),
        min(group, -(-weight.shape[0] // rows)),
        tiles - shared,
        shared,
    )


_BYTES_A_CYCLE = 18  # of device memory, a multiprocessor's share on an H200
_PIECE_BYTES_A_CYCLE = 24  # of L2
_ARRIVAL_CYCLES = 3000


def _sharing_pays(
    tokens: int, consumers: int, weight: WeightDescription, left: int, blocks: int
) -> bool:
    """Whether cutting the last `left` tiles among `blocks` saves time."""
    products = consumers * 2 * tokens * _x_bytes(weight)  # cycles of the tensor cores in a step
    step = max(products, consumers * weight.block_bytes // _BYTES_A_CYCLE)
    saved = (weight.steps - -(-left * weight.steps // blocks)) * step
    piece = consumers * BLOCK_ROWS * tokens * 4
    return saved > _ARRIVAL_CYCLES + 4 * piece // _PIECE_BYTES_A_CYCLE
