"""The backward on Hopper: what class sm90 (wgmma, TMA) covers, how it cuts the work, its launch.

What it does not cover is served by :mod:`flash_plan`'s class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cukit.attention.flash_maps import PlannedWork, encoder, launches_of
from cukit.attention.flash_options import NO_TEACHER, PARAMETERS, ScoreOptions, scales_of
from cukit.attention.flash_plan import (
    FlashAttentionBackwardConfig,
    choose_section,
    choose_splits,
    plan_flash_attention_backward,
)
from cukit.attention.flash_plan_sm90 import sequences_plan_size, sequences_spec
from cukit.attention.flash_problem import AttentionProblem, Defines, ceil_div, width_for
from cukit.attention.flash_tilings import (
    FLOAT_BYTES,
    GROUP_ROWS,
    ITEM_BYTES,
    LONG_KEY_TILING,
    LONG_KEY_WIDTH,
    PART,
    WARPGROUP_KEY_TILINGS,
    WARPGROUP_QUERY_TILINGS,
    WarpgroupKeyTiling,
)
from cukit.core.arrays import Array
from cukit.core.device import Device
from cukit.core.kernel import NULL, KernelSpec, Launch, Launches, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.core.tensor_map import TensorMapCache

_ARCH = "sm_90"
_COLUMNS = 32  # that are multiplied, or not, together
_LONG = 8192  # queries of a causal call for which long tiles of queries pay
_SIMPLE = frozenset({"value_dim", "sinks"})  # features for which they have the registers
_WAVES = 4  # works for each SM at least, if they can be cut so: the last end at different times


def covers(problem: AttentionProblem, device: Device) -> bool:
    """Whether class sm90 has a backward for this problem on this device."""
    sizes = (problem.batch, problem.seq_len_q, problem.seq_len_kv, problem.num_heads_q)
    return device.arch == _ARCH and min(sizes) > 0


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


class InputMaps:
    """Tensor maps of q, k, v and grad_out, for arrays of one description."""

    __slots__ = ("_grad_out", "_k", "_q", "_v")

    def __init__(self, rows: tuple[int, int], longest: tuple[int, int] | tuple[None, None]) -> None:
        """`rows`: queries and keys that are read at once; `longest`: of sequences of different
        lengths."""
        query_box, key_box = ((1, each, 1, PART) for each in rows)
        of_queries, of_keys = encoder(query_box, longest[0]), encoder(key_box, longest[1])
        self._q, self._grad_out = TensorMapCache(of_queries), TensorMapCache(of_queries)
        self._k, self._v = TensorMapCache(of_keys), TensorMapCache(of_keys)

    def __call__(self, q: Array, k: Array, v: Array, grad_out: Array) -> tuple[Any, ...]:
        return self._q(q), self._k(k), self._v(v), self._grad_out(grad_out)


class _MappedGradients:
    """A launch for arrays of one description."""

    __slots__ = ("_launch", "_maps", "_plan")

    def __init__(self, launch: Launch, maps: InputMaps, plan: PlannedWork | None) -> None:
        """`plan`: of sequences of different lengths."""
        self._launch = launch
        self._maps = maps
        self._plan = plan


class MappedKeys(_MappedGradients):
    """A launch of `flash_attention_backward_sm90`."""

    __slots__ = ()

    def __call__(self, q: Array, k: Array, v: Array, grad_out: Array, *rest: Any) -> None:
        """Launches on the current stream."""
        lse_log2, delta, total, counters, grad_k, grad_v, *options = rest
        # With a teacher, a factor of the gradients follows.
        alibi_slopes, _sinks, bias, mask, cu_seqlens_q, cu_seqlens_kv, *upstream = options
        plan: Any = NULL
        if self._plan is not None:
            # Made for queries: here the keys are what tiles are made of.
            plan = self._plan(q, cu_seqlens_kv, cu_seqlens_q)
        self._launch(
            *self._maps(q, k, v, grad_out),
            *(lse_log2, delta, counters, total, grad_k, grad_v),
            *(alibi_slopes, bias, mask, cu_seqlens_q, cu_seqlens_kv, plan, *upstream),
        )


class MappedQueries(_MappedGradients):
    """A launch of `flash_attention_backward_query_sm90`."""

    __slots__ = ()

    def __call__(self, q: Array, k: Array, v: Array, grad_out: Array, *rest: Any) -> None:
        """Launches on the current stream."""
        lse_log2, delta, grad_q, *options = rest
        alibi_slopes, _sinks, bias, mask, *ends = options
        plan: Any = NULL if self._plan is None else self._plan(q, *ends)
        self._launch(
            *self._maps(q, k, v, grad_out),
            *(lse_log2, delta, grad_q),
            *(alibi_slopes, bias, mask, *ends, plan),
        )


class MappedKernels:
    """The kernels of a backward of this class, loaded once for calls that differ in their lengths
    alone."""

    def __init__(self, config: WarpgroupBackwardConfig) -> None:
        self._keys = Launches(load_kernel(config.keys_spec()))
        self._key_plan = launches_of(config.sequences_spec())
        self._queries = self._query_plan = None
        if not config.sums_queries:
            self._queries = Launches(load_kernel(config.queries_spec()))
            self._query_plan = launches_of(config.query_sequences_spec())

    def launches(
        self,
        q: Array,
        k: Array,
        options: ScoreOptions,
        settings: Any,
        config: WarpgroupBackwardConfig,
        rows: tuple[int, int],
        num_sms: int,
        teacher: Mapping[str, float] | None = None,
        factor: float = 1.0,
    ) -> tuple[MappedKeys, MappedQueries | None]:
        """The launches that compute dK and dV, and either the sum of dQ or, with another, dQ.

        config: of the lengths of the call; settings: score_settings; rows: heads of the scratch
        arrays, and rows that each has; num_sms: of the device, each of which gets a block; teacher:
        what kernels of two models take of the second; factor: of the gradients.
        """
        problem, splits = config.problem, config.splits
        lengths = problem.seq_len_q, problem.seq_len_kv
        heads = problem.num_heads_kv * splits
        longest: tuple[int, int] | tuple[None, None] = None, None
        if problem.varlen:
            # No sequence has more rows than there are.
            longest = lengths = min(lengths[0], q.shape[0]), min(lengths[1], k.shape[0])
        maps = InputMaps((config.keys.tile_m, config.keys.tile_n), longest)
        scale, scale_log2 = scales_of(q, options)
        common = {
            "batch": problem.batch,
            "seq_q": lengths[0],
            "seq_kv": lengths[1],
            "rows_per_head": rows[1],
            "head_dim": problem.head_dim,
            "scale": scale * factor,
            "scale_log2": scale_log2,
            "settings": settings,
        }
        structs = parameter_structs(PARAMETERS)
        parameters = structs["MappedKeyParameters"].pack(
            **common,
            heads=heads,
            group=problem.group // splits,
            splits=splits,
            value_dim=problem.head_dim_v,
            section=config.key_section,
            **(NO_TEACHER if teacher is None else teacher),
        )
        blocks = config.most_key_blocks(k.shape[0])
        plan = _planned_work(self._key_plan, problem.batch, heads, lengths[0], blocks)
        keys = MappedKeys(self._keys((min(blocks, num_sms),), (parameters,)), maps, plan)
        if self._queries is None:
            return keys, None
        parameters = structs["MappedQueryParameters"].pack(
            **common, heads_q=problem.num_heads_q, group=problem.group
        )
        blocks = min(config.most_query_blocks(q.shape[0]), num_sms)
        launch = self._queries((blocks,), (parameters,))
        plan = _planned_work(
            self._query_plan, problem.batch, problem.num_heads_q, lengths[1], blocks
        )
        maps = InputMaps((GROUP_ROWS, config.queries.tile_n), longest)
        return keys, MappedQueries(launch, maps, plan)


def _planned_work(
    launches: Launches | None, batch: int, heads: int, longest: int, blocks: int
) -> PlannedWork | None:
    if launches is None:
        return None
    facts = tuple(map(np.int32, (batch, heads, longest, blocks)))
    return PlannedWork(launches((1,), facts), sequences_plan_size(batch))
