"""KL divergence between the attention distributions of a teacher and a student."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from cukit.attention.divergence._kl_plan import (
    KnownLse,
    WarpgroupKlConfig,
    attention_with_kl_specs,
    plan_attention_kl,
    plan_attention_kl_sm90,
    representative_pairs,
)
from cukit.attention.divergence._kl_reduction import reduced, sum_spec, total_spec
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
from cukit.attention.flash._flash_launch_sm90 import Prologue, encoder, load_launches
from cukit.attention.flash._flash_plan_sm90 import covers, sequences_plan_size
from cukit.attention.flash._flash_tilings import BOX_COLUMNS, WARPGROUP_ROWS
from cukit.attention.flash._problem import AttentionProblem, Window
from cukit.core.arrays import Array, adopt, empty, runs_kernel
from cukit.core.device import Device, current_device
from cukit.core.kernel import NULL, KernelSpec, Launch, int32s, launch_plan, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import check_flag
from cukit.core.tensor_map import TensorMapCache
from cukit.reference import attention_kl as reference
from cukit.registry import register

_OP = "attention_kl"


def attention_kl(
    q_t: Array,
    k_t: Array,
    q_s: Array,
    k_s: Array,
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
    lse_t: Array | None = None,
    lse_s: Array | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    precise: bool = False,
    return_lse: bool = False,
) -> Array | tuple[Array, Array, Array]:
    """KL(teacher || student) of attention distributions, without materialising either of them:

        P = softmax(scale_t q_t k_t^T / T),  Q = softmax(scale_s q_s k_s^T / T)
        KL(b, h, i) = sum_j P_ij (ln P_ij - ln Q_ij)

    Both models have the same mask. A fully masked query has a divergence of 0. Memory is
    O(seq_len): scores are computed and reduced tile by tile.

    Args:
        q_t: the teacher's queries, float16|bfloat16 [batch, seq_len_q, num_heads_t, head_dim_t];
            on the CPU float32|float64 too. Strides as for flash_attention.
        k_t: the teacher's keys, [batch, seq_len_kv, num_kv_heads_t, head_dim_t].
        q_s: the student's queries, [batch, seq_len_q, num_heads_s, head_dim_s]; dtype of q_t.
        k_s: the student's keys, [batch, seq_len_kv, num_kv_heads_s, head_dim_s].
        causal, window_size: as in flash_attention.
        temperature: T, above 0.
        scale_by_temperature_squared: multiply the loss by T^2.
        scale_t, scale_s: factors of the scores; default 1 / sqrt(head_dim).
        head_map: the teacher's head for each of the student's heads; default
            `h * num_heads_t // num_heads_s`. Equally spaced heads are read in place; other maps
            copy the teacher's arrays.
        row_weights: float32 [batch, seq_len_q], non-negative weights of the queries; 0 excludes a
            query, whatever its values.
        cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv: packed variable-length sequences,
            as in flash_attention; q_t and q_s are then [total_q, heads, head_dim], row_weights
            [total_q].
        lse_t: float32 [batch, num_heads_s, seq_len_q] (with cu_seqlens [num_heads_s, total_q]), the
            log-sum-exps of the teacher's scores at temperature T, one per head of the student, as
            returned by an earlier call or, at T = 1, by flash_attention. Saves the teacher's online
            softmax.
        lse_s: the same for the student.
        reduction: "mean" over heads and weighted queries, "sum", or "none".
        normalizer: the divisor of "mean", in place of the total weight (or number) of queries: a
            number or a float32 0-d array, such as the query count of all batches that a step
            accumulates. "mean" still averages over heads.
        precise: sum only non-negative terms. The relative error then stays small however close the
            models are; otherwise there is an absolute error of about 1e-6. `precise` takes a second
            pass over the scores if an lse is missing, and two exponentials per score.
        return_lse: also return both log-sum-exps, which the backward needs.

    Returns:
        The loss, float32 0-d (float64 for float64 inputs); for "none" [batch, num_heads_s,
        seq_len_q] or [num_heads_s, total_q]. With `return_lse`, `(loss, lse_t, lse_s)`, shapes as
        above.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: an option's value. The contents of cu_seqlens are checked on the CPU only.

    Runs on CuPy's current stream, accumulates in float32 and is deterministic. head_dim of each
    model is a multiple of 8 up to 256 on the GPU.
    Papers: Wang et al., MiniLM, arXiv:2002.10957; Dao, FlashAttention-2, arXiv:2307.08691.

    >>> import numpy as np, cukit as ck
    >>> q, k = np.ones((1, 1, 1, 8), np.float32), np.zeros((1, 2, 1, 8), np.float32)
    >>> k[0, 0] = np.log(3) / np.sqrt(8)  # the teacher's probabilities are 3/4 and 1/4
    >>> round(float(ck.attention_kl(q, k, q, np.zeros_like(k))), 4)  # the student's 1/2 and 1/2
    0.1308
    """
    options = kl_options(
        _OP, causal, window_size, temperature, scale_by_temperature_squared, scale_t, scale_s,
        reduction, normalizer, max_seqlen_q, max_seqlen_kv,
    )  # fmt: skip
    check_flag(_OP, "precise", precise)
    check_flag(_OP, "return_lse", return_lse)
    q_t, k_t, q_s, k_s, *given = adopt(
        _OP, q_t, k_t, q_s, k_s, row_weights, cu_seqlens_q, cu_seqlens_kv, lse_t, lse_s
    )
    arrays = RowArrays(*given)
    if normalizer is not None and not isinstance(normalizer, numbers.Real):
        (normalizer,) = adopt(_OP, normalizer)
    on_gpu = runs_kernel(_OP, q_t, k_t, q_s, k_s, *arrays, _array_or_none(normalizer))
    check_pairs(_OP, q_t, k_t, q_s, k_s, arrays, options)
    check_optional_scalar(_OP, "normalizer", normalizer)
    heads = head_map_of(_OP, head_map, q_t.shape[-2], q_s.shape[-2])
    if arrays.varlen:
        check_sequence_ends(_OP, q_s, k_s, options.scores, arrays.scores)
    if not on_gpu:
        return reference.attention_kl(
            q_t, k_t, q_s, k_s,
            causal=causal, window_size=options.scores.window_size,
            temperature=options.temperature,
            scale_by_temperature_squared=options.squared,
            scale_t=options.scale_t, scale_s=options.scale_s, head_map=heads,
            reduction=reduction, normalizer=normalizer, return_lse=return_lse,
            **arrays._asdict(),
        )  # fmt: skip
    q_t, k_t = mapped_teacher(q_t, k_t, heads)
    rows, top_t, top_s = divergence_rows(
        q_t, k_t, q_s, k_s, options, arrays, bool(precise), return_lse
    )
    loss = reduced(rows, options, arrays, normalizer)
    return (loss, top_t, top_s) if return_lse else loss


def _array_or_none(value: Any) -> Array | None:
    return None if isinstance(value, numbers.Real) else value


def divergence_rows(
    q_t: Array,
    k_t: Array,
    q_s: Array,
    k_s: Array,
    options: KlOptions,
    arrays: RowArrays,
    precise: bool,
    keep_lse: bool,
) -> tuple[Array, Array | None, Array | None]:
    """The divergence of each row, float32, and both lse, each None if neither given nor computed.
    Runs on the GPU.

    q_t, k_t: from `mapped_teacher`.
    """
    lse_t, lse_s = arrays.lse_t, arrays.lse_s
    shape = lse_shape(q_s)
    inputs = (q_s, k_s, q_t, k_t)
    ends = (arrays.cu_seqlens_q, arrays.cu_seqlens_kv)
    known = KnownLse(lse_t is not None, lse_s is not None)
    sweeps = [(known, not precise)]
    if precise:
        ready = KnownLse(True, True, True)
        sweeps = (
            [(ready, True)] if known.teacher and known.student else [(known, False), (ready, True)]
        )
    rows = empty(q_s, shape, np.float32)
    for sweep, last in sweeps:
        launch = _prepare_sweep(*inputs, options, sweep, *arrays)
        found: list[Any] = [NULL, NULL]
        if keep_lse or not last:
            found = [
                NULL if there else empty(q_s, shape, np.float32)
                for there in (sweep.teacher, sweep.student)
            ]
        launch(*inputs, lse_t, lse_s, rows if last else NULL, *found, *ends)
        if found[0] is not NULL:
            lse_t = found[0]
        if found[1] is not NULL:
            lse_s = found[1]
    return rows, lse_t, lse_s


@launch_plan
def _prepare_sweep(
    q_s: Array,
    k_s: Array,
    q_t: Array,
    k_t: Array,
    options: KlOptions,
    known: KnownLse,
    *given: Array | None,
) -> Launch | MappedSweep:
    arrays = RowArrays(*given)
    check_kernel_layout(_OP, q_s=q_s, k_s=k_s, q_t=q_t, k_t=k_t)
    problem = problem_of_pairs(k_t, q_s, k_s, options, arrays)
    device = current_device()
    student = options.student(q_s.shape[-1])
    shape = score_shape(q_s, k_s, student, arrays.scores)
    settings = score_settings(q_s, student, arrays.scores, shape)
    scale, scale_log2 = scales_of(q_s, student)
    if covers(problem, device) and fits_tensor_maps(q_s, k_s, q_t, k_t):
        parameters = parameter_structs(PARAMETERS)["MappedKlParameters"].pack(
            batch=problem.batch,
            heads_q=problem.num_heads_q,
            group=problem.group,
            seq_q=problem.seq_len_q,
            seq_kv=problem.seq_len_kv,
            scale_log2=scale_log2,
            **teacher_settings(options, problem),
            settings=settings,
        )
        return MappedSweep(plan_attention_kl_sm90(problem, known, device), parameters)
    config = plan_attention_kl(problem, known, device)
    parameters = parameter_structs(PARAMETERS)["QueryGradientParameters"].pack(
        q=strides_of(q_s),
        k=strides_of(k_s),
        v=strides_of(k_t),
        grad_out=strides_of(q_t),
        batch=problem.batch,
        heads_q=problem.num_heads_q,
        group=problem.group,
        seq_q=problem.seq_len_q,
        seq_kv=problem.seq_len_kv,
        rows_per_head=0,
        head_dim=problem.head_dim,
        value_dim=problem.head_dim_v,
        grad_q_row=0,
        raster_group_heads=config.raster_group,
        scale=scale,
        scale_log2=scale_log2,
        **teacher_settings(options, problem),
        settings=settings,
    )
    grid = (config.num_blocks(problem.seq_len_q),)
    return Launch(load_kernel(config.spec()), grid, (parameters,))


class MappedSweep:
    """A launch of `attention_kl_sm90`, for arrays of the same shapes, strides and dtypes."""

    __slots__ = ("_launch", "_maps", "_plan")

    def __init__(self, config: WarpgroupKlConfig, parameters: Any) -> None:
        """parameters: MappedKlParameters."""
        problem = config.problem
        blocks = config.num_blocks(problem.seq_len_q)
        self._launch = Launch(load_kernel(config.spec()), (blocks,), (parameters,))
        boxes = ((1, rows, 1, BOX_COLUMNS) for rows in (WARPGROUP_ROWS, config.tiling.tile_n) * 2)
        self._maps = tuple(TensorMapCache(encoder(box)) for box in boxes)
        self._plan: Prologue | None = None
        sort = load_launches(config.plan_spec())
        if sort is not None:
            scalars = (problem.batch, problem.num_heads_q, problem.seq_len_kv, blocks)
            launch = sort((1,), int32s(*scalars))
            self._plan = Prologue(launch, sequences_plan_size(problem.batch))

    def __call__(self, q_s: Array, k_s: Array, q_t: Array, k_t: Array, *rows: Any) -> None:
        """Launches on the current stream. rows: KlRowArrays, then both cu_seqlens."""
        ends = rows[-2:]
        plan: Any = NULL if self._plan is None else self._plan(q_s, *ends)
        maps = (encode(x) for encode, x in zip(self._maps, (q_t, k_t, q_s, k_s), strict=True))
        self._launch(*maps, *rows, plan)


def _sweep_specs(device: Device) -> list[KernelSpec]:
    def specs(problem: AttentionProblem) -> list[KernelSpec]:
        both = KnownLse(True, True)
        chosen = [KnownLse(), both]
        if problem.head_dim == 128 and not problem.causal:
            chosen += [KnownLse(True, False), KnownLse(False, True), KnownLse(True, True, True)]
        found = [plan_attention_kl(problem, known, device).spec() for known in chosen]
        if covers(problem, device):
            for known in chosen:
                config = plan_attention_kl_sm90(problem, known, device)
                plan = config.plan_spec()
                found += [config.spec(), *(() if plan is None else (plan,))]
        return found

    one_pass = attention_with_kl_specs(device)
    totals = sum_spec(), total_spec(False), total_spec(True)
    return [*representative_pairs(specs), *one_pass, *totals]


register(
    name=_OP,
    family="attention",
    function=attention_kl,
    reference=reference.attention_kl,
    specs=_sweep_specs,
)
