"""Launches of attention kernels that read through the copy engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukit.attention.flash_arguments import dense_strides, score_shape, strides_of
from cukit.attention.flash_options import ScoreArrays, ScoreOptions, scales_of, score_settings
from cukit.attention.flash_plan_sm90 import BlockSize, plan_flash_attention_sm90
from cukit.attention.flash_problem import AttentionProblem
from cukit.attention.flash_tilings import PART, WarpgroupTiling
from cukit.core.arrays import Array, empty
from cukit.core.device import Device
from cukit.core.kernel import NULL, Launch, by_value, load_kernel
from cukit.core.map_cache import TensorMapCache
from cukit.core.tensor_map import encode_sequence_map, encode_tensor_map

_OPTIONAL_POINTERS = len(ScoreArrays._fields) + 2  # the plan and the block mask


class TensorMaps(TensorMapCache):
    """Tensor maps of arrays [batch, seq, heads, head_dim], or [seq, heads, head_dim], of one
    description, read in boxes of one shape."""

    __slots__ = ()

    def __init__(self, box: tuple[int, ...], longest: int | None = None) -> None:
        """`longest`: of sequences one behind the other, if nothing of the next one is to be seen
        behind the last row of each (encode_sequence_map)."""

        def encode(array: Array) -> Any:
            if longest is not None:
                return encode_sequence_map(array, longest, box)
            # Sequences one behind the other are those of a single batch.
            whole = array if array.ndim == 4 else array[None]
            return encode_tensor_map(whole, box, swizzle_bytes=box[-1] * array.itemsize)

        super().__init__(encode)


class MappedLaunch:
    """A launch of `flash_attention_sm90`, for arrays of one description."""

    __slots__ = ("_k", "_launch", "_nothing", "_plan", "_q", "_v")

    def __init__(
        self, launch: Launch, plan: PlannedWork | None, tiling: WarpgroupTiling, plain: bool
    ) -> None:
        """`plain`: there are no arrays but the inputs and the results."""
        self._launch = launch
        self._plan = plan
        self._nothing = (by_value(np.intp(0)),) * _OPTIONAL_POINTERS if plain else None
        key_box = (1, tiling.tile_n, 1, PART)
        self._q = TensorMaps((1, tiling.tile_m, 1, PART))
        self._k = TensorMaps(key_box)
        self._v = TensorMaps(key_box)

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array | None,
        *options: Array | None,
        block_mask: Array | None = None,
    ) -> None:
        """Launches on the current stream; `options` are ScoreArrays."""
        pointers = self._nothing
        if pointers is None:
            plan: Any = NULL
            if self._plan is not None:
                planned = options[-2:] if block_mask is None else (block_mask,)
                plan = self._plan(q, *planned)
            pointers = (*options, plan, block_mask)
        self._launch(self._q(q), self._k(k), self._v(v), out, lse, *pointers)


class PlannedWork:
    """The launch that decides what the blocks of the next one work on."""

    __slots__ = ("_launch", "_size")

    def __init__(self, launch: Launch, size: int) -> None:
        self._launch = launch
        self._size = size

    def __call__(self, like: Array, *arrays: Array | None) -> Array:
        """The plan, a new array, made of `arrays`."""
        plan = empty(like, (self._size,), np.int32)
        self._launch(*arrays, plan)
        return plan


def prepare_mapped(
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    options: ScoreOptions,
    arrays: ScoreArrays,
    problem: AttentionProblem,
    device: Device,
    block_size: BlockSize | None = None,
    mask_heads: int = 1,
) -> MappedLaunch:
    """The launch of class sm90 for a problem that it covers; all arguments are checked."""
    config = plan_flash_attention_sm90(problem, device, block_size)
    settings = score_settings(q, options, arrays, score_shape(q, k, options, arrays))
    scalars = (
        *(dense_strides((*q.shape[:-1], v.shape[-1])) if out is None else strides_of(out)),
        np.int32(problem.batch),
        np.int32(problem.num_heads_q),
        np.int32(problem.group),
        np.int32(problem.seq_len_q),
        np.int32(problem.seq_len_kv),
        np.int32(problem.head_dim_v),
        np.int32(mask_heads),
        scales_of(q, options)[1],
        settings,
    )
    launch = Launch(load_kernel(config.spec()), (config.num_blocks,), scalars)
    plan = None
    plan_spec = config.plan_spec()
    if plan_spec is not None:
        blocks = np.int32(config.num_blocks)
        if problem.varlen:
            longest = np.int32(problem.seq_len_kv)
            heads = np.int32(problem.num_heads_q)
            facts: tuple[Any, ...] = (np.int32(problem.batch), heads, longest, blocks)
        else:
            lengths = np.int32(problem.seq_len_q), np.int32(problem.seq_len_kv)
            facts = (np.int32(mask_heads), *lengths, blocks, settings)
        grid = (config.plan_blocks(mask_heads),)
        plan = PlannedWork(
            Launch(load_kernel(plan_spec), grid, facts), config.plan_size(mask_heads)
        )
    plain = plan is None and all(array is None for array in arrays)
    return MappedLaunch(launch, plan, config.tiling, plain)
