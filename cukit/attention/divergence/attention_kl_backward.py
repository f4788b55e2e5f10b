"""Gradients of the KL divergence between two models' attention distributions."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cukit.attention.divergence._kl_plan import representative_pairs
from cukit.attention.divergence._kl_reduction import reduction_factor_of, totals
from cukit.attention.divergence.kl_pairs import (
    KlOptions,
    RowArrays,
    check_optional_scalar,
    check_pairs,
    head_map_of,
    kl_options,
    mapped_teacher,
    problem_of_pairs,
    teacher_settings,
)
from cukit.attention.flash._arguments import (
    PARAMETERS,
    check_kernel_layout,
    check_sequence_ends,
    fits_tensor_maps,
    lse_shape,
    scales_of,
    score_settings,
    score_shape,
    strides_of,
)
from cukit.attention.flash._flash_launch_sm90 import MappedKernels, MappedKeys
from cukit.attention.flash._flash_plan import (
    FlashAttentionBackwardConfig,
    plan_flash_attention_backward,
)
from cukit.attention.flash._flash_plan_sm90 import (
    WarpgroupBackwardConfig,
    covers,
    plan_flash_attention_backward_sm90,
)
from cukit.attention.flash._problem import AttentionProblem, Window
from cukit.attention.flash.flash_backward import sum_launch
from cukit.core.arrays import Array, adopt, check_array, empty, float32, float64, runs_kernel
from cukit.core.device import Device, current_device
from cukit.core.kernel import NULL, KernelSpec, Launch, Launches, launch_plan, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import check_flag
from cukit.errors import ArrayError
from cukit.reference import attention_kl as reference
from cukit.registry import register

_OP = "attention_kl_backward"
_WIDEST_SM90 = 128


def attention_kl_backward(
    q_t: Array,
    k_t: Array,
    q_s: Array,
    k_s: Array,
    lse_t: Array,
    lse_s: Array,
    *,
    causal: bool = False,
    window_size: Window | None = None,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    scale_t: float | None = None,
    scale_s: float | None = None,
    head_map: Sequence[int] | None = None,
    row_weights: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    grad_loss: Any = None,
    deterministic: bool = False,
) -> tuple[Array, Array]:
    """Gradients of :func:`~cukit.attention.divergence.attention_kl.attention_kl` for the student.

        dS = w (Q - P),   dq_s = scale_s / T dS k_s,   dk_s = scale_s / T dS^T q_s

    Four matrix products per tile; the backward of attention needs five. The teacher gets no
    gradient.

    Args:
        q_t: as in the forward. The same applies to all options up to `normalizer`.
        k_t: as in the forward.
        q_s: as in the forward.
        k_s: as in the forward.
        lse_t: returned by the forward with return_lse, or passed to it.
        lse_s: as lse_t.
        grad_loss: upstream gradient, a number or a float32 0-d array; with reduction "none" a
            non-negative float32 array of the loss's shape.
        deterministic: sum grad_q_s in a fixed order, as in flash_attention_backward. grad_k_s is
            always summed in a fixed order.

    Returns:
        `(grad_q_s, grad_k_s)`, C-contiguous, dtypes and shapes of q_s and k_s.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: an option's value.

    Runs on CuPy's current stream and accumulates in float32. Scratch memory as for
    :func:`~cukit.attention.flash.flash_backward.flash_attention_backward`, without that for grad_v.
    """
    options = kl_options(
        _OP, causal, window_size, temperature, scale_by_temperature_squared, scale_t, scale_s,
        reduction, normalizer, max_seqlen_q, max_seqlen_kv,
    )  # fmt: skip
    check_flag(_OP, "deterministic", deterministic)
    q_t, k_t, q_s, k_s, *given = adopt(
        _OP, q_t, k_t, q_s, k_s, row_weights, cu_seqlens_q, cu_seqlens_kv, lse_t, lse_s
    )
    arrays = RowArrays(*given)
    normalizer, grad_loss = (
        x if x is None or isinstance(x, numbers.Real) else adopt(_OP, x)[0]
        for x in (normalizer, grad_loss)
    )
    scalars = [x for x in (normalizer, grad_loss) if not isinstance(x, numbers.Real)]
    on_gpu = runs_kernel(_OP, q_t, k_t, q_s, k_s, *arrays, *scalars)
    check_pairs(_OP, q_t, k_t, q_s, k_s, arrays, options)
    exact = (float64,) if q_s.dtype == float64 else (float32,)
    for name, lse in (("lse_t", arrays.lse_t), ("lse_s", arrays.lse_s)):
        check_array(_OP, name, lse, dtypes=exact, shape=lse_shape(q_s))
    check_optional_scalar(_OP, "normalizer", normalizer)
    each_row = options.reduction == "none" and grad_loss is not None
    check_optional_scalar(_OP, "grad_loss", grad_loss, lse_shape(q_s) if each_row else ())
    if each_row and isinstance(grad_loss, np.ndarray) and not (grad_loss >= 0).all():
        raise ArrayError(f"{_OP}: grad_loss of rows must be at least 0, got {grad_loss.min()}")
    heads = head_map_of(_OP, head_map, q_t.shape[-2], q_s.shape[-2])
    if arrays.varlen:
        check_sequence_ends(_OP, q_s, k_s, options.scores, arrays.scores)
    if not on_gpu:
        return reference.attention_kl_backward(
            q_t, k_t, q_s, k_s,
            causal=causal, window_size=options.scores.window_size,
            temperature=options.temperature,
            scale_by_temperature_squared=options.squared,
            scale_t=options.scale_t, scale_s=options.scale_s, head_map=heads,
            reduction=reduction, normalizer=normalizer, grad_loss=grad_loss,
            deterministic=deterministic, **arrays._asdict(),
        )  # fmt: skip
    q_t, k_t = mapped_teacher(q_t, k_t, heads)
    rows = grad_loss if each_row else None
    reduction_factor = reduction_factor_of(lse_shape(q_s), options, arrays.row_weights, normalizer)
    upstream: Any = None
    if reduction_factor.on_host and (
        each_row or grad_loss is None or isinstance(grad_loss, numbers.Real)
    ):
        factor = reduction_factor.value * (
            1.0 if each_row or grad_loss is None else float(grad_loss)
        )
    else:
        # The kernels take logarithms of the row weights. A gradient in GPU memory may be negative:
        # `upstream`, which contains that gradient, multiplies the results instead.
        number = isinstance(grad_loss, numbers.Real)
        factor = float(grad_loss) if number else 1.0
        grad = None if number or each_row else grad_loss
        shape = lse_shape(q_s)
        upstream = totals(q_s, None, shape, arrays.row_weights, reduction_factor, grad)[1:]
    return _gradients(
        q_t, k_t, q_s, k_s, rows, upstream, options, factor, bool(deterministic), arrays
    )


def _gradients(
    q_t: Array,
    k_t: Array,
    q_s: Array,
    k_s: Array,
    row_weights: Array | None,
    upstream: Array | None,
    options: KlOptions,
    factor: float,
    deterministic: bool,
    arrays: RowArrays,
) -> tuple[Array, Array]:
    """Launches the backward. factor, upstream: factors of the gradients, on the host and on the
    device. row_weights: one weight per head and query."""
    steps = _prepare_backward(q_t, k_t, q_s, k_s, options, factor, deterministic, *arrays)
    ends_q, ends = arrays.cu_seqlens_q, (arrays.cu_seqlens_q, arrays.cu_seqlens_kv)
    statistics = empty(q_s, (2, *steps.scratch_rows), np.float32)
    lse_s, lse_t = statistics[0], statistics[1]
    total: Any = NULL
    if steps.accumulates_grad_q:
        total = empty(q_s, (*steps.scratch_rows, steps.width), np.float32)
    counters: Any = empty(q_s, (steps.counters,), np.int32) if steps.counters else NULL
    grad_q, grad_k = empty(q_s, q_s.shape), empty(k_s, k_s.shape)
    sums = grad_k
    if steps.splits > 1:
        sums = empty(k_s, (*k_s.shape[:-1], steps.splits, k_s.shape[-1]), np.float32)
    steps.prepare(
        *(arrays.lse_s, arrays.lse_t, arrays.row_weights, row_weights),
        *(lse_s, lse_t, total, counters, ends_q),
    )
    scratch = (total, counters) if steps.counters else (total,)
    no_values, no_options = (NULL,), (NULL,) * 4
    inputs = (q_s, k_s, k_t, q_t, lse_s, lse_t)
    steps.keys(*inputs, *scratch, sums, *no_values, *no_options, *ends, upstream)
    if steps.sums is not None:
        steps.sums(sums, grad_k)
    if steps.accumulates_grad_q:
        steps.queries(total, counters, grad_q, ends_q, upstream)
    else:
        steps.queries(*inputs, grad_q, *no_options, *ends, upstream)
    return grad_q, grad_k


class _Steps(NamedTuple):
    """The launches of a backward, and the extents of its scratch arrays."""

    prepare: Launch
    keys: Launch | MappedKeys
    sums: Launch | None
    queries: Launch
    accumulates_grad_q: bool
    scratch_rows: tuple[int, int]
    counters: int
    width: int
    splits: int


@launch_plan
def _prepare_backward(
    q_t: Array,
    k_t: Array,
    q_s: Array,
    k_s: Array,
    options: KlOptions,
    factor: float,
    deterministic: bool,
    *given: Array | None,
) -> _Steps:
    arrays = RowArrays(*given)
    check_kernel_layout(_OP, q_s=q_s, k_s=k_s, q_t=q_t, k_t=k_t)
    device = current_device()
    problem = problem_of_pairs(k_t, q_s, k_s, options, arrays)
    config: FlashAttentionBackwardConfig
    mapped = fits_tensor_maps(q_s, k_s, k_t, q_t) and _covers(problem, device)
    if mapped:
        config = plan_flash_attention_backward_sm90(problem, deterministic, device)
    else:
        config = plan_flash_attention_backward(problem, deterministic, device)
    total_q = q_s.shape[0] if problem.varlen else 0
    rows = config.scratch_rows(total_q)
    student = options.student(q_s.shape[-1])
    shape = score_shape(q_s, k_s, student, arrays.scores)
    settings = score_settings(q_s, student, arrays.scores, shape)
    scale, scale_log2 = scales_of(q_s, student)
    teacher = teacher_settings(options, problem)
    structs = parameter_structs(PARAMETERS)
    rows_of = {
        "batch": problem.batch,
        "heads_q": problem.num_heads_q,
        "seq_q": problem.seq_len_q,
        "rows_per_head": rows[1],
    }
    prepare = Launch(
        load_kernel(config.prepare_spec()),
        (config.prepare_blocks(total_q),),
        (structs["KlRowParameters"].pack(**rows_of, total_q=total_q),),
    )
    strides = {
        "q": strides_of(q_s),
        "k": strides_of(k_s),
        "v": strides_of(k_t),
        "grad_out": strides_of(q_t),
    }
    common = {
        "batch": problem.batch,
        "seq_q": problem.seq_len_q,
        "seq_kv": problem.seq_len_kv,
        "rows_per_head": rows[1],
        "head_dim": problem.head_dim,
        "value_dim": problem.head_dim_v,
        "scale": scale * factor,
        "scale_log2": scale_log2,
        "settings": settings,
        **teacher,
    }
    keys: Launch | MappedKeys
    if mapped:
        assert isinstance(config, WarpgroupBackwardConfig)
        kernels = MappedKernels(config, q_s, student, settings, teacher, factor)
        keys, _ = kernels.launches(q_s, k_s, config, rows[1], device.num_sms)
    else:
        work = structs["MappedKeyParameters"].pack(
            **common,
            heads=problem.num_heads_kv * config.splits,
            group=problem.group // config.splits,
            splits=config.splits,
            grad_k_row=problem.num_heads_kv * config.splits * problem.head_dim,
            grad_v_row=0,
            table_rows=0,
            raster_group_heads=config.key_raster_group,
        )
        parameters = structs["KeyGradientParameters"].pack(**strides, work=work)
        keys = Launch(load_kernel(config.keys_spec()), (config.key_blocks,), (parameters,))
    if config.accumulates_grad_q:
        summed = structs["QuerySumParameters"].pack(
            **rows_of,
            head_dim=problem.head_dim,
            grad_q_row=problem.num_heads_q * problem.head_dim,
            table_rows=0,
            scale=scale * factor,
        )
        blocks = config.finish_blocks(total_q)
        queries = Launch(load_kernel(config.finish_spec()), (blocks,), (summed,))
    else:
        parameters = structs["QueryGradientParameters"].pack(
            **strides,
            **common,
            heads_q=problem.num_heads_q,
            group=problem.group,
            grad_q_row=problem.num_heads_q * problem.head_dim,
            raster_group_heads=config.query_raster_group,
        )
        spec = config.queries_spec()
        queries = Launch(load_kernel(spec), (config.query_blocks,), (parameters,))
    sums = None
    if config.splits > 1:
        row = problem.num_heads_kv * problem.head_dim
        sums = sum_launch(Launches(load_kernel(config.sum_spec())), config, k_s, row)
    return _Steps(
        prepare, keys, sums, queries, config.accumulates_grad_q, rows,
        config.counters(total_q), config.width, config.splits,
    )  # fmt: skip


def _covers(problem: AttentionProblem, device: Device) -> bool:
    """Whether class sm90 has an attention KL backward for this problem."""
    widest = max(problem.head_dim, problem.head_dim_v)
    return widest <= _WIDEST_SM90 and covers(problem, device)


def _backward_specs(device: Device) -> list[KernelSpec]:
    def specs(problem: AttentionProblem) -> list[KernelSpec]:
        # Deterministic variants of one width are enough.
        ways = (False, True) if problem.head_dim == 128 else (False,)
        configs = [plan_flash_attention_backward(problem, each, device) for each in ways]
        if _covers(problem, device):
            configs += [plan_flash_attention_backward_sm90(problem, each, device) for each in ways]
        return [spec for config in configs for spec in config.specs()]

    return representative_pairs(specs)


register(
    name=_OP,
    family="attention",
    function=attention_kl_backward,
    reference=reference.attention_kl_backward,
    specs=_backward_specs,
)
