"""Divergence between the attention distributions of two models, from full score matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cukit.reference._xp import array_namespace, upcast, working_dtype
from cukit.reference.attention import sequences
from cukit.reference.attention_scores import (
    ScoreOptions,
    attention_scores,
    log_sum_exp,
    scale_of,
)

Array = Any
Window = tuple[int | None, int | None]

_SERIES = 0.1  # expm1(-d) + d is computed by its series for |d| below this


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
    """KL(softmax(teacher scores) || softmax(student scores)) per query and head of the student,
    weighted and reduced.

    `precise` has no effect: the reference always computes as accurately as precise=True.
    """
    xp = array_namespace(q_s)
    dtype = working_dtype(q_t, k_t, q_s, k_s)
    rows: list[Array] = []
    lses: tuple[list[Array], list[Array]] = ([], [])
    for part in _parts(q_t, k_t, q_s, k_s, cu_seqlens_q, cu_seqlens_kv):
        given = (part.rows_of(lse_t), part.rows_of(lse_s))
        pair = _scores(part, head_map, (scale_t, scale_s), temperature, causal, window_size, given)
        rows.append(_divergence(xp, pair))
        for kept, lse in zip(lses, (pair.lse_t, pair.lse_s), strict=True):
            kept.append(lse[..., 0])
    kl, *both = (_joined(xp, x, q_s, cu_seqlens_q, dtype) for x in (rows, *lses))
    if scale_by_temperature_squared:
        kl = kl * dtype(temperature**2)
    loss = reduced_rows(xp, kl, row_weights, reduction, normalizer, cu_seqlens_q is not None)
    return (loss, *both) if return_lse else loss


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
    """Gradients of attention_kl with respect to q_s and k_s. Always deterministic."""
    xp = array_namespace(q_s)
    dtype = working_dtype(q_t, k_t, q_s, k_s)
    factor = temperature**2 if scale_by_temperature_squared else 1.0
    *batch, seq, heads, _ = q_s.shape
    varlen = cu_seqlens_q is not None
    weights = row_factors(
        xp, (*batch, heads, seq), dtype, row_weights, reduction, normalizer, grad_loss, varlen
    )
    gradients = tuple(xp.zeros(x.shape, dtype=x.dtype) for x in (q_s, k_s))
    for part in _parts(q_t, k_t, q_s, k_s, cu_seqlens_q, cu_seqlens_kv):
        given = (part.rows_of(lse_t), part.rows_of(lse_s))
        pair = _scores(part, head_map, (scale_t, scale_s), temperature, causal, window_size, given)
        grad = xp.exp(pair.log_p_s) - xp.exp(pair.log_p_t)
        of_rows: Array = part.rows_of(weights)
        grad *= of_rows[..., None]
        scale = factor * scale_of(q_s, scale_s) / temperature
        grad *= dtype(scale)
        q, k = (x.astype(dtype, copy=False) for x in (part.q_s, part.k_s))
        group = q.shape[2] // max(1, k.shape[2])
        keys = xp.repeat(k, group, axis=2).transpose(0, 2, 1, 3)
        grad_q = xp.matmul(grad, keys).transpose(0, 2, 1, 3)
        grad_k = xp.matmul(grad.swapaxes(-1, -2), q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
        grad_k = grad_k.reshape(*grad_k.shape[:2], k.shape[2], group, k.shape[3]).sum(axis=3)
        for gradient, where, value in zip(
            gradients, (part.of_q, part.of_kv), (grad_q, grad_k), strict=True
        ):
            if cu_seqlens_q is None:
                gradient[...] = value.astype(gradient.dtype)
            else:
                gradient[where] = value[0].astype(gradient.dtype)
    return gradients


class _Part(NamedTuple):
    """One variable-length sequence, or the whole batch."""

    q_t: Array
    k_t: Array
    q_s: Array
    k_s: Array
    of_q: slice
    of_kv: slice
    whole: bool

    def rows_of(self, array: Array | None) -> Array | None:
        """This part's slice of an array with one value per head and query."""
        if array is None or self.whole:
            return array
        return array[None, :, self.of_q]


def _parts(
    q_t: Array, k_t: Array, q_s: Array, k_s: Array, cu_q: Array | None, cu_kv: Array | None
) -> Iterator[_Part]:
    if cu_q is None:
        yield _Part(q_t, k_t, q_s, k_s, slice(None), slice(None), True)
        return
    for _, of_q, of_kv in sequences(cu_q, cu_kv):
        yield _Part(
            q_t[None, of_q], k_t[None, of_kv], q_s[None, of_q], k_s[None, of_kv], of_q, of_kv, False
        )


class _Pair(NamedTuple):
    log_p_t: Array
    log_p_s: Array
    lse_t: Array
    lse_s: Array


def _scores(
    part: _Part,
    head_map: Sequence[int] | None,
    scales: tuple[float | None, float | None],
    temperature: float,
    causal: bool,
    window_size: Window | None,
    given: tuple[Array | None, Array | None],
) -> _Pair:
    """Logarithms of both distributions, -infinity where masked, [batch, heads_s, seq_q, seq_kv]."""
    q_t, k_t = part.q_t, part.k_t
    heads_t, heads_s = q_t.shape[2], part.q_s.shape[2]
    if head_map is None and heads_t != heads_s:
        head_map = [head * heads_t // heads_s for head in range(heads_s)]
    if head_map is not None:
        heads = np.asarray(head_map)
        group = q_t.shape[2] // k_t.shape[2]
        q_t, k_t = q_t[:, :, heads], k_t[:, :, heads // group]
    xp = array_namespace(q_t)
    dtype = working_dtype(q_t, k_t, part.q_s, part.k_s)
    logs, lses = [], []
    for q, k, scale, lse in (
        (q_t, k_t, scales[0], given[0]),
        (part.q_s, part.k_s, scales[1], given[1]),
    ):
        q_wide, k_wide = upcast(dtype, q, k)
        options = ScoreOptions(
            scale=scale_of(q, scale) / temperature, causal=causal, window_size=window_size
        )
        scores, _ = attention_scores(xp, q_wide, k_wide, options)
        batch, seq_q, heads, _ = q.shape
        scores = scores.reshape(batch, heads, seq_q, scores.shape[-1])
        if lse is None:
            row_lse = log_sum_exp(xp, scores)[..., None]
        else:
            row_lse = lse.astype(dtype, copy=False)[..., None]
        scores -= xp.where(row_lse == -math.inf, math.inf, row_lse).astype(dtype, copy=False)
        logs.append(scores)
        lses.append(row_lse.astype(dtype, copy=False))
    return _Pair(*logs, *lses)


def _divergence(xp: Any, pair: _Pair) -> Array:
    """sum p (expm1(-d) + d), d = log p - log q: terms are non-negative, so none cancel."""
    p = xp.exp(pair.log_p_t)
    masked = pair.log_p_t == -math.inf
    d = xp.where(masked, 0, pair.log_p_t - xp.where(masked, 0, pair.log_p_s))
    near = abs(d) < _SERIES
    small = xp.where(near, d, 0)
    series = (
        small
        * small
        * (
            1 / 2
            - small
            * (1 / 6 - small * (1 / 24 - small * (1 / 120 - small * (1 / 720 - small / 5040))))
        )
    )
    far = xp.where(near, 0, d)
    terms = p * xp.where(near, series, xp.expm1(-far) + far)
    # The limit of a term for p = 0 is q.
    return xp.where(masked, xp.exp(pair.log_p_s), terms).sum(axis=-1)


def _joined(
    xp: Any, parts: list[Array], q_s: Array, cu_seqlens_q: Array | None, dtype: Any
) -> Array:
    """Concatenates values per head and query over the sequences."""
    if cu_seqlens_q is None:
        return xp.ascontiguousarray(parts[0].astype(dtype, copy=False))
    if not parts:
        return xp.zeros((q_s.shape[1], q_s.shape[0]), dtype=dtype)
    return xp.concatenate([part[0] for part in parts], axis=-1).astype(dtype, copy=False)


def _by_rows(weights: Array, varlen: bool) -> Array:
    """Weights of queries, [batch, seq] or [total], in a shape that broadcasts over heads."""
    return weights[None] if varlen else weights[:, None]


def _divisor(
    xp: Any, rows: tuple[int, ...], weights: Array | None, normalizer: Any, varlen: bool
) -> Any:
    """The divisor of the mean: number of heads times `normalizer`, by default the total weight of
    the queries (1 if it is 0) or, without weights, their number."""
    heads = rows[0] if varlen else rows[1]
    if normalizer is None:
        queries = rows[1] if varlen else rows[0] * rows[2]
        normalizer = max(queries, 1) if weights is None else weights.sum()
        if weights is not None:
            normalizer = xp.where(normalizer == 0, 1, normalizer)
    return normalizer * max(heads, 1)


def reduced_rows(
    xp: Any, kl: Array, weights: Array | None, reduction: str, normalizer: Any, varlen: bool
) -> Array:
    """Reduces the divergences of rows, [batch, heads, seq] or [heads, total], to the loss."""
    if weights is not None:
        # A row with weight 0 has loss 0, even if its divergence is infinite.
        by_rows = _by_rows(weights.astype(kl.dtype, copy=False), varlen)
        kl = xp.where(by_rows == 0, 0, kl * by_rows)
    if reduction == "none":
        return kl
    total = kl.sum()
    if reduction == "mean":
        total = total / _divisor(xp, kl.shape, weights, normalizer, varlen)
    return xp.asarray(total, dtype=kl.dtype)


def row_factors(
    xp: Any,
    rows: tuple[int, ...],
    dtype: Any,
    weights: Array | None,
    reduction: str,
    normalizer: Any,
    grad_loss: Any,
    varlen: bool,
) -> Array:
    """Derivative of the loss with respect to each row's divergence.

    rows: shape of the divergences, [batch, heads, seq] or [heads, total].
    """
    factors = xp.ones(rows, dtype=dtype)
    if weights is not None:
        factors = factors * _by_rows(weights.astype(dtype, copy=False), varlen)
    if reduction == "mean":
        factors = factors / _divisor(xp, factors.shape, weights, normalizer, varlen)
    if grad_loss is not None:
        factors = factors * grad_loss
    return factors.astype(dtype, copy=False)
