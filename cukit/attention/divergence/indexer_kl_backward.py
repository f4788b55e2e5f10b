"""Gradients of the KL divergence between attention and a sparse-attention indexer."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from cukit.attention.divergence._indexer_plan import indexer_specs
from cukit.attention.divergence._kl_reduction import reduction_factor_of, totals
from cukit.attention.divergence.indexer_kl import (
    heads_first,
    indexer_call,
    prepare_indexer,
    selection_scratch,
)
from cukit.attention.divergence.kl_pairs import check_optional_scalar
from cukit.core.arrays import Array, adopt, empty
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec
from cukit.errors import ArrayError
from cukit.reference import indexer_kl as reference
from cukit.registry import register

_OP = "indexer_kl_backward"


def indexer_kl_backward(
    q_t: Array,
    k_t: Array,
    lse_t: Array,
    q_s: Array,
    k_s: Array,
    weights: Array,
    lse_s: Array,
    mass_t: Array,
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
    grad_loss: Any = None,
) -> tuple[Array, Array, Array]:
    """Gradients of :func:`~cukit.attention.divergence.indexer_kl.indexer_kl` for the indexer.

        dI = row weight (softmax(I) - p)
        dx[i,h,j] = scale_s w[i,h] dI_ij where q_s[i,h] k_s[j] > 0, else 0
        dq_s[i,h] = sum_j dx k_s[j],   dk_s[j] = sum_ih dx q_s[i,h]
        dw[i,h] = scale_s sum_j dI_ij max(0, q_s[i,h] k_s[j])

    The gradients with respect to the attention inputs are not computed.

    Args:
        q_t: as in the forward. The same applies to all arguments up to `normalizer` except lse_s
            and mass_t.
        k_t: as in the forward.
        lse_t: as in the forward.
        q_s: as in the forward.
        k_s: as in the forward.
        weights: as in the forward.
        lse_s: returned by the forward with return_statistics.
        mass_t: as lse_s.
        grad_loss: upstream gradient, a number or a float32 0-d array; with reduction "none" a
            float32 array of the loss's shape.

    Returns:
        `(grad_q_s, grad_k_s, grad_weights)`, C-contiguous, dtypes and shapes of q_s, k_s, weights.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: an option's value.

    Runs on CuPy's current stream, accumulates in float32 and is deterministic. dI is rounded to the
    dtype of q_s, for grad_weights too. Scratch memory: dI in 16 bits, for chunks of queries of at
    most 128 MiB (or one tile); with topk_indices one bit per key for each query of a chunk; and
    float32 partial sums of grad_k_s.
    """
    if grad_loss is not None and not isinstance(grad_loss, numbers.Real):
        (grad_loss,) = adopt(_OP, grad_loss)
    call = indexer_call(
        _OP, (q_t, k_t, lse_t, q_s, k_s, weights, topk_indices), (lse_s, mass_t),
        row_weights, cu_seqlens_q, cu_seqlens_kv, causal, scale_t, scale_s, max_seqlen_q,
        max_seqlen_kv, reduction, normalizer,
        None if isinstance(grad_loss, numbers.Real) else grad_loss,
    )  # fmt: skip
    q_t, k_t, lse_t, q_s, k_s, weights, indices = call.inputs
    arrays = call.arrays
    lse_s, mass_t = call.statistics
    if lse_s is None or mass_t is None:
        missing = "lse_s" if lse_s is None else "mass_t"
        raise ArrayError(f"{_OP}: {missing} must be an array, got None")
    each_row = reduction == "none" and grad_loss is not None
    check_optional_scalar(_OP, "grad_loss", grad_loss, q_s.shape[:-2] if each_row else ())
    if not call.on_gpu:
        return reference.indexer_kl_backward(
            q_t, k_t, lse_t, q_s, k_s, weights, lse_s, mass_t, topk_indices=indices,
            **call.reference_options(), grad_loss=grad_loss,
        )  # fmt: skip
    # The reduction, shared with attention_kl, expects rows with a head axis.
    *batch, rows, _, _ = q_s.shape
    shape = (*batch, 1, rows)
    reduction_factor = reduction_factor_of(shape, call.options, arrays.row_weights, call.normalizer)
    number = isinstance(grad_loss, numbers.Real)
    factor = float(grad_loss) if number else 1.0
    upstream: Any = None
    of_loss = None if number or each_row else grad_loss
    if reduction_factor.on_host and of_loss is None:
        factor *= reduction_factor.value
    else:
        upstream = totals(q_s, None, shape, arrays.row_weights, reduction_factor, of_loss)[1:]
    steps = prepare_indexer(
        _OP, q_t, k_t, q_s, k_s, weights, indices, call.options, True, factor, lse_s, mass_t,
        *arrays,
    )  # fmt: skip
    config = steps.config
    by_head = heads_first(weights)
    ends = arrays.cu_seqlens_q, arrays.cu_seqlens_kv
    bits = selection_scratch(q_s, steps)
    derivatives = empty(q_s, (config.chunk_rows, config.scratch_row))
    grad_q, grad_k = empty(q_s, q_s.shape), empty(k_s, k_s.shape)
    grad_weights = empty(q_s, weights.shape, np.float32)
    sums = empty(k_s, (*k_s.shape[:-1], config.splits, k_s.shape[-1]), np.float32)
    if not config.tiles:
        sums[...] = 0  # no queries
    row_grads = grad_loss if each_row else None
    assert steps.query is not None
    assert steps.key is not None
    assert steps.sum is not None
    for first in range(0, config.tiles, config.chunk_tiles):
        chunk = (np.int32(first),)
        if steps.mark is not None:
            steps.mark(indices, bits, *ends, trailing_args=chunk)
        steps.sweep(
            q_t, k_t, lse_t, q_s, k_s, by_head, bits, lse_s, mass_t,
            arrays.row_weights, row_grads, derivatives, *ends, trailing_args=chunk,
        )  # fmt: skip
        student = (q_s, k_s, by_head, derivatives)
        steps.query(*student, grad_q, grad_weights, upstream, *ends, trailing_args=chunk)
        steps.key(*student, sums, upstream, *ends, trailing_args=chunk)
    steps.sum(sums, grad_k)
    return grad_q, grad_k, grad_weights


def _specs(device: Device) -> list[KernelSpec]:
    return indexer_specs(device, True)


register(
    name=_OP,
    family="attention",
    function=indexer_kl_backward,
    reference=reference.indexer_kl_backward,
    specs=_specs,
)
