"""Launches of the sm90 attention kernels, forward and backward, which read their inputs by TMA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cukit.attention.flash._arguments import (
    NO_TEACHER,
    PARAMETERS,
    GradientLayout,
    ScoreArrays,
    ScoreOptions,
    dense_strides,
    scales_of,
    score_settings,
    score_shape,
    strides_of,
)
from cukit.attention.flash._flash_plan_sm90 import (
    BlockSize,
    WarpgroupBackwardConfig,
    WarpgroupForwardConfig,
    covers,
    plan_flash_attention_sm90,
    sequences_plan_size,
)
from cukit.attention.flash._flash_tilings import BOX_COLUMNS, WARPGROUP_ROWS, Float8Tiling
from cukit.attention.flash._problem import AttentionProblem
from cukit.core.arrays import Array, empty
from cukit.core.device import current_device
from cukit.core.kernel import (
    NULL,
    KernelSpec,
    Launch,
    Launches,
    by_value,
    changed_by_value,
    int32s,
    launch_plan,
    load_kernel,
)
from cukit.core.parameters import parameter_structs
from cukit.core.tensor_map import TensorMapCache, encode_sequence_map, encode_tensor_map

_STRUCTS = parameter_structs(PARAMETERS)
_FORWARD = _STRUCTS["MappedForwardParameters"]
_KEYS, _QUERIES = _STRUCTS["MappedKeyParameters"], _STRUCTS["MappedQueryParameters"]
NO_FLOAT8 = _STRUCTS["Float8Settings"].pack(
    **dict.fromkeys(("q_batch", "q_head", "k_batch", "k_head", "v_batch", "v_head"), 0),
    value_tiles=0,
)
_CACHED_ENCODERS = 256
_OPTIONAL_POINTERS = len(ScoreArrays._fields) + 2  # the schedule and the block mask


@lru_cache(maxsize=_CACHED_ENCODERS)
def encoder(box: tuple[int, ...], longest: int | None = None) -> Callable[[Array], Any]:
    """A function that encodes the tensor map of an array for boxes of one shape.

    The array is [batch, seq, heads, head_dim] or [seq, heads, head_dim]. longest: the maximum
    length of packed sequences; tiles then read zeros instead of the next sequence after the last
    row of a sequence (encode_sequence_map).
    """
    if longest is None:
        # Packed sequences are rows of a single batch.
        return partial(encode_tensor_map, box=box, swizzle_bytes=None, batches=True)
    return partial(encode_sequence_map, longest=longest, box=box)


class Prologue:
    """A launch that computes an array for the main launch: its schedule, or prepared FP8 values."""

    __slots__ = ("_dtype", "_launch", "_size")

    def __init__(self, launch: Launch, size: int, dtype: npt.DTypeLike = np.int32) -> None:
        self._launch = launch
        self._size = size
        self._dtype = dtype

    def __call__(self, like: Array, *arrays: Any, into: Array | None = None) -> Array:
        """Launches on the current stream and returns the array: `into`, or a new one."""
        result = empty(like, (self._size,), self._dtype) if into is None else into
        self._launch(*arrays, result)
        return result


class MappedLaunch:
    """A launch of `flash_attention_sm90`, for arrays of the same shapes, strides and dtypes."""

    __slots__ = ("_k", "_launch", "_no_options", "_plan", "_q", "_v", "_values")

    def __init__(
        self,
        launch: Launch,
        maps: tuple[TensorMapCache, ...],
        plan: Prologue | None,
        values: Prologue | None,
        no_options: tuple[Any, ...] | None,
    ) -> None:
        """maps: of q, k and v. no_options: null pointers for all optional arrays, if the call uses
        none and needs no schedule."""
        self._launch = launch
        self._plan = plan
        self._values = values
        self._no_options = no_options
        self._q, self._k, self._v = maps

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
        more: tuple[Any, ...] = (),
        schedule: Array | None = None,
    ) -> None:
        """Launches on the current stream.

        options: ScoreArrays. descales: of FP8 inputs. more: further arguments of the kernel: the
        block table of a paged cache, and the caches themselves where the kernel reads them without
        TMA; or the arrays of a teacher. schedule: memory for the schedule; None allocates it.
        """
        pointers = self._no_options
        if pointers is None:
            plan: Any = NULL
            if self._plan is not None:
                planned = options[-2:] if block_mask is None else (block_mask,)
                plan = self._plan(q, *planned, into=schedule)
            pointers = (*options, plan, block_mask)
        values = self._v(v)
        if descales is not None:
            prepared = NULL if self._values is None else self._values(q, values, options[-1])
            pointers = (*pointers, prepared, *descales)
        self._launch(self._q(q), self._k(k), values, out, lse, *pointers, *more)


class MappedForward:
    """The loaded sm90 forward of a problem, for any options and strides, and for all lengths that
    round to the same values."""

    def __init__(self, config: WarpgroupForwardConfig) -> None:
        self.config = config
        problem = config.problem
        self.plain = not problem.features & {"alibi", "bias", "mask", "sinks", "varlen"}
        self.no_options = (by_value(np.intp(0)),) * _OPTIONAL_POINTERS
        self.launches = Launches(load_kernel(config.spec()))
        self.plan_launches = load_launches(config.plan_spec())
        self.values_launches = load_launches(config.values_spec())
        tiling, columns = config.tiling, config.box_columns(config.width)
        value_columns = config.box_columns(config.value_width)
        self.encoders = (
            encoder((1, WARPGROUP_ROWS, 1, columns)),
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
        teacher: Mapping[str, float] | None = None,
    ) -> MappedLaunch:
        """The launch for arrays of these shapes, strides and dtypes, which must have been checked.

        mask_heads: heads of a block mask. teacher: parameters of a teacher, for the divergence from
        it.
        """
        given = options, arrays
        return MappedCall(self, q, k, *given, mask_heads, teacher).launch(q, k, v, out, *given)


class MappedCall:
    """The launches of calls that differ only in lengths, batch strides and addresses.

    Parameters are packed once; a launch sets those that depend on lengths.
    """

    def __init__(
        self,
        forward: MappedForward,
        q: Array,
        k: Array,
        options: ScoreOptions,
        arrays: ScoreArrays,
        mask_heads: int = 1,
        teacher: Mapping[str, float] | None = None,
        descales: tuple[Array | None, ...] | None = None,
    ) -> None:
        """As MappedForward.launch. descales: of FP8 inputs, each float32 [], [heads_kv],
        [batch, heads_kv] or None."""
        self._forward = forward
        self._mask_heads = mask_heads
        self._descaled = descales is not None
        problem = forward.config.problem
        shape = score_shape(q, k, options, arrays)
        self._settings = score_settings(q, options, arrays, shape)
        self._parameters = _FORWARD.pack(
            out=(0, 0, 0),
            batch=shape[0],
            heads_q=shape[1],
            group=problem.group,
            seq_q=0,
            seq_kv=0,
            value_dim=problem.head_dim_v,
            mask_heads=mask_heads,
            scale_log2=scales_of(q, options)[1],
            settings=self._settings,
            float8=NO_FLOAT8 if descales is None else _float8_settings(descales),
        )
        self._teacher: tuple[Any, ...] = ()
        if teacher is not None:
            self._teacher = (by_value(_STRUCTS["TeacherParameters"].pack(**teacher)),)

    def launch(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array | None,
        options: ScoreOptions,
        arrays: ScoreArrays,
    ) -> MappedLaunch:
        """The launch for arrays of these shapes, strides and dtypes."""
        forward = self._forward
        config = forward.config
        problem = config.problem
        batch, heads_q, seq_len_q, seq_len_kv = score_shape(q, k, options, arrays)
        blocks = config.num_blocks(seq_len_q)
        changes: dict[str, Any] = {
            "out": dense_strides((*q.shape[:-1], v.shape[-1])) if out is None else strides_of(out),
            "seq_q": seq_len_q,
            "seq_kv": seq_len_kv,
        }
        if problem.varlen:
            changes["settings.total_q"] = q.shape[0]
        tiles = 0
        if self._descaled:
            tiles = changes["float8.value_tiles"] = config.value_tiles(v.shape[-3])
        parameters = changed_by_value(_FORWARD, self._parameters, changes)
        launch = forward.launches((blocks,), (*self._teacher, parameters))
        plan = values = None
        if forward.plan_launches is not None:
            mask_heads = self._mask_heads
            size = config.plan_size(seq_len_q, seq_len_kv, mask_heads)
            if problem.varlen:
                scalars = int32s(batch, heads_q, seq_len_kv, blocks)
            else:
                extents = int32s(mask_heads, seq_len_q, seq_len_kv, blocks)
                scalars = (*extents, self._settings)
            grid = (config.plan_blocks(seq_len_q, mask_heads),)
            plan = Prologue(forward.plan_launches(grid, scalars), size)
        if forward.values_launches is not None:
            assert isinstance(config.tiling, Float8Tiling)
            count = tiles * problem.num_heads_kv
            scalars = int32s(tiles, batch, seq_len_kv)
            values = Prologue(
                forward.values_launches((count,), scalars),
                count * config.tiling.value_bytes(config.value_width),
                np.uint8,
            )
        no_options = forward.no_options if plan is None and forward.plain else None
        maps = tuple(map(TensorMapCache, forward.encoders))
        return MappedLaunch(launch, maps, plan, values, no_options)


@launch_plan
def mapped_forward(
    problem: AttentionProblem, block_size: BlockSize | None = None
) -> MappedForward | None:
    """The loaded sm90 forward of a problem, cached; None where class sm90 does not cover it."""
    device = current_device()
    if not covers(problem, device):
        return None
    return MappedForward(plan_flash_attention_sm90(problem, device, block_size))


def load_launches(spec: KernelSpec | None) -> Launches | None:
    """Loads the kernel of `spec` for launches of any grid; None without a spec."""
    return None if spec is None else Launches(load_kernel(spec))


def _float8_settings(descales: tuple[Array | None, ...]) -> tuple[int, ...]:
    """Batch and head strides of the descales of q, k and v, in elements (0 where shared), and 0
    for the tiles of prepared V per KV head, which each launch sets."""
    strides: tuple[int, ...] = ()
    for factors in descales:
        steps = () if factors is None else factors.strides
        size = 1 if factors is None else factors.itemsize
        strides += (0,) * (2 - len(steps)) + tuple(step // size for step in steps)
    return *strides, 0


class InputMaps:
    """The tensor maps of q, k, v and grad_out, cached by address."""

    __slots__ = ("_grad_out", "_k", "_q", "_v")

    def __init__(self, rows: tuple[int, int], longest: tuple[int, int] | tuple[None, None]) -> None:
        """rows: queries and keys per box. longest: maximum lengths of packed sequences."""
        query_box, key_box = ((1, each, 1, BOX_COLUMNS) for each in rows)
        query_encoder, key_encoder = encoder(query_box, longest[0]), encoder(key_box, longest[1])
        self._q, self._grad_out = TensorMapCache(query_encoder), TensorMapCache(query_encoder)
        self._k, self._v = TensorMapCache(key_encoder), TensorMapCache(key_encoder)

    def __call__(self, q: Array, k: Array, v: Array, grad_out: Array) -> tuple[Any, ...]:
        return self._q(q), self._k(k), self._v(v), self._grad_out(grad_out)


class _MappedGradients:
    """A backward launch, for arrays of the same shapes, strides and dtypes."""

    __slots__ = ("_launch", "_maps", "_plan")

    def __init__(self, launch: Launch, maps: InputMaps, plan: Prologue | None) -> None:
        """plan: the schedule of variable-length sequences."""
        self._launch = launch
        self._maps = maps
        self._plan = plan


class MappedKeys(_MappedGradients):
    """A launch of `flash_attention_backward_sm90`."""

    __slots__ = ()

    def __call__(self, q: Array, k: Array, v: Array, grad_out: Array, *rest: Any) -> None:
        """Launches on the current stream."""
        lse_log2, delta, total, counters, grad_k, grad_v, *options = rest
        # With a teacher, an upstream gradient follows; with rope, its tables.
        alibi_slopes, _sinks, bias, mask, cu_seqlens_q, cu_seqlens_kv, *more = options
        plan: Any = NULL
        if self._plan is not None:
            # Swapped: plan_sequences tiles the sequences of its first argument, here the keys.
            plan = self._plan(q, cu_seqlens_kv, cu_seqlens_q)
        self._launch(
            *self._maps(q, k, v, grad_out),
            *(lse_log2, delta, counters, total, grad_k, grad_v),
            *(alibi_slopes, bias, mask, cu_seqlens_q, cu_seqlens_kv, plan, *more),
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
    """The loaded sm90 backward kernels, shared by calls that differ only in lengths.

    Parameters are packed once; a launch sets those that depend on lengths.
    """

    def __init__(
        self,
        config: WarpgroupBackwardConfig,
        q: Array,
        options: ScoreOptions,
        settings: Any,
        teacher: Mapping[str, float] | None = None,
        factor: float = 1.0,
        layout: GradientLayout | None = None,
    ) -> None:
        """settings: score_settings. teacher: parameters of a teacher, for the attention KL. factor:
        multiplies the gradients. layout: of the gradients; None: contiguous, no rope."""
        problem, splits = config.problem, config.splits
        layout = layout or GradientLayout.contiguous(problem)
        key_row, value_row = layout.key_rows(problem, splits)
        self._tables_per_sequence = bool(layout.tables_per_sequence)
        rope = config.rotates and layout.tables_per_sequence is not None
        self._keys = Launches(load_kernel(config.keys_spec(rope)))
        self._key_plan = load_launches(config.sequences_spec())
        scale, scale_log2 = scales_of(q, options)
        common = {
            "batch": problem.batch,
            "seq_q": 0,
            "seq_kv": 0,
            "rows_per_head": 0,
            "head_dim": problem.head_dim,
            "scale": scale * factor,
            "scale_log2": scale_log2,
            "settings": settings,
        }
        self._key_parameters = _KEYS.pack(
            **common,
            heads=problem.num_heads_kv * splits,
            group=problem.group // splits,
            splits=splits,
            value_dim=problem.head_dim_v,
            grad_k_row=key_row,
            grad_v_row=value_row,
            table_rows=0,
            raster_group_heads=config.key_raster_group,
            **(NO_TEACHER if teacher is None else teacher),
        )
        self._queries = self._query_plan = None
        if not config.accumulates_grad_q:
            self._queries = Launches(load_kernel(config.queries_spec()))
            self._query_plan = load_launches(config.query_sequences_spec())
            self._query_parameters = _QUERIES.pack(
                **common,
                heads_q=problem.num_heads_q,
                group=problem.group,
                grad_q_row=layout.q,
            )

    def launches(
        self,
        q: Array,
        k: Array,
        config: WarpgroupBackwardConfig,
        rows_per_head: int,
        num_sms: int,
    ) -> tuple[MappedKeys, MappedQueries | None]:
        """The dK/dV launch, and the dQ launch or, if the dK/dV launch accumulates dQ, None.

        config: for the lengths of the call. rows_per_head: of the scratch arrays. num_sms: maximum
        number of persistent blocks.
        """
        problem, splits = config.problem, config.splits
        lengths = problem.seq_len_q, problem.seq_len_kv
        heads = problem.num_heads_kv * splits
        longest: tuple[int, int] | tuple[None, None] = None, None
        changes = {"rows_per_head": rows_per_head}
        if problem.varlen:
            # No sequence is longer than all of them together.
            longest = lengths = min(lengths[0], q.shape[0]), min(lengths[1], k.shape[0])
            changes["settings.total_q"] = q.shape[0]
        changes["seq_q"], changes["seq_kv"] = lengths
        key_changes = {"table_rows": lengths[1]} if self._tables_per_sequence else {}
        maps = InputMaps((config.keys.tile_m, config.keys.tile_n), longest)
        parameters = changed_by_value(_KEYS, self._key_parameters, {**changes, **key_changes})
        blocks = config.max_key_blocks(k.shape[0])
        plan = _schedule_prologue(self._key_plan, problem.batch, heads, lengths[0], blocks)
        keys = MappedKeys(self._keys((min(blocks, num_sms),), (parameters,)), maps, plan)
        if self._queries is None:
            return keys, None
        parameters = changed_by_value(_QUERIES, self._query_parameters, changes)
        blocks = min(config.max_query_blocks(q.shape[0]), num_sms)
        launch = self._queries((blocks,), (parameters,))
        plan = _schedule_prologue(
            self._query_plan, problem.batch, problem.num_heads_q, lengths[1], blocks
        )
        maps = InputMaps((WARPGROUP_ROWS, config.queries.tile_n), longest)
        return keys, MappedQueries(launch, maps, plan)


def _schedule_prologue(
    launches: Launches | None, batch: int, heads: int, longest: int, blocks: int
) -> Prologue | None:
    if launches is None:
        return None
    scalars = int32s(batch, heads, longest, blocks)
    return Prologue(launches((1,), scalars), sequences_plan_size(batch))
