"""Plans of products with quantised weights, from shapes, dtypes and device. Needs no GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from cukit.core.compiler import KernelSpec
from cukit.core.device import KIB, Device
from cukit.gemm.quantized.weight_only_layout import BLOCK_COLUMNS, BLOCK_ROWS, WeightDescription

__all__ = ["WeightOnlyConfig", "WeightOnlyTiling", "plan_weight_only"]

_HOPPER = "sm_90"
_WARPGROUP = 128
_TOKEN_STEP = 16
_MAX_TOKENS = 256
_FEWEST_SPLIT_STAGES = 3
_WHOLE_TOKENS = 128
"""The most tokens of a float8 tile that is multiplied as a whole; larger ones are multiplied in two
halves."""
_FOLD_TOKENS = 64
_SHORTEST_GROUP = 32
_FOLD_TOKENS_OF_SHORTEST = 32
"""With more tokens than this (groups of 32) or than _FOLD_TOKENS (longer groups), codes are
multiplied by their scales before the product (`WeightOnlyTiling.fold`)."""
_TILE_ALIGNMENT = 128
_EXPANDED_GROUP = 8  # tile rows; with 16, the first round of tiles needs twice the weight blocks
_EXPANDED_TOKENS = 128
_EXPANDING_BYTES = 7 * KIB  # static shared memory of the warps that expand the weight
FEW_TOKENS = 8
_FEW_ELEMENTS = 2**27
"""For larger weights, weight_only_sm90.cu (tiles of 16 tokens) is faster from three tokens up."""
ROW_ELEMENTS = 8  # rows of a tensor map are multiples of 16 bytes
_RESERVED_BYTES = KIB  # shared memory for barriers and the system


@dataclass(frozen=True)
class WeightOnlyTiling:
    """The tiles of a kernel, and how it computes one."""

    kernel: Literal["sm90", "sm80", "few", "expanded"]
    """weight_only_sm90.cu: TMA and wgmma; _sm80.cu: cp.async and mma.sync; _few.cu: mma.sync with
    codes loaded straight to registers, for up to eight tokens; weight_expanded_sm90.cu: TMA and
    wgmma with a weight that the kernel expands to float8 in memory, for many float8 tokens."""
    tokens: int
    """Tokens of a tile."""
    consumers: int
    """Consumer warpgroups, each with 64 rows of the weight (128 for "expanded")."""
    num_stages: int
    mapped_out: bool = False
    """Whether TMA stores the result."""
    fold: bool = False
    """Whether codes are multiplied by their scales and rounded to the dtype of x before the
    product."""
    blocks_per_sm: int = 1
    strips: int = 0
    """For "few": strips of 16 rows per block."""
    warps: int = 0
    """For "few": warps that divide the columns among them."""
    splits: int = 1
    """Blocks of a cluster that share the k steps of a tile."""

    @property
    def rows(self) -> int:
        """Rows of the weight in a tile."""
        if self.kernel == "expanded":
            return 2 * self.consumers * BLOCK_ROWS
        return 16 * self.strips or self.consumers * BLOCK_ROWS

    @property
    def threads(self) -> int:
        """Threads per block."""
        produces = self.kernel in ("sm90", "expanded")
        return 32 * self.warps or _WARPGROUP * (self.consumers + produces)

    @property
    def piece_tokens(self) -> int:
        """Tokens that one TMA store writes."""
        return math.gcd(self.tokens, 64 if self.tokens <= 128 else 32)

    def stage_bytes(self, weight: WeightDescription) -> int:
        """Shared memory of a stage: a tile of x and blocks of the weight."""
        if self.kernel == "expanded":
            return (self.rows + self.tokens) * BLOCK_COLUMNS + self.rows * 4
        used = self.tokens * BLOCK_COLUMNS * weight.x_bytes + self.consumers * weight.block_bytes
        return -(-used // _TILE_ALIGNMENT) * _TILE_ALIGNMENT if self.kernel == "sm80" else used

    def staging_bytes(self) -> int:
        """Shared memory that stages the result for TMA stores."""
        return self.consumers * self.piece_tokens * BLOCK_ROWS * 2 if self.mapped_out else 0

    def exchange_bytes(self) -> int:
        """Shared memory that receives partial sums from the other blocks of a cluster."""
        slices = math.gcd(self.tokens // 8, self.splits)
        return (self.splits - 1) * self.rows * self.tokens // slices * 4

    def shared_bytes(self, weight: WeightDescription) -> int:
        """Dynamic shared memory per block."""
        stages = self.num_stages * self.stage_bytes(weight)
        return stages + self.staging_bytes() + self.exchange_bytes()


@dataclass(frozen=True)
class WeightOnlyConfig:
    """The launch configuration of one call: a persistent grid, the last tiles split along k."""

    dtype: str
    weight: WeightDescription
    tiling: WeightOnlyTiling
    num_blocks: int
    """Blocks of the persistent grid."""
    raster_group: int
    """Tile rows of a rasterisation group."""
    whole_tiles: int
    """Tiles that one block computes alone; with `splits`, the number of blocks."""
    shared_tiles: int
    """Tiles whose k steps are divided among all blocks."""

    @property
    def piece_bytes(self) -> int:
        """Workspace for partial tiles: two slots per block."""
        tiling = self.tiling
        return 2 * self.num_blocks * tiling.rows * tiling.tokens * 4 if self.shared_tiles else 0

    @property
    def counters(self) -> int:
        """Counters of the partial tiles that have been written."""
        return self.shared_tiles * self.tiling.consumers

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        tiling, weight = self.tiling, self.weight
        defines: tuple[tuple[str, int | str], ...] = (
            ("DTYPE", self.dtype),
            ("FLOAT8", int(weight.float8)),
            ("BITS", weight.dtype.bits),
            ("GROUP", weight.group_size or 0),
            ("ZERO_POINTS", int(weight.has_zero_points)),
            ("SCALE", weight.scale_dtype.name),
            ("FOLD", int(tiling.fold)),
            ("TOKENS", tiling.tokens),
            ("CONSUMERS", tiling.consumers),
            ("THREADS", tiling.threads),
        )
        if tiling.kernel == "few":
            defines += (("STRIPS", tiling.strips),)
        else:
            defines += (("STAGES", tiling.num_stages),)
        if tiling.kernel == "sm90":
            defines += (
                ("MAPPED_OUT", int(tiling.mapped_out)),
                ("SPLITS", tiling.splits),
                ("CLUSTER", tiling.splits),
            )
        if tiling.kernel == "expanded":
            defines += (("PIECE", tiling.piece_tokens),)
            entry = "weight_expanded_sm90"
        else:
            entry = f"weight_only_{tiling.kernel}"
        shared = tiling.shared_bytes(weight)
        return KernelSpec(f"gemm/{entry}.cu", entry, defines, tiling.threads, shared)

    @property
    def expanded_bytes(self) -> int:
        """For "expanded": workspace for the weight as e4m3 codes with float32 scales."""
        weight = self.weight
        return weight.pairs * weight.steps * 2 * BLOCK_ROWS * (BLOCK_COLUMNS + 4)

    @property
    def expanded_counters(self) -> int:
        """For "expanded": a counter of claimed blocks, and one of expanded blocks per tile row
        and step."""
        return 1 + -(-self.weight.shape[0] // self.tiling.rows) * self.weight.steps


@cache
def plan_weight_only(
    tokens: int, weight: WeightDescription, dtype: str, device: Device
) -> WeightOnlyConfig:
    """The configuration with the shortest estimated time."""
    configs = [
        configure(tokens, weight, dtype, device, tiling)
        for tiling in _candidates(tokens, weight, device)
    ]
    return min(configs, key=_cycles)


def _candidates(tokens: int, weight: WeightDescription, device: Device) -> list[WeightOnlyTiling]:
    """The tilings to choose from. All but "expanded" divide the tokens evenly among tiles."""
    n, k = weight.shape
    few = FEW_TOKENS if n * k <= _FEW_ELEMENTS or device.arch != _HOPPER else 2
    if tokens <= few and not weight.float8:
        return [few_tiling(8 // weight.dtype.bits, _few_warps(weight, device))]
    if device.arch != _HOPPER:
        return [sm80_tiling(_tile_tokens(tokens, -(-tokens // 64), _TOKEN_STEP), weight, device)]
    fewest = -(-tokens // _MAX_TOKENS)
    across = range(fewest, fewest + 3) if tokens > 64 else range(1, 3) if tokens > 32 else (1,)
    tilings = [_hopper_candidate(tokens, count, weight, device) for count in across]
    if weight.float8 and weight.group_size == BLOCK_COLUMNS and n % ROW_ELEMENTS == 0:
        tilings.append(expanded_tiling(weight, device))
    return tilings


def _hopper_candidate(
    tokens: int, across: int, weight: WeightDescription, device: Device
) -> WeightOnlyTiling:
    """A tiling with `across` tiles of tokens."""
    tile = _tile_tokens(tokens, across, _TOKEN_STEP)
    if weight.float8 and tile > _WHOLE_TOKENS:
        tile = _tile_tokens(tokens, across, 2 * _TOKEN_STEP)
    shortest = weight.group_size == _SHORTEST_GROUP
    fold = (
        weight.group_size is not None
        and not weight.float8
        and tokens > (_FOLD_TOKENS_OF_SHORTEST if shortest else _FOLD_TOKENS)
    )
    tiles = -(-weight.shape[0] // (2 * BLOCK_ROWS)) * across
    if 2 * tiles <= device.num_sms and weight.steps > 1:
        split = hopper_tiling(tile, 2, weight, device, fold=fold, splits=2)
        if split.num_stages >= _FEWEST_SPLIT_STAGES:
            return split
    return hopper_tiling(tile, 4 if tile <= 32 else 2, weight, device, fold=fold)


def _tile_tokens(tokens: int, across: int, step: int) -> int:
    """Tokens of each of `across` tiles, a multiple of `step`."""
    return -(-tokens // (across * step)) * step


def _few_warps(weight: WeightDescription, device: Device) -> int:
    """Warps per block of "few": 8 for int8. For int4 the most of 16, 8 and 4 with which the grid
    has at most 16 warps per SM, so that all blocks are resident at once; else 2."""
    if weight.dtype.bits == 8:
        return 8
    blocks = -(-weight.shape[0] // 32)
    return next((warps for warps in (16, 8, 4) if blocks * warps <= 16 * device.num_sms), 2)


def hopper_tiling(
    tokens: int,
    consumers: int,
    weight: WeightDescription,
    device: Device,
    *,
    stages: int = 0,
    fold: bool = False,
    splits: int = 1,
) -> WeightOnlyTiling:
    """A tiling for Hopper with the stages that fit, at most `stages`."""
    stages = stages or (6 if tokens <= 32 else 8)
    tiling = WeightOnlyTiling(
        "sm90",
        tokens,
        consumers,
        0,
        mapped_out=tokens >= 64 and weight.shape[0] % ROW_ELEMENTS == 0 and splits == 1,
        fold=fold,
        splits=splits,
    )
    room = device.shared_bytes_per_block - _RESERVED_BYTES
    return replace(tiling, num_stages=_stages(tiling, weight, room, stages))


def expanded_tiling(
    weight: WeightDescription, device: Device, *, tokens: int = _EXPANDED_TOKENS, stages: int = 4
) -> WeightOnlyTiling:
    """A tiling for a weight that is expanded to float8 first."""
    tiling = WeightOnlyTiling("expanded", tokens, 2, 0, mapped_out=True)
    room = device.shared_bytes_per_block - _RESERVED_BYTES - _EXPANDING_BYTES
    return replace(tiling, num_stages=_stages(tiling, weight, room, stages))


def sm80_tiling(
    tokens: int, weight: WeightDescription, device: Device, *, blocks: int = 0, stages: int = 4
) -> WeightOnlyTiling:
    """A tiling for mma.sync with `blocks` blocks per SM; by default two for few tokens."""
    blocks = blocks or (2 if tokens <= 32 else 1)
    tiling = WeightOnlyTiling("sm80", tokens, 2, 0, blocks_per_sm=blocks)
    room = min(device.shared_bytes_per_block, device.shared_bytes_per_sm // blocks)
    return replace(tiling, num_stages=_stages(tiling, weight, room - _RESERVED_BYTES, stages))


def _stages(tiling: WeightOnlyTiling, weight: WeightDescription, room: int, most: int) -> int:
    room -= tiling.staging_bytes() + tiling.exchange_bytes()
    return min(most, room // tiling.stage_bytes(weight))


def few_tiling(strips: int, warps: int) -> WeightOnlyTiling:
    """A tiling for up to eight tokens."""
    return WeightOnlyTiling("few", FEW_TOKENS, 1, 0, strips=strips, warps=warps)


def configure(
    tokens: int,
    weight: WeightDescription,
    dtype: str,
    device: Device,
    tiling: WeightOnlyTiling,
    *,
    share: bool | None = None,
) -> WeightOnlyConfig:
    """A call with this tiling.

    The tiles of an incomplete last round are split along k among all blocks, unless adding up the
    parts is estimated to take longer than that round. `share` overrides this decision.
    """
    tiles_m = -(-weight.shape[0] // tiling.rows)
    if tiling.kernel == "few":
        return WeightOnlyConfig(dtype, weight, tiling, tiles_m, 1, tiles_m, 0)
    tiles = tiles_m * -(-tokens // tiling.tokens)
    if tiling.kernel == "expanded":
        raster_group = min(_EXPANDED_GROUP, tiles_m)
        blocks = min(device.num_sms, tiles)
        return WeightOnlyConfig(dtype, weight, tiling, blocks, raster_group, tiles, 0)
    if tiling.splits > 1:
        raster_group = _choose_raster_group(tiling, weight, tiles, tiles_m)
        blocks = tiles * tiling.splits
        return WeightOnlyConfig(dtype, weight, tiling, blocks, raster_group, blocks, 0)
    blocks = min(device.num_sms * tiling.blocks_per_sm, tiles * weight.steps)
    left = tiles % blocks
    # With fewer steps than blocks, some blocks would have no step.
    possible = left * weight.steps >= blocks
    raster_group = _choose_raster_group(tiling, weight, blocks, tiles_m)
    config = WeightOnlyConfig(dtype, weight, tiling, min(blocks, tiles), raster_group, tiles, 0)
    shared = replace(config, num_blocks=blocks, whole_tiles=tiles - left, shared_tiles=left)
    if share is None:
        share = _cycles(shared) < _cycles(config)
    return shared if share and possible and left else config


def _choose_raster_group(
    tiling: WeightOnlyTiling, weight: WeightDescription, blocks: int, tiles_m: int
) -> int:
    """Tile rows of a group for which tiles in flight read equally many bytes of x and weight."""
    ratio = tiling.tokens * 8 * weight.x_bytes / (tiling.rows * weight.dtype.bits)
    return max(1, min(round(math.sqrt(blocks * ratio)), tiles_m))


# Measured on an H200, in cycles.
_MIN_CYCLES = 300  # per consumer and step: reading and decoding a block of the weight
_STEP_CYCLES = 200  # per step, in addition to the products
_TOKEN_CYCLES = 3.7  # per step and token
_ARRIVAL_CYCLES = 3000
_PIECE_BYTES_PER_CYCLE = 10  # partial tiles, written and read back for the final sum
_EXCHANGE_CYCLES = 1000
_EXCHANGE_BYTES_PER_CYCLE = 16  # through distributed shared memory
_EXPANDED_START_CYCLES = 57_000
_EXPANDED_STEP_CYCLES = 1800
_EXPANDED_END_CYCLES = 2800  # per tile
_EXPANSION_CYCLES = 4200  # per SM and block of the weight


def _cycles(config: WeightOnlyConfig) -> float:
    """The kernel's estimated time in cycles, for choosing among tilings."""
    tiling, steps = config.tiling, config.weight.steps
    if tiling.kernel == "expanded":
        rounds = -(-config.whole_tiles // config.num_blocks)
        products = rounds * (steps * _EXPANDED_STEP_CYCLES + _EXPANDED_END_CYCLES)
        blocks = 2 * config.weight.pairs * steps
        return _EXPANDED_START_CYCLES + max(
            products, blocks * _EXPANSION_CYCLES / config.num_blocks
        )
    consumer = max(_MIN_CYCLES, _STEP_CYCLES + _TOKEN_CYCLES * tiling.tokens)
    step = tiling.consumers * consumer
    if tiling.splits > 1:
        sent = tiling.rows * tiling.tokens * 4 * (tiling.splits - 1) // tiling.splits
        exchange = _EXCHANGE_CYCLES + sent / _EXCHANGE_BYTES_PER_CYCLE
        return -(-steps // tiling.splits) * step + exchange
    cycles = -(-config.whole_tiles // config.num_blocks) * steps * step
    if config.shared_tiles:
        cycles += -(-config.shared_tiles * steps // config.num_blocks) * step
        cycles += _ARRIVAL_CYCLES + tiling.rows * tiling.tokens * 4 / _PIECE_BYTES_PER_CYCLE
    return cycles
