"""Gradients of exact attention."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cukit.attention.flash._arguments import (
    GRADIENTS,
    NO_TEACHER,
    PARAMETERS,
    GradientLayout,
    ScoreArrays,
    ScoreOptions,
    backward_plan_key,
    check_backward,
    check_kernel_layout,
    check_sequence_ends,
    fits_tensor_maps,
    gradient_layout,
    problem_of,
    refuse_dropout,
    scales_of,
    score_options,
    score_settings,
    score_shape,
    strides_of,
)
from cukit.attention.flash._flash_fp8 import refuse_float8
from cukit.attention.flash._flash_launch_sm90 import (
    MappedKernels,
    MappedKeys,
    MappedQueries,
    load_launches,
)
from cukit.attention.flash._flash_plan import (
    FlashAttentionBackwardConfig,
    plan_flash_attention_backward,
    representative_specs,
)
from cukit.attention.flash._flash_plan_sm90 import (
    WarpgroupBackwardConfig,
    covers,
    plan_flash_attention_backward_sm90,
)
from cukit.attention.flash._problem import AttentionProblem, Window
from cukit.core.arrays import Array, adopt, adopt_arrays, empty, namespace, runs_kernel
from cukit.core.device import Device, current_device
from cukit.core.kernel import (
    NULL,
    KernelSpec,
    Launch,
    Launches,
    changed_by_value,
    int32s,
    launch_plan,
    load_kernel,
)
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import check_flag
from cukit.errors import ConfigError
from cukit.layers.rope import rope_backward
from cukit.reference import attention as reference
from cukit.registry import register

_OP = "flash_attention_backward"
_STRUCTS = parameter_structs(PARAMETERS)
_ROWS, _QUERY_SUM = _STRUCTS["RowStatisticsParameters"], _STRUCTS["QuerySumParameters"]


def flash_attention_backward(
    grad_out: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    causal: bool = False,
    window_size: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    dropout: float = 0.0,
    rope: tuple[Array, Array] | None = None,
    gradients: tuple[Array, Array, Array] | None = None,
) -> tuple[Array, ...]:
    """Gradients of :func:`~cukit.attention.flash.flash.flash_attention`.

    Args:
        grad_out: gradient of `out`; dtype and shape of out, strides as for q.
        q: as in the forward.
        k: as in the forward.
        v: as in the forward.
        out: output of the forward; strides as for q.
        lse: log-sum-exp from the forward, C-contiguous.
        causal: as in the forward.
        window_size: as in the forward.
        softcap: as in the forward.
        alibi_slopes: as in the forward. Slopes, bias and mask get no gradient.
        sinks: as in the forward.
        bias: as in the forward.
        mask: as in the forward.
        cu_seqlens_q: as in the forward.
        cu_seqlens_kv: as in the forward.
        max_seqlen_q: as in the forward.
        max_seqlen_kv: as in the forward.
        scale: as in the forward.
        deterministic: sum grad_q in a fixed order. On Hopper blocks then add one after another; on
            other GPUs two more matrix products are computed (about 30 % more time). Otherwise
            blocks add to grad_q in float32 in the order in which they finish, and its last bits
            vary from run to run. On Hopper, head_dims above 128 are always deterministic.
        dropout: must be 0: attention dropout is not supported.
        rope: the pair `(cos, sin)` with which :func:`~cukit.layers.rope.rope` has rotated q and k
            (all of head_dim, not interleaved). grad_q and grad_k are then the gradients of q and k
            before the rotation.
            float32 [max_positions, head_dim / 2], or [batch, seq_len, head_dim / 2] for positions
            other than 0, 1, 2, ... Not with cu_seqlens; q and k need equal lengths.
        gradients: the triple `(grad_q, grad_k, grad_v)` to write into, such as slices of one array:
            dtypes and shapes of q, k and v, the heads of a row adjacent, all rows equally spaced.
            They must not overlap each other or the other arguments.

    Returns:
        `(grad_q, grad_k, grad_v)`: `gradients`, or C-contiguous arrays with the dtypes and shapes
        of q, k and v; with sinks a fourth, grad_sinks, like sinks. All but grad_q are always summed
        in a fixed order.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: an option's value; rope with cu_seqlens. The contents of cu_seqlens are checked
            on the CPU only.

    Runs on CuPy's current stream and accumulates in float32. Scratch memory: two float32 per query
    and head; a float32 copy of grad_q (on Hopper for head_dims up to 128, on other GPUs unless
    deterministic); and, where there are too few KV heads to fill the GPU, several float32 copies of
    grad_k and grad_v. On Hopper, the kernels apply `rope` if head_dim is 64 or 128, v's is not
    larger, there are no such copies, and cos and sin are aligned to 16 bytes; otherwise another
    launch rotates grad_q and grad_k in place.
    Paper: Dao, FlashAttention-2, arXiv:2307.08691.

    >>> import numpy as np, cukit as ck
    >>> q, k, v = (np.random.rand(1, 3, 2, 8).astype(np.float32) for _ in range(3))
    >>> out, lse = ck.flash_attention(q, k, v, return_lse=True)
    >>> grads = ck.flash_attention_backward(np.ones_like(out), q, k, v, out, lse)
    >>> grads[2].sum(axis=1)[0, 0].round(3).tolist()
    [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    """
    refuse_float8(_OP, q, k, v)
    grad_out, q, k, v, out, lse, *given = adopt(
        _OP,
        *(grad_out, q, k, v, out, lse),
        *(alibi_slopes, sinks, bias, mask, cu_seqlens_q, cu_seqlens_kv),
    )
    arrays = ScoreArrays(*given)
    options = score_options(_OP, causal, window_size, softcap, scale, max_seqlen_q, max_seqlen_kv)
    refuse_dropout(_OP, dropout)
    check_flag(_OP, "deterministic", deterministic)
    tables = _members("rope", rope, 2)
    targets = _members("gradients", gradients, 3)
    on_gpu = runs_kernel(_OP, grad_out, q, k, v, out, lse, *arrays, *tables, *targets)
    if tables or targets or not on_gpu:
        check_backward(grad_out, q, k, v, out, lse, options, arrays)
    layout = None
    if tables or targets:
        inputs = {"grad_out": grad_out, "out": out, "lse": lse, **arrays._asdict()}
        layout = gradient_layout(_OP, (q, k, v), targets, tables, inputs)
        if on_gpu:
            check_kernel_layout(_OP, **dict(zip(GRADIENTS, targets, strict=False)))
    if not on_gpu:
        check_sequence_ends(_OP, q, k, options, arrays)
        settings = {**options._asdict(), **arrays._asdict()}
        results = reference.flash_attention_backward(
            grad_out, q, k, v, out, lse, deterministic=deterministic, **settings
        )
        results = tuple(map(np.ascontiguousarray, results))
        for target, result in zip(targets, results, strict=False):
            target[...] = result
        results = (*targets, *results[len(targets) :])
        return (*_undo_rope(results[0], results[1], tables), *results[2:])
    steps = _prepare_backward(
        grad_out, q, k, v, out, lse, options, bool(deterministic), layout, *arrays
    )
    if arrays.varlen:
        check_sequence_ends(_OP, q, k, options, arrays)
    ends_q = arrays.cu_seqlens_q
    statistics = empty(q, (2, *steps.scratch_rows), np.float32)
    lse_log2, delta = statistics[0], statistics[1]
    grad_q, grad_k, grad_v = targets or (empty(x, x.shape) for x in (q, k, v))
    total: Any = NULL
    if steps.accumulates_grad_q:
        total = empty(q, (*steps.scratch_rows, steps.width), np.float32)
    counters: Any = empty(q, (steps.counters,), np.int32) if steps.counters else NULL
    sums = [grad_k, grad_v]
    if steps.splits > 1:
        sums = [empty(x, (*x.shape[:-1], steps.splits, x.shape[-1]), np.float32) for x in (k, v)]

    steps.prepare(out, grad_out, lse, lse_log2, delta, total, counters, ends_q)
    scratch = (total, counters) if steps.counters else (total,)
    kernel_tables = tables if steps.rotates else ()
    steps.keys(q, k, v, grad_out, lse_log2, delta, *scratch, *sums, *arrays, *kernel_tables)
    if steps.sums is not None:
        for add, partial, gradient in zip(steps.sums, sums, (grad_k, grad_v), strict=True):
            add(partial, gradient)
    if steps.accumulates_grad_q:
        steps.queries(total, counters, grad_q, ends_q, *kernel_tables)
    else:
        steps.queries(q, k, v, grad_out, lse_log2, delta, grad_q, *arrays)
    if not steps.rotates:
        grad_q, grad_k = _undo_rope(grad_q, grad_k, tables)
    if steps.sinks is None:
        return grad_q, grad_k, grad_v
    grad_sinks = empty(q, arrays.sinks.shape, np.float32)  # type: ignore[union-attr]
    steps.sinks(lse_log2, delta, arrays.sinks, grad_sinks)
    return grad_q, grad_k, grad_v, grad_sinks


def _members(name: str, arrays: Any, count: int) -> tuple[Array, ...]:
    """The members of an optional tuple of `count` arrays; empty for None."""
    if arrays is None:
        return ()
    members = tuple(adopt_arrays(_OP, name, arrays))
    if len(members) != count:
        raise ConfigError(f"{_OP}: {name} must have {count} arrays, got {len(members)}")
    return members


def _undo_rope(grad_q: Array, grad_k: Array, tables: tuple[Array, ...]) -> tuple[Array, Array]:
    """Rotates grad_q and grad_k in place by the opposite angles, if there are tables."""
    if not tables:
        return grad_q, grad_k
    cos, sin = tables
    positions = None
    if cos.ndim == 3:
        batch, seq_len, half = cos.shape
        cos, sin = cos.reshape(-1, half), sin.reshape(-1, half)
        positions = namespace(cos).arange(batch * seq_len, dtype=np.int32).reshape(batch, seq_len)
    return rope_backward(grad_q, grad_k, cos, sin, positions, inplace=True)


class _BackwardSteps(NamedTuple):
    """The launches of a backward, and the extents of its scratch arrays."""

    prepare: Launch
    keys: Launch | MappedKeys
    sums: tuple[Launch, Launch] | None
    queries: Launch | MappedQueries
    sinks: Launch | None
    accumulates_grad_q: bool
    """Whether `keys` accumulates dQ in scratch, which `queries` then converts."""
    scratch_rows: tuple[int, int]
    counters: int
    """FlashAttentionBackwardConfig.counters."""
    width: int
    splits: int
    rotates: bool
    """Whether `keys` and `queries` take the tables of rope."""


class _BackwardKernels(NamedTuple):
    """The loaded kernels, shared by calls that differ only in lengths."""

    config: FlashAttentionBackwardConfig
    """For the rounded lengths."""
    statistics: Any
    """Packed parameters of `prepare`, without lengths and strides."""
    summed: Any
    """Packed parameters of the kernel that converts the dQ accumulators, without lengths."""
    prepare: Launches
    keys: Launches | MappedKernels
    sums: Launches | None
    queries: Launches | None
    """The kernel that converts the dQ accumulators, or the dQ kernel; None if `keys` includes the
    dQ kernel."""
    sinks: Launches | None


def _planned_backward(
    grad_out: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    options: ScoreOptions,
    deterministic: bool,
    layout: GradientLayout | None,
    *given: Array | None,
) -> _BackwardKernels:
    """Checks a call and loads its kernels, for all lengths that round to the same values."""
    arrays = ScoreArrays(*given)
    check_backward(grad_out, q, k, v, out, lse, options, arrays)
    check_kernel_layout(_OP, grad_out=grad_out, q=q, k=k, v=v, out=out)
    problem = problem_of(q, k, v, options, arrays, rounded=True)
    layout = layout or GradientLayout.contiguous(problem)
    device = current_device()
    config: FlashAttentionBackwardConfig
    keys: Launches | MappedKernels
    queries: KernelSpec | None
    if fits_tensor_maps(q, k, v, grad_out) and covers(problem, device):
        config = plan_flash_attention_backward_sm90(problem, deterministic, device)
        rotates = config.rotates and layout.tables_per_sequence is not None
        shape = score_shape(q, k, options, arrays)
        settings = score_settings(q, options, arrays, shape)
        keys = MappedKernels(config, q, options, settings, layout=layout)
        queries = config.finish_spec(rotates) if config.accumulates_grad_q else None
    else:
        config = plan_flash_attention_backward(problem, deterministic, device)
        keys = Launches(load_kernel(config.keys_spec()))
        queries = config.finish_spec() if config.accumulates_grad_q else config.queries_spec()
    rows_of = {
        "batch": problem.batch,
        "heads_q": problem.num_heads_q,
        "seq_q": 0,
        "rows_per_head": 0,
    }
    no_strides = 0, 0, 0
    return _BackwardKernels(
        config,
        _ROWS.pack(
            **rows_of, out=no_strides, grad_out=no_strides, total_q=0, value_dim=problem.head_dim_v
        ),
        _QUERY_SUM.pack(
            **rows_of,
            head_dim=problem.head_dim,
            grad_q_row=layout.q,
            table_rows=0,
            scale=scales_of(q, options)[0],
        ),
        Launches(load_kernel(config.prepare_spec())),
        keys,
        load_launches(config.sum_spec() if config.splits > 1 else None),
        load_launches(queries),
        load_launches(config.sinks_spec() if problem.sinks else None),
    )


@partial(launch_plan, plan=_planned_backward, shorten=backward_plan_key)
def _prepare_backward(
    kernels: _BackwardKernels,
    grad_out: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    options: ScoreOptions,
    deterministic: bool,
    layout: GradientLayout | None,
    *given: Array | None,
) -> _BackwardSteps:
    arrays = ScoreArrays(*given)
    shape = score_shape(q, k, options, arrays)
    config = kernels.config.at_lengths(*shape[2:])
    problem = config.problem
    layout = layout or GradientLayout.contiguous(problem)
    total_q = q.shape[0] if problem.varlen else 0
    rows = config.scratch_rows(total_q)
    splits = config.splits
    lengths = {"seq_q": problem.seq_len_q, "rows_per_head": rows[1]}
    strides_out, strides_grad_out = strides_of(out), strides_of(grad_out)
    statistics = changed_by_value(
        _ROWS,
        kernels.statistics,
        {**lengths, "out": strides_out, "grad_out": strides_grad_out, "total_q": total_q},
    )
    prepare = kernels.prepare((config.prepare_blocks(total_q),), (statistics,))
    keys: Launch | MappedKeys
    queries: Launch | MappedQueries | None = None
    if isinstance(kernels.keys, MappedKernels):
        assert isinstance(config, WarpgroupBackwardConfig)
        keys, queries = kernels.keys.launches(q, k, config, rows[1], current_device().num_sms)
    else:
        strides = {
            "q": strides_of(q),
            "k": strides_of(k),
            "v": strides_of(v),
            "grad_out": strides_grad_out,
        }
        factor, factor_log2 = scales_of(q, options)
        common = {
            "batch": problem.batch,
            "seq_q": problem.seq_len_q,
            "seq_kv": problem.seq_len_kv,
            "rows_per_head": rows[1],
            "head_dim": problem.head_dim,
            "value_dim": problem.head_dim_v,
            "scale": factor,
            "scale_log2": factor_log2,
            "settings": score_settings(q, options, arrays, shape),
        }
        key_row, value_row = layout.key_rows(problem, splits)
        work = _STRUCTS["MappedKeyParameters"].pack(
            **common,
            heads=problem.num_heads_kv * splits,
            group=problem.group // splits,
            splits=splits,
            grad_k_row=key_row,
            grad_v_row=value_row,
            table_rows=0,
            raster_group_heads=config.key_raster_group,
            **NO_TEACHER,
        )
        parameters = _STRUCTS["KeyGradientParameters"].pack(**strides, work=work)
        keys = kernels.keys((config.key_blocks,), (parameters,))
        if not config.accumulates_grad_q:
            assert kernels.queries is not None
            parameters = _STRUCTS["QueryGradientParameters"].pack(
                **strides,
                **common,
                heads_q=problem.num_heads_q,
                group=problem.group,
                grad_q_row=layout.q,
                raster_group_heads=config.query_raster_group,
                **NO_TEACHER,
            )
            queries = kernels.queries((config.query_blocks,), (parameters,))
    if queries is None:
        assert kernels.queries is not None
        if layout.tables_per_sequence:
            lengths["table_rows"] = problem.seq_len_q
        summed = changed_by_value(_QUERY_SUM, kernels.summed, lengths)
        queries = kernels.queries((config.finish_blocks(total_q),), (summed,))
    sums = None
    if kernels.sums is not None:
        sums = (
            sum_launch(kernels.sums, config, k, layout.k),
            sum_launch(kernels.sums, config, v, layout.v),
        )
    sinks = None
    if kernels.sinks is not None:
        parts = np.int32(rows[0] // problem.num_heads_q)
        scalars = (parts, np.int32(problem.num_heads_q), np.int32(rows[1]))
        sinks = kernels.sinks((problem.num_heads_q,), scalars)
    return _BackwardSteps(
        *(prepare, keys, sums, queries, sinks),
        *(config.accumulates_grad_q, rows, config.counters(total_q), config.width, splits),
        config.rotates and layout.tables_per_sequence is not None,
    )


def sum_launch(
    launches: Launches, config: FlashAttentionBackwardConfig, x: Array, row_stride: int
) -> Launch:
    """The launch that reduces the splits of the gradient of k or v.

    row_stride: elements from one row of the gradient to the next.
    """
    *_, heads, head_dim = x.shape
    rows = x.size // (heads * head_dim)
    scalars = np.int64(rows), *int32s(heads, config.splits, head_dim, row_stride)
    return launches((config.sum_blocks(rows * heads, head_dim),), scalars)


def _backward_specs(device: Device) -> list[KernelSpec]:
    def specs(problem: AttentionProblem) -> list[KernelSpec]:
        configs = [
            plan_flash_attention_backward(problem, deterministic, device)
            for deterministic in (False, True)
        ]
        if covers(problem, device):
            configs += [
                plan_flash_attention_backward_sm90(problem, deterministic, device)
                for deterministic in (False, True)
            ]
        return [spec for config in configs for spec in config.specs()]

    return representative_specs(specs)


register(
    name=_OP,
    family="attention",
    function=flash_attention_backward,
    reference=reference.flash_attention_backward,
    specs=_backward_specs,
)
