"""The forward on Hopper: what class sm90 (wgmma, TMA) covers, and how it cuts the work.

Every other GPU, and what this class does not cover, is served by :mod:`flash_plan`'s class.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from cukit.attention._flash_plan import (
    FlashAttentionBackwardConfig,
    choose_section,
    choose_splits,
    plan_flash_attention_backward,
)
from cukit.attention._flash_tilings import (
    FLOAT8_TILINGS,
    FLOAT_BYTES,
    ITEM_BYTES,
    LONG_KEY_TILING,
    LONG_KEY_WIDTH,
    MAX_HEAD_DIM,
    PART,
    PRECISE_TILINGS,
    WARPGROUP_KEY_TILINGS,
    WARPGROUP_QUERY_TILINGS,
    WARPGROUP_ROWS,
    Float8Tiling,
    WarpgroupKeyTiling,
    WarpgroupTiling,
    entry_for,
    float8_part,
    warpgroup_tilings,
)
from cukit.attention._problem import (
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
_STEP = 16  # columns that are multiplied at a time
_FLOAT8_STEP = 32
_FLOAT8_ALIGNMENT = 16  # columns: rows are whole chunks of the copy engine
_VALUES_THREADS = 128
_FEW_READERS = 8  # tiles of queries that read the same values
_SEQUENCE_THREADS = 1024
_LIST_THREADS = 128
_WARP = 32
_NARROW, _WIDE = 96, 192  # columns of values
_WHOLE_TILE, _SHORT_TILE = 128, 64  # keys
_COLUMNS = 32  # that are multiplied, or not, together
_LONG = 8192  # queries of a causal call for which long tiles of queries pay
_SIMPLE = frozenset({"value_dim", "sinks"})  # features for which they have the registers
_WAVES = 4  # works for each SM at least, if they can be cut so: the last end at different times

BlockSize = tuple[int, int]
"""Queries and keys of a block of a block mask."""


@dataclass(frozen=True)
class WarpgroupForwardConfig:
    """How one forward call runs."""

    problem: AttentionProblem
    tiling: WarpgroupTiling
    slots: int
    """Blocks that the GPU runs at once."""
    block_size: BlockSize | None = None
    """Of the block mask, if there is one."""

    def num_blocks(self, seq_len_q: int) -> int:
        """Blocks of the grid: they walk over the tiles (kernels_cu/attention/query_work.cuh)."""
        problem = self.problem
        pieces = pieces_of(problem, self.tiling, seq_len_q, self.block_size is not None)
        return min(problem.batch * problem.num_heads_q * pieces, self.slots)

    @property
    def turns(self) -> bool:
        """Whether the consumers multiply in turns."""
        return self.block_size is None and _in_turns(self.problem, self.tiling)

    @property
    def width(self) -> int:
        """Columns of q and k that are multiplied."""
        step = _FLOAT8_STEP if self.problem.float8 else _STEP
        return ceil_div(self.problem.head_dim, step) * step

    @property
    def value_width(self) -> int:
        """Columns of v that are multiplied."""
        return ceil_div(self.problem.head_dim_v, _STEP) * _STEP

    def box_columns(self, width: int) -> int:
        """Columns of q and k, or of v, that the copy engine brings at once."""
        return float8_part(width) if self.problem.float8 else PART

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
            *((("TURNS", True),) if self.turns else ()),
        )
        entry = "flash_attention_sm90"
        shared = tiling.shared_bytes(self.width, self.value_width)
        return KernelSpec(f"attention/{entry}.cu", entry, defines, tiling.threads, shared)

    def plan_spec(self) -> KernelSpec | None:
        """The kernel that decides, before this one, what its blocks work on: where tiles differ."""
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
        """int32 elements that the plan takes."""
        if self.problem.varlen:
            return sequences_plan_size(self.problem.batch)
        entries = 1 + ceil_div(seq_len_kv, self.tiling.tile_n)
        return 1 + mask_heads * ceil_div(seq_len_q, self.tiling.tile_m) * entries

    def plan_blocks(self, seq_len_q: int, mask_heads: int = 1) -> int:
        """Blocks of the grid that makes the plan."""
        if self.problem.varlen:
            return 1
        tiles = mask_heads * ceil_div(seq_len_q, self.tiling.tile_m)
        return ceil_div(tiles, _LIST_THREADS // _WARP)

    def value_tiles(self, rows_kv: int) -> int:
        """Tiles of prepared values of a key head. rows_kv: keys of a sequence; where sequences lie
        one behind the other, of all of them: each begins with a tile of its own
        (kernels_cu/attention/float8_values.cuh)."""
        batch, tile = self.problem.batch, self.tiling.tile_n
        return rows_kv // tile + batch if self.problem.varlen else batch * ceil_div(rows_kv, tile)

    def values_spec(self) -> KernelSpec | None:
        """The kernel that prepares the values of float8 inputs before this one."""
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
            ("KEPT_TILES", tiling.kept_tiles),
        )

    def _block_defines(self) -> Defines:
        if self.block_size is None:
            return ()
        rows, columns = self.block_size
        return ("BLOCK_SPARSE", True), ("BLOCK_Q", rows), ("BLOCK_KV", columns)


def sequences_spec(tile_rows: int, *, paged: bool = False) -> KernelSpec:
    """The kernel that sorts sequences of different lengths and adds up their tiles of rows.

    paged: their keys lie in the blocks of a cache."""
    defines: Defines = (("TILE_M", tile_rows), ("THREADS", _SEQUENCE_THREADS))
    if paged:
        defines += (("PAGED", True),)
    entry = "plan_sequences"
    return KernelSpec(f"attention/{entry}.cu", entry, defines, _SEQUENCE_THREADS)


def sequences_plan_size(batch: int) -> int:
    """int32 elements that its plan takes."""
    return 2 * batch + 2


def covers(problem: AttentionProblem, device: Device) -> bool:
    """Whether class sm90 has a kernel for this problem on this device: no empty array, and whole
    chunks of eight bits."""
    sizes = (problem.batch, problem.seq_len_q, problem.seq_len_kv, problem.num_heads_q)
    if device.arch != _ARCH or min(sizes) == 0:
        return False
    widths = (problem.head_dim, problem.head_dim_v)
    return not problem.float8 or (
        max(widths) <= MAX_HEAD_DIM and all(width % _FLOAT8_ALIGNMENT == 0 for width in widths)
    )


def _cost(problem: AttentionProblem, tiling: WarpgroupTiling, slots: int) -> float:
    """Relative time: scores of the largest piece of work, in whole tiles, times the rounds until
    all pieces are done. Sequences of any lengths come in so many pieces that neither counts.

    Every warpgroup goes as far as its own queries see; one without queries leaves its time unused.
    """
    tile, groups = tiling.tile_n, range(0, problem.seq_len_q, WARPGROUP_ROWS)
    keys = 0
    for row in groups:
        first, last = _visible_keys(problem, row, min(row + WARPGROUP_ROWS, problem.seq_len_q) - 1)
        keys += (ceil_div(last, tile) - first // tile) * tile
    tiles = ceil_div(problem.seq_len_q, tiling.tile_m)
    in_turns = _in_turns(problem, tiling)
    cost = tiling.turn_cost if in_turns and tiling.turn_cost is not None else tiling.cost
    scores = cost * tiles * tiling.tile_m * keys / len(groups)
    if problem.varlen:
        return scores
    pieces = pieces_of(problem, tiling, problem.seq_len_q)
    largest = min(1.0, (1 if pieces == tiles else 2) / tiles)
    return scores * largest * ceil_div(problem.batch * problem.num_heads_q * pieces, slots)


def _in_turns(problem: AttentionProblem, tiling: WarpgroupTiling) -> bool:
    """Where it was measured: calls with a causal mask and no option that tells scores apart."""
    plain = problem.features <= {"sinks", "value_dim"}
    return tiling.turn_cost is not None and problem.causal and plain


def _visible_keys(problem: AttentionProblem, first_row: int, last_row: int) -> tuple[int, int]:
    """Keys from .. up to the first of which and the last of which some of these queries see."""
    past, window = problem.seq_len_kv - problem.seq_len_q, problem.window or (None, None)
    left, right = window[0], 0 if problem.causal else window[1]
    end = problem.seq_len_kv if right is None else last_row + past + right + 1
    end = max(1, min(end, problem.seq_len_kv))
    begin = 0 if left is None else first_row + past - left
    return max(0, min(begin, end - 1)), end


def pieces_of(
    problem: AttentionProblem, tiling: WarpgroupTiling, seq_len_q: int, dealt: bool = False
) -> int:
    """What a head is cut into: tiles or, where only a causal mask makes them differ, pairs."""
    tiles = ceil_div(seq_len_q, tiling.tile_m)
    pairs = problem.causal and problem.window is None and not problem.varlen and not dealt
    return ceil_div(tiles, 2) if pairs else tiles


def plan_flash_attention_sm90(
    problem: AttentionProblem, device: Device, block_size: BlockSize | None = None
) -> WarpgroupForwardConfig:
    """The configuration of a problem that the class covers."""
    slots = device.num_sms
    tilings = tilings_of(problem, block_size)
    tiling = min(tilings, key=lambda each: _cost(problem, each, slots))
    return WarpgroupForwardConfig(problem, tiling, slots, block_size)


def tilings_of(
    problem: AttentionProblem, block_size: BlockSize | None = None
) -> tuple[WarpgroupTiling, ...]:
    """What there is to choose from. Work on single scores wants more registers than three consumers
    leave, and than wide values leave with long tiles; so does a warp that looks after the ends of
    sequences, beside wide values. Blocks want tiles that they fill."""
    if problem.float8:
        return (_float8_tiling(problem),)
    tilings = warpgroup_tilings(problem.head_dim, problem.head_dim_v)
    if _per_score(problem) or block_size is not None:
        tiling = next(each for each in tilings if each.consumers == 2)
        small = block_size is not None and block_size[1] < _WHOLE_TILE
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
        kind = "crowded"
    else:
        short = entry_for(tables["short"], *widths)
        if short is not None:
            readers = ceil_div(problem.seq_len_q, short.tile_m) * problem.group
            if readers <= _FEW_READERS:
                return short
        busy = "busy" in tables and (problem.varlen or problem.window is not None)
        kind = "busy" if busy else "plain"
    tiling = entry_for(tables[kind], *widths)
    assert tiling is not None, "covers() asks for widths of at most 256"
    return tiling


def _per_score(problem: AttentionProblem) -> bool:
    """Whether an option changes or hides single scores."""
    return problem.mask or problem.bias is not None or problem.alibi or problem.softcap


def specs_of(problem: AttentionProblem, device: Device) -> list[KernelSpec]:
    """The variants for problems of this width, whichever tiling their lengths ask for."""
    config = plan_flash_attention_sm90(problem, device)
    configs = [replace(config, tiling=tiling) for tiling in tilings_of(problem)]
    others = [each.plan_spec() for each in configs] + [each.values_spec() for each in configs]
    return [each.spec() for each in configs] + [spec for spec in others if spec is not None]


def float8_specs(device: Device) -> list[KernelSpec]:
    """The variants of float8 inputs: every width with and without a mask, long sequences and short
    ones, precise and not; a padded head, unlike widths, a float16 out, and the options in some
    company."""
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
    """How one backward call of this class runs."""

    @property
    def counted(self) -> bool:
        """Always: the counter of the call deals the works."""
        return True

    @property
    def _sum_defines(self) -> Defines:
        return ("COUNTED", True), ("TRANSPOSED", self.width > PART)

    def _narrowed(self, spec: KernelSpec, tiling: Any) -> KernelSpec:
        """Of tiles that are wider than heads the rest is left out."""
        heads = {"COLUMNS": self.problem.head_dim, "VALUE_COLUMNS": self.problem.head_dim_v}
        columns = {name: ceil_div(n, _COLUMNS) * _COLUMNS for name, n in heads.items()}
        fewer = tuple((name, n) for name, n in columns.items() if n < self.width)
        shared = tiling.shared_bytes(*columns.values())
        return replace(spec, defines=(*spec.defines, *fewer), shared_bytes=shared)

    def keys_spec(self) -> KernelSpec:
        """dK and dV; with sums_queries, the sum of dQ as well."""
        return self._narrowed(super().keys_spec(), self.keys)

    def queries_spec(self) -> KernelSpec:
        """dQ of wide heads."""
        return self._narrowed(super().queries_spec(), self.queries)

    def sequences_spec(self) -> KernelSpec | None:
        """The kernel that sorts sequences of different lengths for the one that takes keys."""
        return sequences_spec(self.keys.tile_n) if self.problem.varlen else None

    def query_sequences_spec(self) -> KernelSpec | None:
        """The same for the one that takes queries."""
        return sequences_spec(self.queries.tile_m) if self.problem.varlen else None

    def specs(self) -> tuple[KernelSpec, ...]:
        """All variants that this configuration launches, in order."""
        plans = [self.sequences_spec()]
        if not self.sums_queries:
            plans.append(self.query_sequences_spec())
        return (*(plan for plan in plans if plan is not None), *super().specs())

    @property
    def sums_queries(self) -> bool:
        """Of narrow heads; where asked for, blocks take turns to add (backward_sums.cuh)."""
        assert isinstance(self.keys, WarpgroupKeyTiling)
        return self.keys.sums_queries

    def most_key_blocks(self, total_kv: int) -> int:
        """Blocks that take keys; of sequences of different lengths, as many as there can be.

        total_kv: rows of k where sequences lie one behind the other.
        """
        problem = self.problem
        if not problem.varlen:
            return self.key_blocks
        tiles = total_kv // self.keys.tile_n + problem.batch
        return problem.num_heads_kv * self.splits * tiles

    def most_query_blocks(self, total_q: int) -> int:
        """Blocks that take queries, of the kernel that computes dQ alone; as most_key_blocks.

        total_q: rows of q where sequences lie one behind the other.
        """
        problem = self.problem
        if not problem.varlen:
            return self.query_blocks
        tiles = total_q // self.queries.tile_m + problem.batch
        return problem.num_heads_q * tiles


def plan_flash_attention_backward_sm90(
    problem: AttentionProblem, deterministic: bool, device: Device
) -> WarpgroupBackwardConfig:
    """The configuration of a problem that the class covers."""
    widest = max(problem.head_dim, problem.head_dim_v)
    width = width_for(widest, tuple(WARPGROUP_KEY_TILINGS))
    tiling = WARPGROUP_KEY_TILINGS[width]
    long = not problem.bounded or problem.seq_len_q >= _LONG
    if width == LONG_KEY_WIDTH and long and problem.features <= _SIMPLE:
        tiling = LONG_KEY_TILING
    if problem.softcap:
        tiling = tiling.softcapped()
    tiling = replace(tiling, in_turn=deterministic and tiling.sums_queries)
    tiles = ceil_div(problem.seq_len_kv, tiling.tile_n)
    heads = problem.batch * problem.num_heads_kv
    enough = _WAVES * device.num_sms
    splits = choose_splits(problem.group, heads * tiles, enough, problem.teacher_group)
    section = 1
    if problem.varlen:
        heads = problem.num_heads_kv  # a section is of one sequence
    if problem.bounded:
        # What the blocks of a key head read again and again: Q, dO and, if any, the sum of dQ.
        sum_bytes = problem.head_dim * FLOAT_BYTES * tiling.sums_queries
        row_bytes = (problem.head_dim + problem.head_dim_v) * ITEM_BYTES + sum_bytes
        head_bytes = problem.group // splits * problem.seq_len_q * row_bytes
        section = choose_section(heads * splits, tiles, head_bytes, device.num_sms, device)
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
        key_section=section,
        query_section=1,
    )
