"""Launches of attention kernels that read through the copy engine."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukit.attention.flash_arguments import dense_strides, score_shape, strides_of
from cukit.attention.flash_options import (
    PARAMETERS,
    ScoreArrays,
    ScoreOptions,
    scales_of,
    score_settings,
)
from cukit.attention.flash_plan_sm90 import (
    BlockSize,
    WarpgroupForwardConfig,
    plan_flash_attention_sm90,
)
from cukit.attention.flash_problem import AttentionProblem
from cukit.attention.flash_tilings import Float8Tiling
from cukit.core.arrays import Array, empty
from cukit.core.device import Device
from cukit.core.kernel import NULL, Launch, by_value, load_kernel
from cukit.core.map_cache import TensorMapCache
from cukit.core.parameters import parameter_structs
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

    __slots__ = ("_k", "_launch", "_nothing", "_plan", "_q", "_v", "_values")

    def __init__(
        self,
        launch: Launch,
        plan: PlannedWork | None,
        config: WarpgroupForwardConfig,
        plain: bool,
        values: PreparedValues | None = None,
    ) -> None:
        """`plain`: there are no arrays but the inputs and the results."""
        self._launch = launch
        self._plan = plan
        self._values = values
        self._nothing = (by_value(np.intp(0)),) * _OPTIONAL_POINTERS if plain else None
        tiling, columns = config.tiling, config.box_columns(config.width)
        self._q = TensorMaps((1, tiling.tile_m, 1, columns))
        self._k = TensorMaps((1, tiling.tile_n, 1, columns))
        self._v = TensorMaps((1, tiling.tile_n, 1, config.box_columns(config.value_width)))

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array | None,
        *options: Array | None,
        block_mask: Array | None = None,
        descales: tuple[Array | None, ...] | None = None,
    ) -> None:
        """Launches on the current stream. options: ScoreArrays; descales: of float8 inputs."""
        pointers = self._nothing
        if pointers is None:
            plan: Any = NULL
            if self._plan is not None:
                planned = options[-2:] if block_mask is None else (block_mask,)
                plan = self._plan(q, *planned)
            pointers = (*options, plan, block_mask)
        values = self._v(v)
        if descales is not None:
            prepared = NULL if self._values is None else self._values(q, values, options[-1])
            pointers = (*pointers, prepared, *descales)
        self._launch(self._q(q), self._k(k), values, out, lse, *pointers)


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


class PreparedValues:
    """The launch that prepares the values of float8 inputs for the next one."""

    __slots__ = ("_bytes", "_launch")

    def __init__(self, launch: Launch, num_bytes: int) -> None:
        self._launch = launch
        self._bytes = num_bytes

    def __call__(self, like: Array, values: Any, ends: Array | None) -> Array:
        """The prepared values, a new array. values: tensor map of v; ends: cu_seqlens_kv."""
        prepared = empty(like, (self._bytes,), np.uint8)
        self._launch(values, prepared, ends)
        return prepared


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
    descales: tuple[Array | None, ...] | None = None,
) -> MappedLaunch:
    """The launch of class sm90 for a problem that it covers; all arguments are checked.

    descales: of float8 inputs, each float32 [], [heads_kv], [batch, heads_kv] or None.
    """
    config = plan_flash_attention_sm90(problem, device, block_size)
    settings = score_settings(q, options, arrays, score_shape(q, k, options, arrays))
    structs = parameter_structs(PARAMETERS)
    parameters = structs["MappedForwardParameters"].pack(
        out=dense_strides((*q.shape[:-1], v.shape[-1])) if out is None else strides_of(out),
        batch=problem.batch,
        heads_q=problem.num_heads_q,
        group=problem.group,
        seq_q=problem.seq_len_q,
        seq_kv=problem.seq_len_kv,
        value_dim=problem.head_dim_v,
        mask_heads=mask_heads,
        scale_log2=scales_of(q, options)[1],
        settings=settings,
        float8=structs["Float8Settings"].pack(
            **_descale_strides(descales or (None, None, None)),
            value_tiles=config.value_tiles(v.shape[-3]) if descales else 0,
        ),
    )
    launch = Launch(load_kernel(config.spec()), (config.num_blocks,), (parameters,))
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
    return MappedLaunch(launch, plan, config, plain, _prepare_values(config, v))


def _prepare_values(config: WarpgroupForwardConfig, v: Array) -> PreparedValues | None:
    spec = config.values_spec()
    if spec is None or not isinstance(config.tiling, Float8Tiling):
        return None
    problem = config.problem
    tiles = config.value_tiles(v.shape[-3])
    scalars = (np.int32(tiles), np.int32(problem.batch), np.int32(problem.seq_len_kv))
    launch = Launch(load_kernel(spec), (tiles * problem.num_heads_kv,), scalars)
    return PreparedValues(
        launch, tiles * problem.num_heads_kv * config.tiling.value_bytes(config.value_width)
    )


def _descale_strides(descales: tuple[Array | None, ...]) -> dict[str, int]:
    """Of the factors of q, k and v, in elements; 0 where one serves all batches or heads."""
    strides: dict[str, int] = {}
    for name, factors in zip("qkv", descales, strict=True):
        steps = () if factors is None else factors.strides
        size = 1 if factors is None else factors.itemsize
        batch, head = (0,) * (2 - len(steps)) + tuple(step // size for step in steps)
        strides |= {f"{name}_batch": batch, f"{name}_head": head}
    return strides
