"""KL divergence between attention and the sparse-attention indexer that predicts it."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import numpy as np

from cukit.attention.divergence._indexer_plan import IndexerConfig, indexer_specs, plan_indexer_kl
from cukit.attention.divergence._kl_reduction import reduced, sum_spec, total_spec
from cukit.attention.divergence.kl_pairs import (
    KlOptions,
    RowArrays,
    check_optional_scalar,
    check_row_weights,
    kl_options,
)
from cukit.attention.flash._arguments import (
    LOG2_E,
    PARAMETERS,
    check_head_counts,
    check_head_dim,
    check_kernel_layout,
    check_sequence_ends,
    check_sequences,
    lse_shape,
    score_settings,
    score_shape,
    strides_of,
)
from cukit.attention.flash._problem import AttentionProblem
from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    adopt,
    check_array,
    check_same_dtype,
    empty,
    float32,
    float64,
    namespace,
    runs_kernel,
)
from cukit.core.device import Device, current_device
from cukit.core.kernel import NULL, KernelSpec, Launch, int32s, launch_plan, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import check_flag, check_number
from cukit.errors import ArrayShapeError
from cukit.reference import indexer_kl as reference
from cukit.registry import register

_OP = "indexer_kl"
_GRADIENT_UNIT = 64.0  # kernels_cu/attention/indexer_work.cuh
_STATISTICS = 5  # per query and span
_BITS = 32


def indexer_kl(
    q_t: Array,
    k_t: Array,
    lse_t: Array,
    q_s: Array,
    k_s: Array,
    weights: Array,
    *,
    topk_indices: Array | None = None,
    causal: bool = False,
    scale_t: float | None = None,
    scale_s: float = 1.0,
    row_weights: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    return_statistics: bool = False,
) -> Array | tuple[Array, Array, Array]:
    """KL(attention || indexer) between attention, summed over its heads, and its sparse indexer:

        P_ij = sum_h exp(scale_t q_t[i,h] k_t[j] - lse_t[i,h]),   p_i = P_i / sum_j P_ij
        I_ij = scale_s sum_h weights[i,h] max(0, q_s[i,h] k_s[j])
        KL(b, i) = sum_j p_ij (ln p_ij - ln softmax(I_i)_j)

    over the visible keys in `topk_indices`. This loss trains the lightning indexer of
    DeepSeek-V3.2: over all keys while attention is dense, over the selected ones afterwards. No
    score matrix is materialised. A query without keys, or without attention on its keys, has a
    divergence of 0.

    Args:
        q_t: the queries of attention, float16|bfloat16 [batch, seq_len_q, num_heads_t, head_dim_t];
            on the CPU float32|float64 too. Strides as for flash_attention.
        k_t: its keys, [batch, seq_len_kv, num_kv_heads_t, head_dim_t].
        lse_t: its log-sum-exps, float32 [batch, num_heads_t, seq_len_q], as flash_attention returns
            them. Log-sum-exps of sparse attention work as well: all heads then have equal weight
            on the selected keys.
        q_s: the indexer's queries, [batch, seq_len_q, num_heads_s, head_dim_s]; dtype of q_t.
        k_s: its keys, one head, [batch, seq_len_kv, head_dim_s].
        weights: head weights, float32 [batch, seq_len_q, num_heads_s], of any sign.
        topk_indices: int32 [batch, seq_len_q, top_k], keys of the query's own sequence in any
            order; values outside the sequence are ignored, and masked keys stay masked. All scores
            are still computed, so a selection saves no time.
        causal: as in flash_attention.
        scale_t: factor of the attention's scores; default 1 / sqrt(head_dim_t).
        scale_s: factor of the indexer's scores, above 0.
        row_weights: float32 [batch, seq_len_q], non-negative weights of the queries; 0 excludes a
            query.
        cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv: packed variable-length sequences,
            as in flash_attention; arrays then have no batch axis, and lse_t is
            [num_heads_t, total_q].
        reduction: "mean" over weighted queries, "sum", or "none".
        normalizer: the divisor of "mean", in place of the queries' weight, as in attention_kl.
        return_statistics: also return lse_s and mass_t, which the backward needs.

    Returns:
        The loss, float32 0-d (float64 for float64 inputs); for "none" [batch, seq_len_q] or
        [total_q]. With `return_statistics`, `(loss, lse_s, mass_t)`, where lse_s and mass_t have
        one value per query: the log-sum-exp of the indexer's scores, and the attention mass of the
        keys, averaged over heads (1 without `topk_indices`, else the recall of the selection).

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: an option's value. The contents of cu_seqlens are checked on the CPU only.

    Runs on CuPy's current stream, accumulates in float32 and is deterministic. On the GPU both
    head_dims are multiples of 8 up to 256. Scratch memory: at most 640 bytes per query, rounded up
    to whole tiles; with topk_indices also one bit per query and key, for chunks of queries whose
    bits fit in 128 MiB.
    Paper: DeepSeek-AI, DeepSeek-V3.2, arXiv:2512.02556.

    >>> import numpy as np, cukit as ck
    >>> q, k = np.ones((1, 1, 1, 8), np.float32), np.zeros((1, 2, 1, 8), np.float32)
    >>> k[0, 0] = np.log(3) / np.sqrt(8)  # attention's probabilities are 3/4 and 1/4
    >>> lse, w = np.full((1, 1, 1), np.log(4), np.float32), np.ones((1, 1, 1), np.float32)
    >>> round(float(ck.indexer_kl(q, k, lse, q, 0 * k[:, :, 0], w)), 4)  # the indexer's 1/2, 1/2
    0.1308
    """
    call = indexer_call(
        _OP, (q_t, k_t, lse_t, q_s, k_s, weights, topk_indices), (None, None),
        row_weights, cu_seqlens_q, cu_seqlens_kv, causal, scale_t, scale_s, max_seqlen_q,
        max_seqlen_kv, reduction, normalizer,
    )  # fmt: skip
    check_flag(_OP, "return_statistics", return_statistics)
    if not call.on_gpu:
        return reference.indexer_kl(
            *call.inputs[:-1], topk_indices=call.inputs[-1], **call.reference_options(),
            return_statistics=return_statistics,
        )  # fmt: skip
    q_t, k_t, lse_t, q_s, k_s, weights, indices = call.inputs
    options = call.options
    steps = prepare_indexer(
        _OP, q_t, k_t, q_s, k_s, weights, indices, options, False, 1.0, *call.statistics,
        *call.arrays,
    )  # fmt: skip
    config = steps.config
    shape = q_s.shape[:-2]
    kl = empty(q_s, shape, np.float32)
    lse_s = mass_t = None
    if return_statistics:
        lse_s, mass_t = (empty(q_s, shape, np.float32) for _ in range(2))
    by_head = heads_first(weights)
    ends = call.arrays.cu_seqlens_q, call.arrays.cu_seqlens_kv
    partials = empty(q_s, (config.spans * _STATISTICS * config.chunk_rows,), np.float32)
    bits = selection_scratch(q_s, steps)
    for first in range(0, config.tiles, config.chunk_tiles):
        chunk = (np.int32(first),)
        if steps.mark is not None:
            steps.mark(indices, bits, *ends, trailing_args=chunk)
        steps.sweep(q_t, k_t, lse_t, q_s, k_s, by_head, bits, partials, *ends, trailing_args=chunk)
        assert steps.rows is not None
        steps.rows(partials, kl, lse_s, mass_t, *ends, trailing_args=chunk)
    rows = kl[None] if call.arrays.varlen else kl[:, None]
    loss = reduced(rows, call.options, call.arrays, call.normalizer)
    if reduction == "none":
        loss = kl
    return (loss, lse_s, mass_t) if return_statistics else loss


class IndexerCall(NamedTuple):
    """The adopted and checked arguments of a forward or backward."""

    inputs: tuple[Any, ...]
    """q_t, k_t, lse_t, q_s, k_s, weights, topk_indices."""
    arrays: RowArrays
    """Without lse_t and lse_s, which `inputs` and `statistics` hold."""
    statistics: tuple[Array | None, Array | None]
    """The forward's lse_s and mass_t, which only the backward takes."""
    options: KlOptions
    normalizer: Any
    on_gpu: bool

    def reference_options(self) -> dict[str, Any]:
        """The options as keyword arguments of the reference."""
        scores, arrays = self.options.scores, self.arrays
        return {
            "causal": scores.causal,
            "scale_t": self.options.scale_t,
            "scale_s": self.options.scale_s,
            "row_weights": arrays.row_weights,
            "cu_seqlens_q": arrays.cu_seqlens_q,
            "cu_seqlens_kv": arrays.cu_seqlens_kv,
            "reduction": self.options.reduction,
            "normalizer": self.normalizer,
        }


def indexer_call(
    op: str,
    inputs: tuple[Any, ...],
    statistics: tuple[Any, Any],
    row_weights: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    causal: bool,
    scale_t: float | None,
    scale_s: float,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    reduction: str,
    normalizer: Any,
    *others: Any,
) -> IndexerCall:
    """Adopts and checks the arguments.

    statistics: lse_s and mass_t of a backward. others: further arrays that must be on the same
    device.
    """
    check_number(op, "scale_s", scale_s, above=0)  # None would mean attention's default scale
    options = kl_options(
        op, causal, None, 1.0, False, scale_t, scale_s, reduction, normalizer, max_seqlen_q,
        max_seqlen_kv,
    )  # fmt: skip
    *adopted, lse_s, mass_t, row_weights, cu_q, cu_kv = adopt(
        op, *inputs, *statistics, row_weights, cu_seqlens_q, cu_seqlens_kv
    )
    arrays = RowArrays(row_weights, cu_q, cu_kv, None, None)
    if normalizer is not None and not isinstance(normalizer, numbers.Real):
        (normalizer,) = adopt(op, normalizer)
    scalar = None if isinstance(normalizer, numbers.Real) else normalizer
    on_gpu = runs_kernel(op, *adopted, *arrays, lse_s, mass_t, scalar, *others)
    _check(op, tuple(adopted), arrays, (lse_s, mass_t), options)
    check_optional_scalar(op, "normalizer", normalizer)
    if arrays.varlen:
        check_sequence_ends(op, adopted[3], adopted[4], options.scores, arrays.scores)
    return IndexerCall(tuple(adopted), arrays, (lse_s, mass_t), options, normalizer, on_gpu)


def _check(
    op: str,
    inputs: tuple[Any, ...],
    arrays: RowArrays,
    statistics: tuple[Array | None, Array | None],
    options: KlOptions,
) -> None:
    """Checks shapes and dtypes, on either device."""
    q_t, k_t, lse_t, q_s, k_s, weights, indices = inputs
    check_sequences(op, options.scores, arrays.scores)
    axes = 3 if arrays.varlen else 4
    check_array(op, "q_s", q_s, dtypes=FLOAT_DTYPES, ndim=axes, contiguous=False)
    lengths, batch = q_s.shape[:-2], q_s.shape[:-3]
    shape: tuple[int | None, ...] = (*batch, None, q_s.shape[-1])
    check_array(op, "k_s", k_s, dtypes=FLOAT_DTYPES, shape=shape, contiguous=False)
    shape = (*lengths, None, None)
    check_array(op, "q_t", q_t, dtypes=FLOAT_DTYPES, shape=shape, contiguous=False)
    shape = (*k_s.shape[:-1], None, q_t.shape[-1])
    check_array(op, "k_t", k_t, dtypes=FLOAT_DTYPES, shape=shape, contiguous=False)
    check_same_dtype(op, q_s=q_s, k_s=k_s, q_t=q_t, k_t=k_t)
    check_head_counts(op, "q_t", q_t, "k_t", k_t)
    if q_s.shape[-2] == 0:
        raise ArrayShapeError(f"{op}: q_s must have a head, got shape {q_s.shape}")
    check_head_dim(op, "q_t", q_t)
    check_head_dim(op, "q_s", q_s)
    exact = (float32, float64) if q_s.dtype == float64 else (float32,)
    check_array(op, "lse_t", lse_t, dtypes=exact, shape=lse_shape(q_t))
    check_array(op, "weights", weights, dtypes=exact, shape=q_s.shape[:-1], contiguous=False)
    if indices is not None:
        dtypes = (np.dtype(np.int32),)
        check_array(op, "topk_indices", indices, dtypes=dtypes, shape=(*lengths, None))
    check_row_weights(op, arrays.row_weights, exact, lengths)
    if statistics[0] is not None:
        for name, x in zip(("lse_s", "mass_t"), statistics, strict=True):
            check_array(op, name, x, dtypes=exact, shape=lengths)


class IndexerSteps(NamedTuple):
    """The launches for each chunk of queries, and the final one, `sum`."""

    config: IndexerConfig
    mark: Launch | None
    sweep: Launch
    rows: Launch | None
    query: Launch | None
    key: Launch | None
    sum: Launch | None


@launch_plan
def prepare_indexer(
    op: str,
    q_t: Array,
    k_t: Array,
    q_s: Array,
    k_s: Array,
    weights: Array,
    indices: Array | None,
    options: KlOptions,
    gradient: bool,
    factor: float,
    lse_s: Array | None,
    mass_t: Array | None,
    *given: Array | None,
) -> IndexerSteps:
    """The plan and launches of a call.

    weights, lse_s, mass_t: only for launch_plan, which checks their device. factor: multiplies the
    gradients. given: the RowArrays.
    """
    arrays = RowArrays(*given)
    k_head = k_s[..., None, :]
    check_kernel_layout(op, q_t=q_t, k_t=k_t, q_s=q_s, k_s=k_head)
    heads_t, heads_s = q_t.shape[-2], q_s.shape[-2]
    student = options.student(q_s.shape[-1])
    shape = score_shape(q_s, k_head, student, arrays.scores)
    batch, _, seq_q, seq_kv = shape
    width_t, width_s = q_t.shape[-1], q_s.shape[-1]
    problem = AttentionProblem(
        *(batch, seq_q, seq_kv, heads_s, 1, width_s, q_s.dtype.name, options.scores.causal),
        value_dim=None if width_t == width_s else width_t,
        varlen=arrays.varlen,
        teacher_group=heads_t // k_t.shape[-2],
    )
    device = current_device()
    config = plan_indexer_kl(problem, gradient, indices is not None, device)
    parameters = parameter_structs(PARAMETERS)["IndexerParameters"].pack(
        q_t=strides_of(q_t),
        k_t=strides_of(k_t),
        q_s=strides_of(q_s),
        k_s=strides_of(k_head),
        batch=batch,
        heads_t=heads_t,
        heads_s=heads_s,
        group=heads_t // k_t.shape[-2],
        seq_q=seq_q,
        seq_kv=seq_kv,
        teacher_dim=width_t,
        head_dim=width_s,
        chunk_tiles=config.chunk_tiles,
        spans=config.spans,
        span_tiles=config.span_tiles,
        scratch_row=config.scratch_row,
        top_k=0 if indices is None else indices.shape[-1],
        splits=config.splits,
        teacher_scale_log2=options.factor_t(width_t) * LOG2_E,
        scale_log2=options.factor_s(width_s) * LOG2_E,
        grad_scale=options.factor_s(width_s) * factor / _GRADIENT_UNIT,
        settings=score_settings(q_s, student, arrays.scores, shape),
    )

    def launch(spec: KernelSpec, blocks: int) -> Launch:
        return Launch(load_kernel(spec), (blocks if config.tiles else 0,), (parameters,))

    tiles = config.chunk_tiles
    mark = launch(config.mark_spec(), config.chunk_rows) if config.selected else None
    sweep = launch(config.sweep_spec(), tiles * config.spans)
    if not gradient:
        rows = launch(config.rows_spec(), tiles)
        return IndexerSteps(config, mark, sweep, rows, None, None, None)
    elements = k_s.size
    # The indexer has one key head: a row of the gradient is one key.
    key_rows = np.int64(elements // max(1, width_s))
    scalars = key_rows, *int32s(1, config.splits, width_s, width_s)
    return IndexerSteps(
        config,
        mark,
        sweep,
        None,
        launch(config.query_spec(), tiles * heads_s),
        launch(config.key_spec(), config.key_tiles * config.splits),
        Launch(load_kernel(config.sum_spec()), (config.sum_blocks(elements),), scalars),
    )


def heads_first(weights: Array) -> Array:
    """weights [batch, seq, heads] as contiguous [batch, heads, seq], which the kernels read."""
    return namespace(weights).ascontiguousarray(weights.swapaxes(-1, -2))


def selection_scratch(like: Array, steps: IndexerSteps) -> Any:
    """Memory for the selection bits of a chunk, or NULL without a selection."""
    if steps.mark is None:
        return NULL
    words = steps.config.scratch_row // _BITS
    return empty(like, (steps.config.chunk_rows * words,), np.uint32)


def _specs(device: Device) -> list[KernelSpec]:
    return indexer_specs(device, False, lambda: [sum_spec(), total_spec(False), total_spec(True)])


register(
    name=_OP,
    family="attention",
    function=indexer_kl,
    reference=reference.indexer_kl,
    specs=_specs,
)
