"""How attention of float8 inputs cuts its work on Hopper."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache

from cukit.core.compiler import KernelSpec
from cukit.core.device import Device

_ARCH = "sm_90"
_GROUP = 128  # threads of a warpgroup
_MOST_GRID = 65535  # of the second and third axis
_RAW_STAGES = 2  # of values on their way to being transposed

WIDTHS = (64, 128, 256)
"""Widths of a tile: a head of any other size is padded with zeros to the next one."""


@dataclass(frozen=True)
class Float8Problem:
    """What a plan needs to know of the arguments."""

    batch: int
    seq_len_q: int
    seq_len_kv: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    out_dtype: str
    causal: bool
    precise: bool = False
    """Probabilities of sixteen bits."""

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def width(self) -> int:
        """Width of the tiles."""
        return next(width for width in WIDTHS if self.head_dim <= width)


@dataclass(frozen=True)
class Float8Tiling:
    """A block walks over tiles of 64 queries for each of its consumers, and in each over tile_n
    keys at a time."""

    consumers: int
    """Warpgroups that multiply; one more copies."""
    tile_n: int
    kept_tiles: int
    """Tiles of keys that the tensor core adds up before their sum is kept elsewhere; 0: all."""
    query_stages: int = 2
    num_stages: int = 2
    prepares: bool = False
    """Every block prepares the values it reads, tile by tile, instead of a kernel before it."""
    halves: bool = False
    """Values are widened to float16, probabilities rounded to that."""

    @property
    def tile_m(self) -> int:
        """Queries of a tile."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return _GROUP * (self.consumers + 1)

    def shared_bytes(self, width: int) -> int:
        """The stages of Q, of K and of V, what is kept of every thread: its sums as bfloat16, and
        two maxima."""
        key_tiles = (2 + self.halves) * self.num_stages + _RAW_STAGES * self.prepares
        rows = self.query_stages * self.tile_m + key_tiles * self.tile_n
        kept = _GROUP * self.consumers * (width // 2 * 2 + 2 * 4) if self.kept_tiles else 0
        return width * rows + kept


TILINGS = {
    64: Float8Tiling(3, 160, 6),
    128: Float8Tiling(2, 224, 4),
    256: Float8Tiling(2, 128, 8, query_stages=1),
}
SHORT_TILINGS = {
    64: Float8Tiling(2, 128, 7, prepares=True),
    128: Float8Tiling(2, 160, 6, prepares=True),
}
"""Where few tiles of queries read the same values, a pass over those before would not pay."""

PRECISE_TILINGS = {
    64: Float8Tiling(3, 128, 0, halves=True),
    128: Float8Tiling(2, 128, 0, halves=True),
    256: Float8Tiling(2, 96, 0, query_stages=1, halves=True),
}
PRECISE_SHORT_TILINGS = {
    64: Float8Tiling(2, 128, 0, prepares=True, halves=True),
    128: Float8Tiling(2, 128, 0, prepares=True, halves=True),
}

FEW_READERS = 8


@dataclass(frozen=True)
class Float8Config:
    """How one call runs: the values are transposed first, unless the main kernel does that too."""

    problem: Float8Problem
    tiling: Float8Tiling
    num_blocks: int
    """Blocks of the main grid: they walk over the tiles (kernels_cu/attention/query_tiles.cuh)."""

    @property
    def kv_tiles(self) -> int:
        """Tiles of keys of a head."""
        return -(-self.problem.seq_len_kv // self.tiling.tile_n)

    @property
    def values_grid(self) -> tuple[int, int, int]:
        """A block for each tile of values."""
        return self.kv_tiles, self.problem.num_heads_kv, self.problem.batch

    @property
    def values_bytes(self) -> int:
        """Of the prepared values."""
        tiles, heads, batch = self.values_grid
        item_bytes = 1 + self.tiling.halves
        return item_bytes * batch * heads * tiles * self.tiling.tile_n * self.problem.width

    def values_spec(self) -> KernelSpec:
        """The kernel that prepares the values."""
        width, tile_n = self.problem.width, self.tiling.tile_n
        entry = "flash_attention_fp8_values"
        halves = self.tiling.halves
        defines = (
            ("HEAD_DIM", width),
            ("TILE_N", tile_n),
            ("HALVES", halves),
            ("THREADS", _GROUP),
        )
        shared = (2 + halves) * tile_n * width
        return KernelSpec(f"attention/{entry}.cu", entry, defines, _GROUP, shared)

    def spec(self) -> KernelSpec:
        """The kernel that attends."""
        problem, tiling = self.problem, self.tiling
        entry = "flash_attention_fp8_sm90"
        defines = (
            ("DTYPE", problem.out_dtype),
            ("HEAD_DIM", problem.width),
            ("PADDED", problem.head_dim != problem.width),
            ("CAUSAL", problem.causal),
            ("CONSUMERS", tiling.consumers),
            ("TILE_N", tiling.tile_n),
            ("STAGES", tiling.num_stages),
            ("QUERY_STAGES", tiling.query_stages),
            ("KEPT_TILES", tiling.kept_tiles),
            ("PREPARES", tiling.prepares),
            ("HALVES", tiling.halves),
            ("THREADS", tiling.threads),
        )
        shared = tiling.shared_bytes(problem.width)
        return KernelSpec(f"attention/{entry}.cu", entry, defines, tiling.threads, shared)


def covers(problem: Float8Problem, device: Device) -> bool:
    """Whether the kernels serve this problem on this device. Rows are whole 16-byte chunks."""
    sizes = (problem.batch, problem.seq_len_q, problem.seq_len_kv, problem.num_heads_q)
    grid = max(problem.batch, problem.num_heads_kv)
    return (
        device.arch == _ARCH
        and min(sizes) > 0
        and grid <= _MOST_GRID
        and problem.head_dim % 16 == 0
        and problem.head_dim <= WIDTHS[-1]
    )


@cache
def plan_float8(problem: Float8Problem, device: Device) -> Float8Config:
    """The configuration of a problem that the kernels cover."""
    tiling = choose_tiling(problem)
    tiles = -(-problem.seq_len_q // tiling.tile_m)
    pieces = -(-tiles // 2) if problem.causal else tiles
    blocks = min(problem.batch * problem.num_heads_q * pieces, device.num_sms)
    return Float8Config(problem, tiling, blocks)


def choose_tiling(problem: Float8Problem) -> Float8Tiling:
    """The tiling of a problem."""
    short = (PRECISE_SHORT_TILINGS if problem.precise else SHORT_TILINGS).get(problem.width)
    if short is not None:
        readers = -(-problem.seq_len_q // short.tile_m) * problem.group
        if readers <= FEW_READERS:
            return short
    return (PRECISE_TILINGS if problem.precise else TILINGS)[problem.width]


def float8_specs(device: Device) -> list[KernelSpec]:
    """The variants of every width with and without a mask, long sequences and short ones, precise
    and not, and one padded head and one float16."""
    if device.arch != _ARCH:
        return []
    many = Float8Problem(4, 4096, 4096, 8, 8, 128, "bfloat16", True)
    problems = [
        replace(many, head_dim=width, causal=causal, precise=precise)
        for width, causal, precise in itertools.product(WIDTHS, (False, True), (False, True))
    ]
    problems += [replace(each, seq_len_q=128, seq_len_kv=128) for each in problems if each.causal]
    problems += [replace(many, head_dim=80), replace(many, out_dtype="float16")]
    specs = []
    for problem in problems:
        config = plan_float8(problem, device)
        specs += [config.spec()] + ([] if config.tiling.prepares else [config.values_spec()])
    return list(dict.fromkeys(specs))
