"""Launches of attention kernels that read through the copy engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

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
    covers,
    plan_flash_attention_sm90,
)
from cukit.attention.flash_problem import AttentionProblem
from cukit.attention.flash_tilings import GROUP_ROWS, Float8Tiling
from cukit.core.arrays import Array, empty
from cukit.core.device import current_device
from cukit.core.kernel import NULL, KernelSpec, Launch, Launches, by_value, launch_plan, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.core.tensor_map import TensorMapCache, encode_sequence_map, encode_tensor_map

NO_FLOAT8 = parameter_structs(PARAMETERS)["Float8Settings"].pack(
    **dict.fromkeys(("q_batch", "q_head", "k_batch", "k_head", "v_batch", "v_head"), 0),
    value_tiles=0,
)
_OPTIONAL_POINTERS = len(ScoreArrays._fields) + 2  # the plan and the block mask


def encoder(box: tuple[int, ...], longest: int | None = None) -> Callable[[Array], Any]:
    """From an array [batch, seq, heads, head_dim], or [seq, heads, head_dim], to its tensor map for
    boxes of one shape.

    longest: of sequences one behind the other, if nothing of the next one is to be seen behind the
    last row of each (encode_sequence_map).
    """
    if longest is None:
        return partial(_encode_rows, box=box)
    return partial(encode_sequence_map, longest=longest, box=box)


def _encode_rows(array: Array, box: tuple[int, ...]) -> Any:
    # Sequences one behind the other are those of a single batch.
    return encode_tensor_map(array, box, swizzle_bytes=box[-1] * array.itemsize, batches=True)


class PlannedWork:
    """The launch that fills a new array for the next one: with what its blocks work on, or with
    values that they multiply."""

    __slots__ = ("_dtype", "_launch", "_size")

    def __init__(self, launch: Launch, size: int, dtype: npt.DTypeLike = np.int32) -> None:
        self._launch = launch
        self._size = size
        self._dtype = dtype

    def __call__(self, like: Array, *arrays: Any) -> Array:
        """The new array, made of `arrays`."""
        filled = empty(like, (self._size,), self._dtype)
        self._launch(*arrays, filled)
        return filled


class MappedLaunch:
    """A launch of `flash_attention_sm90`, for arrays of one description."""

    __slots__ = ("_k", "_launch", "_nothing", "_plan", "_q", "_v", "_values")

    def __init__(
        self,
        launch: Launch,
        encoders: tuple[Callable[[Array], Any], ...],
        plan: PlannedWork | None,
        values: PlannedWork | None,
        nothing: tuple[Any, ...] | None,
    ) -> None:
        """encoders: of q, k and v; nothing: what stands for all optional arrays where there are
        none and no plan."""
        self._launch = launch
        self._plan = plan
        self._values = values
        self._nothing = nothing
        self._q, self._k, self._v = map(TensorMapCache, encoders)

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
        pages: tuple[Array, ...] = (),
    ) -> None:
        """Launches on the current stream. options: ScoreArrays; descales: of float8 inputs; pages:
        the block table of a paged cache, and the caches where the kernel takes them."""
        pointers = self._nothing
        if pointers is None:
            plan: Any = NULL
            if self._plan is not None:
                planned = options[-2:] if block_mask is None else (block_mask,)
                plan = self._plan(q, *planned)
            pointers = (*options, plan, block_mask, *pages)
        values = self._v(v)
        if descales is not None:
            prepared = NULL if self._values is None else self._values(q, values, options[-1])
            pointers = (*pointers, prepared, *descales)
        self._launch(self._q(q), self._k(k), values, out, lse, *pointers)


class MappedForward:
    """Hopper's forward of a problem, into which a call fills its lengths, strides and options."""

    def __init__(self, config: WarpgroupForwardConfig) -> None:
        self._config = config
        problem = config.problem
        self._plain = not problem.features & {"alibi", "bias", "mask", "sinks", "varlen"}
        self._nothing = (by_value(np.intp(0)),) * _OPTIONAL_POINTERS
        self._launches = Launches(load_kernel(config.spec()))
        self._plan_launches = launches_of(config.plan_spec())
        self._values_launches = launches_of(config.values_spec())
        tiling, columns = config.tiling, config.box_columns(config.width)
        value_columns = config.box_columns(config.value_width)
        self._encoders = (
            encoder((1, GROUP_ROWS, 1, columns)),
            encoder((1, tiling.tile_n, 1, columns)),
            encoder((1, tiling.tile_n, 1, value_columns)),
        )

    def launch(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array | None,
        options: ScoreOptions,
        arrays: ScoreArrays,
        mask_heads: int = 1,
        descales: tuple[Array | None, ...] | None = None,
    ) -> MappedLaunch:
        """The launch for these arrays, which are checked.

        mask_heads: of a block mask. descales: of float8 inputs, each float32 [], [heads_kv],
        [batch, heads_kv] or None.
        """
        config = self._config
        problem = config.problem
        shape = score_shape(q, k, options, arrays)
        batch, heads_q, seq_len_q, seq_len_kv = shape
        settings = score_settings(q, options, arrays, shape)
        blocks = config.num_blocks(seq_len_q)
        tiles = config.value_tiles(v.shape[-3]) if descales else 0
        parameters = parameter_structs(PARAMETERS)["MappedForwardParameters"].pack(
            out=dense_strides((*q.shape[:-1], v.shape[-1])) if out is None else strides_of(out),
            batch=batch,
            heads_q=heads_q,
            group=problem.group,
            seq_q=seq_len_q,
            seq_kv=seq_len_kv,
            value_dim=problem.head_dim_v,
            mask_heads=mask_heads,
            scale_log2=scales_of(q, options)[1],
            settings=settings,
            float8=_float8_settings(descales, tiles) if descales else NO_FLOAT8,
        )
        launch = self._launches((blocks,), (parameters,))
        plan = values = None
        if self._plan_launches is not None:
            size = config.plan_size(seq_len_q, seq_len_kv, mask_heads)
            facts = (mask_heads, seq_len_q, seq_len_kv, blocks)
            if problem.varlen:
                facts = (batch, heads_q, seq_len_kv, blocks)
            scalars = (*map(np.int32, facts), *(() if problem.varlen else (settings,)))
            grid = (config.plan_blocks(seq_len_q, mask_heads),)
            plan = PlannedWork(self._plan_launches(grid, scalars), size)
        if self._values_launches is not None:
            assert isinstance(config.tiling, Float8Tiling)
            count = tiles * problem.num_heads_kv
            scalars = tuple(map(np.int32, (tiles, batch, seq_len_kv)))
            values = PlannedWork(
                self._values_launches((count,), scalars),
                count * config.tiling.value_bytes(config.value_width),
                np.uint8,
            )
        nothing = self._nothing if plan is None and self._plain else None
        return MappedLaunch(launch, self._encoders, plan, values, nothing)


@launch_plan
def mapped_forward(
    problem: AttentionProblem, block_size: BlockSize | None = None
) -> MappedForward | None:
    """Hopper's forward of a problem, loaded once; None where class sm90 does not cover it."""
    device = current_device()
    if not covers(problem, device):
        return None
    return MappedForward(plan_flash_attention_sm90(problem, device, block_size))


def launches_of(spec: KernelSpec | None) -> Launches | None:
    """Launches of a kernel, loaded; None of none."""
    return None if spec is None else Launches(load_kernel(spec))


def _float8_settings(descales: tuple[Array | None, ...], value_tiles: int) -> tuple[int, ...]:
    """Strides of the factors of q, k and v over batches and heads, in elements, 0 where one serves
    all; then tiles of prepared values of a key head."""
    strides: tuple[int, ...] = ()
    for factors in descales:
        steps = () if factors is None else factors.strides
        size = 1 if factors is None else factors.itemsize
        strides += (0,) * (2 - len(steps)) + tuple(step // size for step in steps)
    return *strides, value_tiles
