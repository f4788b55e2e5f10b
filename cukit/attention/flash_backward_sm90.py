"""The backward on Hopper: what class sm90 (wgmma, TMA) covers, how it cuts the work, its launch.

What it does not cover is served by :mod:`flash_plan`'s class.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from cukit.attention.flash_maps import TensorMaps
from cukit.attention.flash_options import ScoreOptions, scales_of
from cukit.attention.flash_plan import (
    FlashAttentionBackwardConfig,
    choose_section,
    choose_splits,
    plan_flash_attention_backward,
)
from cukit.attention.flash_problem import AttentionProblem, ceil_div, width_for
from cukit.attention.flash_tilings import (
    ITEM_BYTES,
    PART,
    WARPGROUP_KEY_TILINGS,
    WarpgroupKeyTiling,
)
from cukit.core.arrays import Array, empty
from cukit.core.device import Device
from cukit.core.kernel import NULL, Launch, load_kernel

_ARCH = "sm_90"
_FEATURES = frozenset({"sinks", "window"})
_ADDERS = 2  # threads of a block that have dQ added, each with counters of its own


def covers(problem: AttentionProblem, device: Device) -> bool:
    """Whether class sm90 has a backward for this problem on this device."""
    sizes = (problem.batch, problem.seq_len_q, problem.seq_len_kv, problem.num_heads_q)
    return device.arch == _ARCH and problem.features <= _FEATURES and min(sizes) > 0


@cache
def plan_flash_attention_backward_sm90(
    problem: AttentionProblem, deterministic: bool, device: Device
) -> FlashAttentionBackwardConfig:
    """The configuration of a problem that the class covers.

    Deterministic or not, dQ is summed up in float32: the kernels before and after are the same.
    """
    width = width_for(problem.head_dim, tuple(WARPGROUP_KEY_TILINGS))
    tiling = replace(WARPGROUP_KEY_TILINGS[width], in_turn=deterministic)
    tiles = ceil_div(problem.seq_len_kv, tiling.tile_n)
    heads = problem.batch * problem.num_heads_kv
    splits = choose_splits(problem.group, heads * tiles, device.num_sms)
    section = 1
    if problem.bounded:
        # What the blocks of a key head read again and again: Q, dO and the float32 sum of dQ.
        row_bytes = problem.head_dim * (2 * ITEM_BYTES + 4)
        head_bytes = problem.group // splits * problem.seq_len_q * row_bytes
        section = choose_section(heads * splits, tiles, head_bytes, device.num_sms, device)
    general = plan_flash_attention_backward(problem, False, device)
    return FlashAttentionBackwardConfig(
        kernel_class="sm90",
        problem=problem,
        width=width,
        value_width=width,
        deterministic=False,
        keys=tiling,
        queries=general.queries,
        splits=splits,
        key_section=section,
        query_section=general.query_section,
    )


class MappedKeys:
    """A launch of `flash_attention_backward_sm90`, for arrays of one description."""

    __slots__ = ("_grad_out", "_k", "_launch", "_q", "_turns", "_v")

    def __init__(self, launch: Launch, tiling: WarpgroupKeyTiling, turns: int) -> None:
        """`turns`: counters that the blocks need to take turns, 0 if they don't."""
        query_box, key_box = ((1, rows, 1, PART) for rows in (tiling.tile_m, tiling.tile_n))
        self._launch = launch
        self._turns = turns
        self._q = TensorMaps(query_box)
        self._k = TensorMaps(key_box)
        self._v = TensorMaps(key_box)
        self._grad_out = TensorMaps(query_box)

    def __call__(self, q: Array, k: Array, v: Array, grad_out: Array, *rest: Any) -> None:
        """Launches on the current stream; of `rest`, the arrays of options are not needed."""
        lse_log2, delta, total, grad_k, grad_v, *_ = rest
        turns: Any = NULL
        if self._turns:
            turns = empty(q, (self._turns,), np.int32)
            turns.fill(0)
        self._launch(
            *(self._q(q), self._k(k), self._v(v), self._grad_out(grad_out)),
            *(lse_log2, delta, turns, total, grad_k, grad_v),
        )


def prepare_keys(
    q: Array,
    options: ScoreOptions,
    settings: Any,
    config: FlashAttentionBackwardConfig,
    rows_per_head: int,
) -> MappedKeys:
    """The launch that computes dK, dV and the sum of dQ; `settings` are score_settings."""
    problem, splits = config.problem, config.splits
    scalars = (
        np.int32(problem.batch),
        np.int32(problem.num_heads_kv * splits),
        np.int32(problem.group // splits),
        np.int32(splits),
        np.int32(problem.seq_len_q),
        np.int32(problem.seq_len_kv),
        np.int32(rows_per_head),
        np.int32(problem.head_dim),
        np.int32(config.key_section),
        *scales_of(q, options),
        settings,
    )
    launch = Launch(load_kernel(config.keys_spec()), (config.key_blocks,), scalars)
    tiling = config.keys
    assert isinstance(tiling, WarpgroupKeyTiling)
    turns = 0
    if tiling.in_turn:
        heads, rows = config.scratch_rows(0)
        turns = _ADDERS * (heads * rows // tiling.tile_m + 1)
    return MappedKeys(launch, tiling, turns)
