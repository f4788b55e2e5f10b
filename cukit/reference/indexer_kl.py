"""Divergence of a sparse-attention indexer from attention, with full matrices in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from cukit.reference._xp import array_namespace, upcast, working_dtype
from cukit.reference.attention import sequences
from cukit.reference.attention_kl import reduced_rows, row_factors
from cukit.reference.attention_scores import (
    ScoreOptions,
    attention_scores,
    log_sum_exp,
    scale_of,
)

Array = Any


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
    """KL(p || q) per query, weighted and reduced: p is the attention summed over heads and
    normalised over the selected keys, q = softmax(scale_s sum_h weights_h max(0, q_s_h k_s))."""
    xp = array_namespace(q_s)
    dtype = working_dtype(q_t, k_t, q_s, k_s)
    varlen = cu_seqlens_q is not None
    kl, lse_s, mass_t = (xp.zeros(q_s.shape[:-2], dtype=dtype) for _ in range(3))
    arrays = (q_t, k_t, lse_t, q_s, k_s, weights, topk_indices)
    for part in _parts(*arrays, cu_seqlens_q, cu_seqlens_kv):
        pair = _scores(part, causal, scale_t, scale_s)
        mass = pair.attention.sum(axis=-1)
        p = pair.attention / xp.where(mass == 0, 1, mass)[..., None]
        lse = log_sum_exp(xp, pair.scores)
        terms = xp.where(p > 0, xp.log(xp.where(p > 0, p, 1)), 0) - xp.where(
            pair.masked, 0, pair.scores
        )
        rows = (p * xp.where(p == 0, 0, terms)).sum(axis=-1)
        rows = xp.where(mass == 0, 0, xp.maximum(rows + xp.where(mass == 0, 0, lse), 0))
        kl[part.of_q] = part.packed(rows)
        lse_s[part.of_q] = part.packed(lse)
        mass_t[part.of_q] = part.packed(mass / q_t.shape[-2])
    by_head = kl[None] if varlen else kl[:, None]
    loss = reduced_rows(xp, by_head, row_weights, reduction, normalizer, varlen)
    if reduction == "none":
        loss = loss.reshape(kl.shape)
    return (loss, lse_s, mass_t) if return_statistics else loss


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
    """Gradients of indexer_kl with respect to q_s, k_s and weights."""
    xp = array_namespace(q_s)
    dtype = working_dtype(q_t, k_t, q_s, k_s)
    varlen = cu_seqlens_q is not None
    *batch, seq, _, _ = q_s.shape
    by_row = grad_loss is not None and reduction == "none"
    factors = row_factors(
        xp, (*batch, 1, seq), dtype, row_weights, reduction, normalizer,
        None if by_row else grad_loss, varlen,
    ).reshape(*batch, seq)  # fmt: skip
    if by_row:
        factors = factors * grad_loss.astype(dtype)
    gradients = tuple(xp.zeros(x.shape, dtype=x.dtype) for x in (q_s, k_s, weights))
    arrays = (q_t, k_t, lse_t, q_s, k_s, weights, topk_indices)
    for part in _parts(*arrays, cu_seqlens_q, cu_seqlens_kv):
        pair = _scores(part, causal, scale_t, scale_s)
        lse, mass, factor = (
            part.unpacked(x.astype(dtype, copy=False)[part.of_q]) for x in (lse_s, mass_t, factors)
        )
        counts = (mass != 0) & (factor != 0)
        top = xp.where(lse == -math.inf, 0, lse)[..., None]
        q = xp.where(pair.masked, 0, xp.exp(pair.scores - top))
        p = pair.attention / xp.where(counts, mass * q_t.shape[-2], 1)[..., None]
        grad = xp.where(counts[..., None], factor[..., None] * (q - p), 0) * dtype(scale_s)
        queries, keys, own = upcast(dtype, part.q_s, part.k_s, part.weights)
        products = xp.einsum("bihd,bjd->bihj", queries, keys)
        through = xp.where((products > 0) & (grad != 0)[:, :, None], grad[:, :, None], 0)
        grad_products = xp.where(through == 0, 0, through * own[..., None])
        for gradient, where, value in zip(
            gradients,
            (part.of_q, part.of_kv, part.of_q),
            (
                xp.einsum("bihj,bjd->bihd", grad_products, keys),
                xp.einsum("bihj,bihd->bjd", grad_products, queries),
                (through * xp.where(through == 0, 0, products)).sum(axis=-1),
            ),
            strict=True,
        ):
            gradient[where] = part.packed(value).astype(gradient.dtype)
    return gradients


class _Part(NamedTuple):
    """One variable-length sequence, or the whole batch; arrays have a batch axis."""

    q_t: Array
    k_t: Array
    lse_t: Array
    q_s: Array
    k_s: Array
    weights: Array
    topk_indices: Array | None
    of_q: slice
    of_kv: slice
    whole: bool

    def packed(self, x: Array) -> Array:
        """`x` without the batch axis if the op's arrays have none."""
        return x if self.whole else x[0]

    def unpacked(self, x: Array) -> Array:
        return x if self.whole else x[None]


def _parts(
    q_t: Array,
    k_t: Array,
    lse_t: Array,
    q_s: Array,
    k_s: Array,
    weights: Array,
    indices: Array | None,
    cu_q: Array | None,
    cu_kv: Array | None,
) -> Iterator[_Part]:
    if cu_q is None:
        every = slice(None)
        yield _Part(q_t, k_t, lse_t, q_s, k_s, weights, indices, every, every, True)
        return
    for _, of_q, of_kv in sequences(cu_q, cu_kv):
        yield _Part(
            q_t[None, of_q], k_t[None, of_kv], lse_t[None, :, of_q], q_s[None, of_q],
            k_s[None, of_kv], weights[None, of_q], None if indices is None else indices[None, of_q],
            of_q, of_kv, False,
        )  # fmt: skip


class _Pair(NamedTuple):
    attention: Array
    """Attention probabilities summed over heads, 0 where masked, [batch, seq_q, seq_kv]."""
    scores: Array
    """Scores of the indexer, -infinity where masked."""
    masked: Array


def _scores(part: _Part, causal: bool, scale_t: float | None, scale_s: float) -> _Pair:
    xp = array_namespace(part.q_s)
    dtype = working_dtype(part.q_t, part.k_t, part.q_s, part.k_s)
    q, k, queries, keys, weights, lse = upcast(
        dtype, part.q_t, part.k_t, part.q_s, part.k_s, part.weights, part.lse_t
    )
    options = ScoreOptions(scale=scale_of(part.q_t, scale_t), causal=causal, window_size=None)
    scores, _ = attention_scores(xp, q, k, options)
    batch, seq_q, heads, _ = q.shape
    scores = scores.reshape(batch, heads, seq_q, k.shape[1])
    masked = scores[:, 0] == -math.inf
    if part.topk_indices is not None:
        masked = masked | ~_listed(xp, part.topk_indices, k.shape[1])
    base = xp.where(lse == -math.inf, math.inf, lse)[..., None]
    attention = xp.where(masked, 0, xp.exp(scores - base).sum(axis=1))
    products = xp.einsum("bihd,bjd->bihj", queries, keys)
    positive = xp.where(products < 0, 0, products)
    total = xp.einsum("bihj,bih->bij", positive, weights) * dtype(scale_s)
    return _Pair(attention, xp.where(masked, -math.inf, total), masked)


def _listed(xp: Any, indices: Array, seq_kv: int) -> Array:
    """bool [batch, seq_q, seq_kv]: whether a key is in the query's list of indices."""
    listed = xp.zeros((*indices.shape[:2], seq_kv + 1), dtype=bool)
    out = (indices < 0) | (indices >= seq_kv)
    b, i = xp.arange(indices.shape[0])[:, None, None], xp.arange(indices.shape[1])[None, :, None]
    listed[b, i, xp.where(out, seq_kv, indices)] = True
    return listed[..., :seq_kv]
