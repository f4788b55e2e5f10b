"""Plans of the indexer KL: the kernel variants for a problem and a device.

The sweep is the kernel that computes all scores, in blocks of one query tile and one span of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cukit.attention.flash._flash_tilings import (
    BOX_COLUMNS,
    ITEM_BYTES,
    KEY_WIDTHS,
    RESERVED_BYTES,
    WARP,
)
from cukit.attention.flash._problem import (
    AttentionProblem,
    Defines,
    ceil_div,
    common_defines,
    feature_defines,
    width_for,
)
from cukit.core.compiler import KernelSpec
from cukit.core.device import Device
from cukit.errors import UnsupportedDeviceError

_ROWS_PER_WARP = 16
_MARK_THREADS = 128
_SUM_THREADS = 256
_SUM_ELEMENTS = 8  # per thread
_SPAN_KEYS = 256
"""Minimum number of keys per span, the keys of one block of the sweep."""
_MAX_SPANS = 32
"""Maximum spans per query tile in the forward, which writes statistics per span and query."""
_KEY_WAVES = 2
"""Waves of blocks in the key-gradient kernel: two, as a causal mask makes some blocks short."""
_MAX_SPLITS = 16
_SCRATCH_BYTES = 1 << 27
"""Limit of the derivatives or selection bits of a chunk of queries; a single tile may exceed it."""


@dataclass(frozen=True)
class IndexerTiling:
    """Tile sizes of the three kernels that share scratch memory."""

    tile_m: int
    """Queries per block of the sweep and of the query-gradient kernel."""
    tile_n: int
    """Keys per step of the sweep."""
    key_tile: int
    """Keys per block of the key-gradient kernel."""
    tile_q: int
    """Queries per step of the key-gradient kernel."""
    query_n: int
    """Keys per step of the query-gradient kernel."""
    blocks_per_sm: int = 1
    """Blocks of the sweep per SM."""
    wgmma: bool = False
    """Whether the sweep uses wgmma."""

    def sweep_bytes(self, width: int) -> int:
        """Bytes of shared memory of the sweep: two stages of queries and of keys."""
        if self.wgmma:
            width = ceil_div(width, BOX_COLUMNS) * BOX_COLUMNS
        return 2 * ITEM_BYTES * width * (self.tile_m + self.tile_n)

    def query_bytes(self, width: int) -> int:
        """The same for the query-gradient kernel: queries, two stages of keys and derivatives."""
        columns = width * (self.tile_m + 2 * self.query_n) + 2 * self.tile_m * self.query_n
        return ITEM_BYTES * columns

    def key_bytes(self, width: int) -> int:
        """The same for the key-gradient kernel: keys, two stages of queries and derivatives."""
        columns = width * (self.key_tile + 2 * self.tile_q) + 2 * self.tile_q * self.key_tile
        return ITEM_BYTES * columns


TILINGS: dict[int, tuple[IndexerTiling, ...]] = {
    128: (IndexerTiling(128, 64, 128, 64, 64),),
    256: (IndexerTiling(128, 32, 128, 32, 32), IndexerTiling(64, 32, 64, 32, 32)),
}
"""Keyed by the larger head_dim of teacher and student; the first that fits is used."""

WARPGROUP_INDEXER_TILINGS: dict[int, IndexerTiling] = {
    128: IndexerTiling(128, 128, 128, 64, 64, wgmma=True),
    256: IndexerTiling(128, 64, 128, 32, 32, wgmma=True),
}
"""The first choice on Hopper, with twice the keys per step, because each step reads the queries of
every head again."""


@dataclass(frozen=True)
class IndexerConfig:
    """The configuration of the divergence or, with `gradient`, of its gradients."""

    problem: AttentionProblem
    """The student's attention, with the teacher in place of v."""
    width: int
    value_width: int
    tiling: IndexerTiling
    gradient: bool
    selected: bool
    """Whether the divergence is over selected keys of each query, given by their indices."""
    num_sms: int

    @property
    def tiles(self) -> int:
        """Query tiles of all sequences."""
        return self.problem.batch * ceil_div(self.problem.seq_len_q, self.tiling.tile_m)

    @property
    def scratch_row(self) -> int:
        """Keys per row of the scratch arrays."""
        return ceil_div(self.problem.seq_len_kv, self.tiling.key_tile) * self.tiling.key_tile

    @property
    def chunk_tiles(self) -> int:
        """Query tiles per launch: all, or the number that fits in the scratch memory."""
        if not (self.gradient or self.selected):
            return max(1, self.tiles)
        item = ITEM_BYTES if self.gradient else 1 / 8
        tile_bytes = self.tiling.tile_m * self.scratch_row * item
        return max(1, min(self.tiles, int(_SCRATCH_BYTES // max(1, tile_bytes))))

    @property
    def chunk_rows(self) -> int:
        """Queries per launch."""
        return self.chunk_tiles * self.tiling.tile_m

    @property
    def span_tiles(self) -> int:
        """Key tiles per block of the sweep."""
        tiles = self.scratch_row // self.tiling.tile_n
        least = _SPAN_KEYS // self.tiling.tile_n
        return least if self.gradient else max(least, ceil_div(tiles, _MAX_SPANS))

    @property
    def spans(self) -> int:
        """Blocks of the sweep per query tile."""
        return max(1, ceil_div(self.scratch_row // self.tiling.tile_n, self.span_tiles))

    @property
    def key_tiles(self) -> int:
        """Key tiles of the key-gradient kernel, of all sequences."""
        return self.problem.batch * ceil_div(self.problem.seq_len_kv, self.tiling.key_tile)

    @property
    def splits(self) -> int:
        """Blocks per key tile, each with some of the heads: enough to fill the GPU."""
        wanted = _KEY_WAVES * self.num_sms // max(1, self.key_tiles)
        return max(1, min(self.problem.num_heads_q, _MAX_SPLITS, wanted))

    def sweep_spec(self) -> KernelSpec:
        """The kernel that computes the terms of the divergence, or the gradient of the scores."""
        width = max(self.width, self.value_width)
        defines = (
            ("TILE_N", self.tiling.tile_n),
            ("BLOCKS_PER_SM", self.tiling.blocks_per_sm),
            ("GRADIENT", self.gradient),
            ("SELECTED", self.selected),
            ("WGMMA", self.tiling.wgmma),
        )
        shared = self.tiling.sweep_bytes(width)
        return self._spec("indexer_kl", "indexer_kl_sweep", shared, more=defines)

    def rows_spec(self) -> KernelSpec:
        """The kernel that computes the divergence from its terms."""
        sweep = self.sweep_spec()
        return KernelSpec(sweep.source, "indexer_kl_rows", sweep.defines, self.tiling.tile_m)

    def query_spec(self) -> KernelSpec:
        """The kernel that computes the gradients of queries and head weights."""
        shared = self.tiling.query_bytes(self.width)
        defines = (("TILE_N", self.tiling.query_n), ("BLOCKS_PER_SM", 1))
        return self._spec("indexer_kl_query_sm80", "indexer_kl_query_sm80", shared, more=defines)

    def key_spec(self) -> KernelSpec:
        """The kernel that computes the gradient of the keys."""
        threads = self.tiling.key_tile // _ROWS_PER_WARP * WARP
        defines = (("TILE_Q", self.tiling.tile_q), ("BLOCKS_PER_SM", 1))
        shared = self.tiling.key_bytes(self.width)
        return self._spec("indexer_kl_key_sm80", "indexer_kl_key_sm80", shared, threads, defines)

    def mark_spec(self) -> KernelSpec:
        """The kernel that computes the bit mask of the selected keys."""
        defines: Defines = (
            ("DTYPE", self.problem.dtype),
            ("TILE_M", self.tiling.tile_m),
            ("THREADS", _MARK_THREADS),
            ("VARLEN", self.problem.varlen),
        )
        source = "attention/indexer_selection.cu"
        return KernelSpec(source, "indexer_selection", defines, _MARK_THREADS)

    def sum_spec(self) -> KernelSpec:
        """The kernel that reduces the splits of the gradient of the keys."""
        defines: Defines = (
            *common_defines(self.problem, self.width, self.value_width),
            ("THREADS", _SUM_THREADS),
            ("LANES", WARP),
            ("QUERY_GRADIENT", False),
            ("TILE_M", self.tiling.tile_m),
            ("VARLEN", False),
        )
        source = "attention/flash_attention_backward_rows.cu"
        return KernelSpec(source, "flash_attention_backward_sum", defines, _SUM_THREADS)

    def sum_blocks(self, elements: int) -> int:
        """Grid size of the kernel that reduces the splits of `elements` elements."""
        return ceil_div(elements, _SUM_ELEMENTS * _SUM_THREADS)

    def specs(self) -> list[KernelSpec]:
        """All kernel variants of this configuration."""
        found = [self.sweep_spec()]
        if self.selected:
            found.append(self.mark_spec())
        if not self.gradient:
            return [*found, self.rows_spec()]
        return [*found, self.query_spec(), self.key_spec(), self.sum_spec()]

    def _spec(
        self, source: str, entry: str, shared: int, threads: int | None = None, more: Defines = ()
    ) -> KernelSpec:
        tiling = self.tiling
        threads = threads or tiling.tile_m // _ROWS_PER_WARP * WARP
        defines: Defines = (
            *common_defines(self.problem, self.width, self.value_width),
            ("CAUSAL", self.problem.causal),
            ("TILE_M", tiling.tile_m),
            ("KEY_TILE", tiling.key_tile),
            ("THREADS", threads),
            *feature_defines(self.problem),
            *more,
        )
        return KernelSpec(f"attention/{source}.cu", entry, defines, threads, shared)


def has_wgmma(device: Device) -> bool:
    """Whether the sweep may use wgmma."""
    return device.arch == "sm_90"


def plan_indexer_kl(
    problem: AttentionProblem, gradient: bool, selected: bool, device: Device
) -> IndexerConfig:
    """The configuration of a call. Raises UnsupportedDeviceError if no tiling fits the device."""
    width, value_width = (width_for(n, KEY_WIDTHS) for n in (problem.head_dim, problem.head_dim_v))
    widest = max(width, value_width)
    tilings = next(each for most, each in TILINGS.items() if widest <= most)
    if has_wgmma(device):
        best = next(each for most, each in WARPGROUP_INDEXER_TILINGS.items() if widest <= most)
        tilings = (best, *tilings)
    for tiling in tilings:
        per_sm = tiling.blocks_per_sm * (tiling.sweep_bytes(widest) + RESERVED_BYTES)
        most = max(f(widest) for f in (tiling.sweep_bytes, tiling.query_bytes, tiling.key_bytes))
        if most <= device.shared_bytes_per_block and per_sm <= device.shared_bytes_per_sm:
            break
    else:
        raise UnsupportedDeviceError(
            f"indexer_kl with head_dim up to {widest} needs {most} bytes of shared memory per "
            f"block, {device.name} has {device.shared_bytes_per_block}"
        )
    return IndexerConfig(
        problem=problem,
        width=width,
        value_width=value_width,
        tiling=tiling,
        gradient=gradient,
        selected=selected,
        num_sms=device.num_sms,
    )


def indexer_specs(
    device: Device, gradient: bool, more: Callable[[], Sequence[KernelSpec]] = tuple
) -> list[KernelSpec]:
    """A representative set of variants: common widths, unequal head_dims, and each option.

    more: returns further variants.
    """
    usual = AttentionProblem(2, 4096, 4096, 32, 1, 128, "bfloat16", True, teacher_group=4)
    problems = [
        (usual, True),
        (usual, False),
        (replace(usual, head_dim=64, causal=False, value_dim=128), False),
        (replace(usual, dtype="float16", value_dim=192), True),
        (replace(usual, head_dim=72, value_dim=64, varlen=True), True),
        (replace(usual, head_dim=256), False),
    ]
    found = [
        spec
        for problem, selected in problems
        for spec in plan_indexer_kl(problem, gradient, selected, device).specs()
    ]
    return [*dict.fromkeys([*found, *more()])]
