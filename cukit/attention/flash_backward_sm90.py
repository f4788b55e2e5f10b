"""The backward on Hopper: what class sm90 (wgmma, TMA) covers, how it cuts the work, its launch.

What it does not cover is served by :mod:`flash_plan`'s class.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cukit.attention.flash_maps import PlannedWork, TensorMaps
from cukit.attention.flash_options import PARAMETERS, ScoreOptions, scales_of
from cukit.attention.flash_plan import (
    FlashAttentionBackwardConfig,
    choose_section,
    choose_splits,
    plan_flash_attention_backward,
)
from cukit.attention.flash_plan_sm90 import sequences_plan_size, sequences_spec
from cukit.attention.flash_problem import AttentionProblem, Defines, ceil_div, width_for
from cukit.attention.flash_tilings import (
    ITEM_BYTES,
    PART,
    WARPGROUP_KEY_TILINGS,
    WarpgroupKeyTiling,
)
from cukit.core.arrays import Array
from cukit.core.device import Device
from cukit.core.kernel import NULL, KernelSpec, Launch, load_kernel
from cukit.core.parameters import parameter_structs

_ARCH = "sm_90"
_WIDEST = max(WARPGROUP_KEY_TILINGS)
_COLUMNS = 32  # that are multiplied, or not, together
_ADDERS = 2  # threads of a block that have dQ added, each with counters of its own
_WAVES = 4  # works for each SM at least, if they can be cut so: the last end at different times


def covers(problem: AttentionProblem, device: Device) -> bool:
    """Whether class sm90 has a backward for this problem on this device."""
    sizes = (problem.batch, problem.seq_len_q, problem.seq_len_kv, problem.num_heads_q)
    return device.arch == _ARCH and min(sizes) > 0


@dataclass(frozen=True)
class WarpgroupBackwardConfig(FlashAttentionBackwardConfig):
    """How one backward call of this class runs."""

    @property
    def counters_per_tile(self) -> int:
        """Whether it has been stored, or how many blocks have added to it."""
        return _ADDERS

    @property
    def _sum_defines(self) -> Defines:
        assert isinstance(self.keys, WarpgroupKeyTiling)
        return ("COUNTERS", self.counters_per_tile), ("ZEROED", self.keys.zeroed)

    def keys_spec(self) -> KernelSpec:
        """dK, dV and the sum of dQ; of tiles that are wider than heads the rest is left out."""
        spec = super().keys_spec()
        heads = {"COLUMNS": self.problem.head_dim, "VALUE_COLUMNS": self.problem.head_dim_v}
        columns = ((name, ceil_div(n, _COLUMNS) * _COLUMNS) for name, n in heads.items())
        fewer = tuple((name, n) for name, n in columns if n < self.width)
        return replace(spec, defines=(*spec.defines, *fewer))

    def sequences_spec(self) -> KernelSpec | None:
        """The kernel that sorts sequences of different lengths for the one that takes keys."""
        return sequences_spec(self.keys.tile_n) if self.problem.varlen else None

    def specs(self) -> tuple[KernelSpec, ...]:
        """All variants that this configuration launches, in order."""
        plan = self.sequences_spec()
        return (*(() if plan is None else (plan,)), *super().specs())

    @property
    def sums_queries(self) -> bool:
        """Always: where asked for, blocks take turns to add (backward_sums.cuh)."""
        return True

    def most_key_blocks(self, total_kv: int) -> int:
        """Blocks that take keys; of sequences of different lengths, as many as there can be.

        total_kv: rows of k where sequences lie one behind the other.
        """
        problem = self.problem
        if not problem.varlen:
            return self.key_blocks
        tiles = total_kv // self.keys.tile_n + problem.batch
        return problem.num_heads_kv * self.splits * tiles


def plan_flash_attention_backward_sm90(
    problem: AttentionProblem, deterministic: bool, device: Device
) -> WarpgroupBackwardConfig:
    """The configuration of a problem that the class covers."""
    widest = max(problem.head_dim, problem.head_dim_v)
    width = width_for(widest, tuple(WARPGROUP_KEY_TILINGS))
    # Adders of the widest tiles have no time to look at counters where blocks crowd together.
    zeroed = width == _WIDEST and problem.bounded and not deterministic
    tiling = replace(WARPGROUP_KEY_TILINGS[width], in_turn=deterministic, zeroed=zeroed)
    tiles = ceil_div(problem.seq_len_kv, tiling.tile_n)
    heads = problem.batch * problem.num_heads_kv
    splits = choose_splits(problem.group, heads * tiles, _WAVES * device.num_sms)
    section = 1
    if problem.varlen:
        heads = problem.num_heads_kv  # a section is of one sequence
    if problem.bounded:
        # What the blocks of a key head read again and again: Q, dO and the float32 sum of dQ.
        row_bytes = (problem.head_dim + problem.head_dim_v) * ITEM_BYTES + problem.head_dim * 4
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
        queries=general.queries,
        splits=splits,
        key_section=section,
        query_section=general.query_section,
    )


class MappedKeys:
    """A launch of `flash_attention_backward_sm90`, for arrays of one description."""

    __slots__ = ("_grad_out", "_k", "_launch", "_plan", "_q", "_v")

    def __init__(
        self,
        launch: Launch,
        tiling: WarpgroupKeyTiling,
        plan: PlannedWork | None,
        longest: tuple[int, int] | tuple[None, None],
    ) -> None:
        """`plan`, `longest`: of sequences of different lengths."""
        query_box, key_box = ((1, rows, 1, PART) for rows in (tiling.tile_m, tiling.tile_n))
        self._launch = launch
        self._plan = plan
        self._q = TensorMaps(query_box, longest[0])
        self._k = TensorMaps(key_box, longest[1])
        self._v = TensorMaps(key_box, longest[1])
        self._grad_out = TensorMaps(query_box, longest[0])

    def __call__(self, q: Array, k: Array, v: Array, grad_out: Array, *rest: Any) -> None:
        """Launches on the current stream."""
        lse_log2, delta, total, counters, grad_k, grad_v, *options = rest
        alibi_slopes, _sinks, bias, mask, cu_seqlens_q, cu_seqlens_kv = options
        plan: Any = NULL
        if self._plan is not None:
            # Made for queries: here the keys are what tiles are made of.
            plan = self._plan(q, cu_seqlens_kv, cu_seqlens_q)
        self._launch(
            *(self._q(q), self._k(k), self._v(v), self._grad_out(grad_out)),
            *(lse_log2, delta, counters, total, grad_k, grad_v),
            *(alibi_slopes, bias, mask, cu_seqlens_q, cu_seqlens_kv, plan),
        )


def prepare_keys(
    q: Array,
    k: Array,
    options: ScoreOptions,
    settings: Any,
    config: WarpgroupBackwardConfig,
    rows: tuple[int, int],
    num_sms: int,
) -> MappedKeys:
    """The launch that computes dK, dV and the sum of dQ.

    settings: score_settings; rows: heads of the scratch arrays, and rows that each has; num_sms: of
    the device, each of which gets a block.
    """
    problem, splits = config.problem, config.splits
    lengths = problem.seq_len_q, problem.seq_len_kv
    heads = problem.num_heads_kv * splits
    longest: tuple[int, int] | tuple[None, None] = None, None
    if problem.varlen:
        # No sequence has more rows than there are.
        longest = lengths = min(lengths[0], q.shape[0]), min(lengths[1], k.shape[0])
    scale, scale_log2 = scales_of(q, options)
    parameters = parameter_structs(PARAMETERS)["MappedKeyParameters"].pack(
        batch=problem.batch,
        heads=heads,
        group=problem.group // splits,
        splits=splits,
        seq_q=lengths[0],
        seq_kv=lengths[1],
        rows_per_head=rows[1],
        head_dim=problem.head_dim,
        value_dim=problem.head_dim_v,
        section=config.key_section,
        scale=scale,
        scale_log2=scale_log2,
        settings=settings,
    )
    blocks = config.most_key_blocks(k.shape[0])
    grid = (min(blocks, num_sms),)
    launch = Launch(load_kernel(config.keys_spec()), grid, (parameters,))
    tiling = config.keys
    assert isinstance(tiling, WarpgroupKeyTiling)
    plan = None
    plan_spec = config.sequences_spec()
    if plan_spec is not None:
        facts = tuple(map(np.int32, (problem.batch, heads, lengths[0], blocks)))
        plan = PlannedWork(
            Launch(load_kernel(plan_spec), (1,), facts), sequences_plan_size(problem.batch)
        )
    return MappedKeys(launch, tiling, plan, longest)
