"""Plans of kernel class sm90 (wgmma, TMA), forward and backward, for Hopper.

Other GPUs, and problems that this class does not cover, use class sm80 (:mod:`_flash_plan`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from cukit.attention.flash._flash_plan import (
    FlashAttentionBackwardConfig,
    choose_raster_group,
    choose_splits,
    plan_flash_attention_backward,
)
from cukit.attention.flash._flash_tilings import (
    BOX_COLUMNS,
    FLOAT8_TILINGS,
    FLOAT_BYTES,
    ITEM_BYTES,
    LONG_KEY_TILING,
    LONG_KEY_WIDTH,
    MAX_HEAD_DIM,
    NARROW_STUDENT_TILING,
    PRECISE_TILINGS,
    WARP,
    WARPGROUP_KEY_TILINGS,
    WARPGROUP_QUERY_TILINGS,
    WARPGROUP_ROWS,
    Float8Tiling,
    WarpgroupKeyTiling,
    WarpgroupTiling,
    entry_for,
    float8_box_columns,
    warpgroup_tilings,
)
from cukit.attention.flash._problem import (
    FLOAT8,
    AttentionProblem,
    Defines,
    ceil_div,
    feature_defines,
    width_for,
)
from cukit.core.compiler import KernelSpec
from cukit.core.device import Device

_ARCH = "sm_90"
_STEP = 16  # K of one 16-bit wgmma
_FLOAT8_STEP = 32
_FLOAT8_ALIGNMENT = 16  # columns: TMA needs rows of whole 16-byte chunks
_VALUES_THREADS = 128
_PREPARE_IN_BLOCK_MAX_TILES = 8
"""Each block prepares V itself if at most this many query tiles read the same V."""
_SEQUENCE_THREADS = 1024
_LIST_THREADS = 128
_NARROW, _WIDE = 96, 192  # columns of V
_LONG_TILE, _SHORT_TILE = 128, 64  # keys
_COLUMNS = 32  # granularity at which the backward skips padding columns
_LONG_QUERY_TILE_MIN_QUERIES = 8192
"""In a causal call, the backward's long query tiles are faster from this many queries on."""
_LONG_QUERY_TILE_FEATURES = frozenset({"value_dim", "sinks"})
"""Features that leave enough registers for long query tiles."""
_WAVES = 4  # minimum work items per SM, where splits allow, so that SMs finish together

BlockSize = tuple[int, int]
"""Queries and keys per block of a block mask."""


@dataclass(frozen=True)
class WarpgroupForwardConfig:
    """The configuration of a forward call."""

    problem: AttentionProblem
    tiling: WarpgroupTiling
    num_sms: int
    """SMs of the device; each runs one persistent block."""
    block_size: BlockSize | None = None
    """Block size of the block mask, if there is one."""

    def num_blocks(self, seq_len_q: int) -> int:
        """The grid size: persistent blocks (kernels_cu/attention/query_work.cuh)."""
        problem = self.problem
        items = items_per_head(problem, self.tiling, seq_len_q, self.block_size is not None)
        return min(problem.batch * problem.num_heads_q * items, self.num_sms)

    @property
    def ping_pong(self) -> bool:
        """Whether the consumers are scheduled ping-pong."""
        return self.block_size is None and _runs_ping_pong(self.problem, self.tiling)

    @property
    def width(self) -> int:
        """head_dim of q and k, rounded up to whole wgmma steps."""
        step = _FLOAT8_STEP if self.problem.float8 else _STEP
        return ceil_div(self.problem.head_dim, step) * step

    @property
    def value_width(self) -> int:
        """head_dim of v, rounded up to whole wgmma steps."""
        return ceil_div(self.problem.head_dim_v, _STEP) * _STEP

    def box_columns(self, width: int) -> int:
        """Columns of a TMA box of q and k, or of v."""
        return float8_box_columns(width) if self.problem.float8 else BOX_COLUMNS

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        tiling, problem = self.tiling, self.problem
        defines: Defines = (
            ("DTYPE", problem.result_dtype),
            ("HEAD_DIM", self.width),
            ("VALUE_DIM", self.value_width),
            ("VALUE_PADDED", problem.head_dim_v != self.value_width),
            ("CAUSAL", problem.causal),
            ("CONSUMERS", tiling.consumers),
            ("TILE_N", tiling.tile_n),
            ("STAGES", tiling.num_stages),
            ("QUERY_STAGES", tiling.query_stages),
            ("THREADS", tiling.threads),
            ("BLOCKS_PER_SM", tiling.blocks_per_sm),
            *feature_defines(problem),
            *self._block_defines(),
            *self._float8_defines(),
            *((("PING_PONG", True),) if self.ping_pong else ()),
        )
        entry = "flash_attention_sm90"
        shared = tiling.shared_bytes(self.width, self.value_width)
        return KernelSpec(f"attention/{entry}.cu", entry, defines, tiling.threads, shared)

    def plan_spec(self) -> KernelSpec | None:
        """The scheduling kernel for variable-length sequences or a block mask, which runs first;
        else None."""
        tiling = self.tiling
        if self.problem.varlen:
            return sequences_spec(tiling.tile_m)
        if self.block_size is None:
            return None
        defines: Defines = (
            ("DTYPE", self.problem.dtype),
            ("HEAD_DIM", self.width),
            ("PADDED", False),
            ("CAUSAL", self.problem.causal),
            ("TILE_M", tiling.tile_m),
            ("TILE_N", tiling.tile_n),
            ("THREADS", _LIST_THREADS),
            *((name, value) for name, value in feature_defines(self.problem) if name == "WINDOW"),
            *self._block_defines(),
        )
        return KernelSpec("attention/plan_blocks.cu", "plan_blocks", defines, _LIST_THREADS)

    def plan_size(self, seq_len_q: int, seq_len_kv: int, mask_heads: int = 1) -> int:
        """int32 elements of the schedule."""
        if self.problem.varlen:
            return sequences_plan_size(self.problem.batch)
        entries = 1 + ceil_div(seq_len_kv, self.tiling.tile_n)
        return 1 + mask_heads * ceil_div(seq_len_q, self.tiling.tile_m) * entries

    def plan_blocks(self, seq_len_q: int, mask_heads: int = 1) -> int:
        """Grid size of the scheduling kernel."""
        if self.problem.varlen:
            return 1
        tiles = mask_heads * ceil_div(seq_len_q, self.tiling.tile_m)
        return ceil_div(tiles, _LIST_THREADS // WARP)

    def value_tiles(self, rows_kv: int) -> int:
        """Tiles of prepared V per KV head.

        rows_kv: keys of a sequence, or of all sequences if they are packed; each sequence starts at
        a new tile (kernels_cu/attention/float8_values.cuh).
        """
        batch, tile = self.problem.batch, self.tiling.tile_n
        return rows_kv // tile + batch if self.problem.varlen else batch * ceil_div(rows_kv, tile)

    def values_spec(self) -> KernelSpec | None:
        """The kernel that prepares V of FP8 inputs; None if the forward kernel prepares V."""
        tiling = self.tiling
        if not isinstance(tiling, Float8Tiling) or tiling.prepares:
            return None
        entry = "flash_attention_fp8_values"
        defines: Defines = (
            ("VALUE_DIM", self.value_width),
            ("TILE_N", tiling.tile_n),
            ("PRECISE", tiling.precise),
            ("VARLEN", self.problem.varlen),
            ("THREADS", _VALUES_THREADS),
        )
        shared = tiling.raw_bytes(self.value_width) + tiling.value_bytes(self.value_width)
        return KernelSpec(f"attention/{entry}.cu", entry, defines, _VALUES_THREADS, shared)

    def _float8_defines(self) -> Defines:
        tiling = self.tiling
        if not isinstance(tiling, Float8Tiling):
            return ()
        return (
            ("FLOAT8", True),
            ("PRECISE", tiling.precise),
            ("PREPARES", tiling.prepares),
            ("PROMOTION_INTERVAL", tiling.promotion_interval),
        )

    def _block_defines(self) -> Defines:
        if self.block_size is None:
            return ()
        rows, columns = self.block_size
        return ("BLOCK_SPARSE", True), ("BLOCK_Q", rows), ("BLOCK_KV", columns)


def sequences_spec(tile_rows: int, *, paged: bool = False) -> KernelSpec:
    """The kernel that sorts variable-length sequences and prefix-sums their tile counts.

    paged: their keys are in a paged cache.
    """
    defines: Defines = (("TILE_M", tile_rows), ("THREADS", _SEQUENCE_THREADS))
    if paged:
        defines += (("PAGED", True),)
    entry = "plan_sequences"
    return KernelSpec(f"attention/{entry}.cu", entry, defines, _SEQUENCE_THREADS)


def sequences_plan_size(batch: int) -> int:
    """int32 elements of the schedule of variable-length sequences."""
    return 2 * batch + 2


def covers(problem: AttentionProblem, device: Device) -> bool:
    """Whether class sm90 has a kernel for this problem on this device.

    Arrays must not be empty, and rows of FP8 inputs must be whole 16-byte chunks.
    """
    sizes = (problem.batch, problem.seq_len_q, problem.seq_len_kv, problem.num_heads_q)
    if device.arch != _ARCH or min(sizes) == 0:
        return False
    widths = (problem.head_dim, problem.head_dim_v)
    return not problem.float8 or (
        max(widths) <= MAX_HEAD_DIM and all(width % _FLOAT8_ALIGNMENT == 0 for width in widths)
    )


def _cost(problem: AttentionProblem, tiling: WarpgroupTiling, num_sms: int) -> float:
    """Relative time: scores of the largest work item, in whole tiles, times the number of waves.

    For variable-length sequences, the scores of all work items, because there are many items. Each
    warpgroup stops at the last key visible to its own queries; a warpgroup without queries idles.
    """
    tile, groups = tiling.tile_n, range(0, problem.seq_len_q, WARPGROUP_ROWS)
    keys = 0
    for row in groups:
        first, last = _visible_keys(problem, row, min(row + WARPGROUP_ROWS, problem.seq_len_q) - 1)
        keys += (ceil_div(last, tile) - first // tile) * tile
    tiles = ceil_div(problem.seq_len_q, tiling.tile_m)
    cost = tiling.cost
    if tiling.ping_pong_cost is not None and _runs_ping_pong(problem, tiling):
        cost = tiling.ping_pong_cost
    scores = cost * tiles * tiling.tile_m * keys / len(groups)
    if problem.varlen:
        return scores
    items = items_per_head(problem, tiling, problem.seq_len_q)
    largest = min(1.0, (1 if items == tiles else 2) / tiles)
    return scores * largest * ceil_div(problem.batch * problem.num_heads_q * items, num_sms)


def _runs_ping_pong(problem: AttentionProblem, tiling: WarpgroupTiling) -> bool:
    """Whether ping-pong scheduling is used: in causal calls without per-score options, where it was
    measured to be faster."""
    plain = problem.features <= {"sinks", "value_dim"}
    return tiling.ping_pong_cost is not None and problem.causal and plain


def _visible_keys(problem: AttentionProblem, first_row: int, last_row: int) -> tuple[int, int]:
    """The range of keys visible to any of these queries: the first key, and one past the last."""
    causal_offset = problem.seq_len_kv - problem.seq_len_q
    window = problem.window or (None, None)
    left, right = window[0], 0 if problem.causal else window[1]
    end = problem.seq_len_kv if right is None else last_row + causal_offset + right + 1
    end = max(1, min(end, problem.seq_len_kv))
    begin = 0 if left is None else first_row + causal_offset - left
    return max(0, min(begin, end - 1)), end


def items_per_head(
    problem: AttentionProblem, tiling: WarpgroupTiling, seq_len_q: int, scheduled: bool = False
) -> int:
    """Work items per head: query tiles or, with a causal mask alone, balanced pairs of tiles.

    scheduled: a scheduling kernel assigns the tiles.
    """
    tiles = ceil_div(seq_len_q, tiling.tile_m)
    pairs = problem.causal and problem.window is None and not problem.varlen and not scheduled
    return ceil_div(tiles, 2) if pairs else tiles


def plan_flash_attention_sm90(
    problem: AttentionProblem, device: Device, block_size: BlockSize | None = None
) -> WarpgroupForwardConfig:
    """The forward's configuration of a problem that the class covers."""
    num_sms = device.num_sms
    tilings = tilings_of(problem, block_size)
    tiling = min(tilings, key=lambda each: _cost(problem, each, num_sms))
    return WarpgroupForwardConfig(problem, tiling, num_sms, block_size)


def tilings_of(
    problem: AttentionProblem, block_size: BlockSize | None = None
) -> tuple[WarpgroupTiling, ...]:
    """The candidate tilings.

    Per-score options and block masks leave registers for two consumer warpgroups only and, with a
    wide V, not for long tiles. Packed sequences with a wide V also use two, because the rows of V
    after the end of a sequence are zeroed. Blocks of fewer than 128 keys use short tiles, of which
    more can be skipped.
    """
    if problem.float8:
        return (_float8_tiling(problem),)
    tilings = warpgroup_tilings(problem.head_dim, problem.head_dim_v)
    if _per_score(problem) or block_size is not None:
        tiling = next(each for each in tilings if each.consumers == 2)
        small = block_size is not None and block_size[1] < _LONG_TILE
        if problem.bias is not None and block_size is None:
            tiling = replace(tiling, tile_n=tiling.biased_tile_n or tiling.tile_n)
        elif small or problem.head_dim_v > _WIDE:
            tiling = replace(tiling, tile_n=_SHORT_TILE)
        return (tiling,)
    if problem.varlen and problem.head_dim_v > _NARROW:
        return tuple(each for each in tilings if each.consumers == 2)
    return tilings


def _float8_tiling(problem: AttentionProblem) -> Float8Tiling:
    widths = (problem.head_dim, problem.head_dim_v)
    tables = PRECISE_TILINGS if problem.precise else FLOAT8_TILINGS
    if _per_score(problem):
        kind = "register_limited"
    else:
        short = entry_for(tables["short"], *widths)
        if short is not None:
            readers = ceil_div(problem.seq_len_q, short.tile_m) * problem.group
            if readers <= _PREPARE_IN_BLOCK_MAX_TILES:
                return short
        narrower = "window_or_varlen" in tables and (problem.varlen or problem.window is not None)
        kind = "window_or_varlen" if narrower else "plain"
    tiling = entry_for(tables[kind], *widths)
    assert tiling is not None, "covers() admits head_dims of at most 256"
    return tiling


def _per_score(problem: AttentionProblem) -> bool:
    """Whether an option other than a causal mask or window changes or masks single scores."""
    return problem.mask or problem.bias is not None or problem.alibi or problem.softcap


def specs_of(problem: AttentionProblem, device: Device) -> list[KernelSpec]:
    """The variants for a problem, with every tiling that its lengths may select."""
    config = plan_flash_attention_sm90(problem, device)
    configs = [replace(config, tiling=tiling) for tiling in tilings_of(problem)]
    others = [each.plan_spec() for each in configs] + [each.values_spec() for each in configs]
    return [each.spec() for each in configs] + [spec for spec in others if spec is not None]


def float8_specs(device: Device) -> list[KernelSpec]:
    """A representative set of FP8 variants: every width with and without a causal mask, long and
    short sequences, precise or not; a padded head, unequal head_dims, a float16 out, and each
    option in some combination."""
    many = AttentionProblem(4, 4096, 4096, 8, 8, 128, FLOAT8, True, out_dtype="bfloat16")
    if not covers(many, device):
        return []
    problems = [
        replace(many, head_dim=width, causal=causal, precise=precise)
        for width in (64, 128, 256)
        for causal, precise in itertools.product((False, True), repeat=2)
    ]
    problems += [replace(each, seq_len_q=128, seq_len_kv=128) for each in problems if each.causal]
    problems += [
        replace(many, head_dim=80),
        replace(many, head_dim=192, value_dim=128),
        replace(many, out_dtype="float16"),
        replace(many, window=(256, None), sinks=True, varlen=True),
        replace(many, seq_len_q=128, window=(256, None), sinks=True, varlen=True),
        replace(many, head_dim=64, causal=False, mask=True, softcap=True, alibi=True),
        replace(many, causal=False, bias="float32"),
    ]
    return list(dict.fromkeys(spec for each in problems for spec in specs_of(each, device)))


@dataclass(frozen=True)
class WarpgroupBackwardConfig(FlashAttentionBackwardConfig):
    """The configuration of a backward call."""

    @property
    def counted(self) -> bool:
        """Always: the counter of the call also schedules the work items."""
        return True

    @property
    def _accumulator_defines(self) -> Defines:
        return ("COUNTED", True), ("TRANSPOSED", self.width > BOX_COLUMNS)

    def _narrowed(self, spec: KernelSpec, tiling: Any) -> KernelSpec:
        """The variant that skips the padding columns of tiles that are wider than the heads."""
        head_dims = {"COLUMNS": self.problem.head_dim, "VALUE_COLUMNS": self.problem.head_dim_v}
        columns = {name: ceil_div(n, _COLUMNS) * _COLUMNS for name, n in head_dims.items()}
        fewer = tuple((name, n) for name, n in columns.items() if n < self.width)
        shared = tiling.shared_bytes(*columns.values())
        return replace(spec, defines=(*spec.defines, *fewer), shared_bytes=shared)

    @property
    def rotates(self) -> bool:
        """True for heads of 64 or 128 columns without splits, packed sequences or a teacher."""
        problem = self.problem
        exact = problem.head_dim == self.width and self.accumulates_grad_q
        return exact and self.splits == 1 and not problem.varlen and not problem.distills

    def keys_spec(self, rope: bool = False) -> KernelSpec:
        """The kernel that computes dK and dV; with accumulates_grad_q it also accumulates dQ. rope:
        it also applies the inverse rotary embedding to dK."""
        return self._narrowed(super().keys_spec(rope), self.keys)

    def queries_spec(self) -> KernelSpec:
        """The kernel that computes dQ of wide heads."""
        return self._narrowed(super().queries_spec(), self.queries)

    def sequences_spec(self) -> KernelSpec | None:
        """The kernel that schedules variable-length sequences for the dK/dV kernel."""
        return sequences_spec(self.keys.tile_n) if self.problem.varlen else None

    def query_sequences_spec(self) -> KernelSpec | None:
        """The kernel that schedules variable-length sequences for the dQ kernel."""
        return sequences_spec(self.queries.tile_m) if self.problem.varlen else None

    def specs(self) -> tuple[KernelSpec, ...]:
        """All kernel variants of this configuration, in launch order."""
        plans = [self.sequences_spec()]
        if not self.accumulates_grad_q:
            plans.append(self.query_sequences_spec())
        return (*(plan for plan in plans if plan is not None), *super().specs())

    @property
    def accumulates_grad_q(self) -> bool:
        """True for heads of up to 128 columns; if deterministic, blocks add in a fixed order."""
        assert isinstance(self.keys, WarpgroupKeyTiling)
        return self.keys.accumulates_grad_q

    def max_key_blocks(self, total_kv: int) -> int:
        """Work items of the dK/dV kernel; an upper bound for variable-length sequences.

        total_kv: rows of k for packed sequences.
        """
        problem = self.problem
        if not problem.varlen:
            return self.key_blocks
        tiles = total_kv // self.keys.tile_n + problem.batch
        return problem.num_heads_kv * self.splits * tiles

    def max_query_blocks(self, total_q: int) -> int:
        """Work items of the dQ kernel, as max_key_blocks.

        total_q: rows of q for packed sequences.
        """
        problem = self.problem
        if not problem.varlen:
            return self.query_blocks
        tiles = total_q // self.queries.tile_m + problem.batch
        return problem.num_heads_q * tiles


def plan_flash_attention_backward_sm90(
    problem: AttentionProblem, deterministic: bool, device: Device
) -> WarpgroupBackwardConfig:
    """The backward's configuration of a problem that the class covers."""
    widest = max(problem.head_dim, problem.head_dim_v)
    width = width_for(widest, tuple(WARPGROUP_KEY_TILINGS))
    tiling = WARPGROUP_KEY_TILINGS[width]
    long = not problem.bounded or problem.seq_len_q >= _LONG_QUERY_TILE_MIN_QUERIES
    if width == LONG_KEY_WIDTH and long and problem.features <= _LONG_QUERY_TILE_FEATURES:
        tiling = LONG_KEY_TILING
    if problem.distills and problem.head_dim <= BOX_COLUMNS < width:
        tiling = NARROW_STUDENT_TILING
    if problem.softcap:
        tiling = tiling.softcapped()
    tiling = replace(tiling, ordered=deterministic and tiling.accumulates_grad_q)
    tiles = ceil_div(problem.seq_len_kv, tiling.tile_n)
    heads = problem.batch * problem.num_heads_kv
    enough = _WAVES * device.num_sms
    splits = choose_splits(problem.group, heads * tiles, enough, problem.teacher_group)
    raster_group = 1
    if problem.varlen:
        heads = problem.num_heads_kv  # a rasterisation group stays within a sequence
    if problem.bounded:
        # Every block of a KV head accesses Q, dO and, if any, the dQ accumulators.
        sum_bytes = problem.head_dim * FLOAT_BYTES * tiling.accumulates_grad_q
        row_bytes = (problem.head_dim + problem.head_dim_v) * ITEM_BYTES + sum_bytes
        head_bytes = problem.group // splits * problem.seq_len_q * row_bytes
        raster_group = choose_raster_group(
            heads * splits, tiles, head_bytes, device.num_sms, device
        )
    general = plan_flash_attention_backward(problem, False, device)
    return WarpgroupBackwardConfig(
        kernel_class="sm90",
        problem=problem,
        width=width,
        value_width=width,
        deterministic=deterministic,
        keys=tiling,
        queries=WARPGROUP_QUERY_TILINGS.get(width, general.queries),
        splits=splits,
        key_raster_group=raster_group,
        query_raster_group=1,
    )
