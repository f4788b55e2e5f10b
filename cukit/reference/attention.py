"""Exact attention with the full score matrix in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from cukit.reference._xp import array_namespace, upcast, working_dtype
from cukit.reference.attention_scores import (
    ScoreOptions,
    attention_scores,
    group_of,
    kv_heads,
    merge_heads,
    q_heads,
    scale_of,
    sink_scores,
)

Array = Any


def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
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
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """softmax(scores) v and, with return_lse, the log-sum-exps of the scores.

    q, k, v: [batch, seq, heads, head_dim]; with cu_seqlens [total, heads, head_dim], and each
    sequence is computed separately.
    """
    options = ScoreOptions(scale, softcap, alibi_slopes, bias, mask, causal, window_size, sinks)
    if cu_seqlens_q is None:
        out, lse = _forward(q, k, v, options)
        return (out, lse) if return_lse else out
    xp = array_namespace(q)
    total_q, heads_q, _ = q.shape
    out = xp.zeros((total_q, heads_q, v.shape[-1]), dtype=q.dtype)
    lse = xp.full((heads_q, total_q), -math.inf, dtype=working_dtype(q, k, v))
    for index, of_q, of_kv in sequences(cu_seqlens_q, cu_seqlens_kv):
        part = options.of_sequence(index, of_q.stop - of_q.start, of_kv.stop - of_kv.start)
        some_out, some_lse = _forward(q[None, of_q], k[None, of_kv], v[None, of_kv], part)
        out[of_q] = some_out[0]
        lse[:, of_q] = some_lse[0]
    return (out, lse) if return_lse else out


def flash_attention_backward(
    grad_out: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = None,
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
) -> tuple[Array, ...]:
    """Gradients of flash_attention with respect to q, k, v and, if given, sinks. Always
    deterministic."""
    options = ScoreOptions(scale, softcap, alibi_slopes, bias, mask, causal, window_size, sinks)
    if cu_seqlens_q is None:
        return _backward(grad_out, q, k, v, out, lse, options)
    xp = array_namespace(q)
    gradients = [xp.zeros(x.shape, dtype=x.dtype) for x in (q, k, v)]
    if sinks is not None:
        gradients.append(xp.zeros(sinks.shape, dtype=sinks.dtype))
    for index, of_q, of_kv in sequences(cu_seqlens_q, cu_seqlens_kv):
        part = options.of_sequence(index, of_q.stop - of_q.start, of_kv.stop - of_kv.start)
        some = _backward(
            grad_out[None, of_q],
            q[None, of_q],
            k[None, of_kv],
            v[None, of_kv],
            out[None, of_q],
            lse[None, :, of_q],
            part,
        )
        for gradient, rows, value in zip(gradients, (of_q, of_kv, of_kv), some, strict=False):
            gradient[rows] = value[0]
        if sinks is not None:
            gradients[3] += some[3]
    return tuple(gradients)


def sequences(cu_q: Array, cu_kv: Array) -> Iterator[tuple[int, slice, slice]]:
    """Index, query rows and key rows of every sequence."""
    host = [np.asarray(x.get() if hasattr(x, "get") else x).tolist() for x in (cu_q, cu_kv)]
    for index in range(len(host[0]) - 1):
        rows = (slice(ends[index], ends[index + 1]) for ends in host)
        yield index, next(rows), next(rows)


def _forward(q: Array, k: Array, v: Array, options: ScoreOptions) -> tuple[Array, Array]:
    xp = array_namespace(q)
    q_wide, k_wide, v_wide = upcast(working_dtype(q, k, v), q, k, v)
    scores, _ = attention_scores(xp, q_wide, k_wide, options)
    if scores.shape[-1]:
        maximum = scores.max(axis=-1, keepdims=True)
    else:
        maximum = xp.full((*scores.shape[:-1], 1), -math.inf, dtype=scores.dtype)
    sink = None
    if options.sinks is not None:
        sink = sink_scores(options.sinks, k.shape[2], group_of(q, k), scores.dtype)
        maximum = xp.maximum(maximum, sink)
    # A row without keys has no finite maximum; with base 0 its exponentials are 0.
    base = xp.where(maximum == -math.inf, 0, maximum)
    scores -= base
    weights = xp.exp(scores, out=scores)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total += xp.exp(sink - base)
    out = xp.matmul(weights, kv_heads(v_wide))
    out /= xp.where(total == 0, 1, total)
    empty = total == 0
    lse = xp.where(empty, -math.inf, base + xp.log(xp.where(empty, 1, total)))
    batch, seq_q, heads_q, _ = q.shape
    lse = lse.reshape(batch, heads_q, seq_q).astype(q_wide.dtype, copy=False)
    return merge_heads(out).astype(q.dtype, copy=False), lse


def _backward(
    grad_out: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, options: ScoreOptions
) -> tuple[Array, ...]:
    xp = array_namespace(q)
    dtype = working_dtype(grad_out, q, k, v, out)
    g, q_wide, k_wide, v_wide, o = upcast(dtype, grad_out, q, k, v, out)
    factor = scale_of(q, options.scale)
    group = group_of(q, k)
    # lse of a row without keys is set to +infinity, so that exp(score - lse) is 0.
    row_lse = xp.where(lse == -math.inf, math.inf, lse).astype(dtype, copy=False)
    row_lse = row_lse.reshape(q.shape[0], k.shape[2], group, q.shape[1], 1)
    weights, slope = attention_scores(xp, q_wide, k_wide, options)
    weights -= row_lse
    xp.exp(weights, out=weights)
    g_heads, o_heads = q_heads(g, group), q_heads(o, group)
    delta = (g_heads * o_heads).sum(axis=-1, keepdims=True)
    grad_scores = xp.matmul(g_heads, kv_heads(v_wide).swapaxes(-1, -2))
    grad_scores -= delta
    grad_scores *= weights
    if slope is not None:
        grad_scores *= slope
    grad_q = xp.matmul(grad_scores, kv_heads(k_wide)) * factor
    grad_k = xp.matmul(grad_scores.swapaxes(-1, -2), q_heads(q_wide, group)).sum(axis=2) * factor
    grad_v = xp.matmul(weights.swapaxes(-1, -2), g_heads).sum(axis=2)
    gradients = (
        merge_heads(grad_q).astype(q.dtype, copy=False),
        xp.ascontiguousarray(grad_k.transpose(0, 2, 1, 3)).astype(k.dtype, copy=False),
        xp.ascontiguousarray(grad_v.transpose(0, 2, 1, 3)).astype(v.dtype, copy=False),
    )
    if options.sinks is None:
        return gradients
    # A sink acts in every row as a key with a value vector of zeros.
    sink = sink_scores(options.sinks, k.shape[2], group, dtype)
    grad_sinks = -(xp.exp(sink - row_lse) * delta).sum(axis=(0, 3, 4)).reshape(-1)
    return *gradients, grad_sinks.astype(options.sinks.dtype, copy=False)
