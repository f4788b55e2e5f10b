"""Exact attention with the whole score matrix in memory.

Heads of one group share their keys: arrays are viewed as [batch, heads_kv, group, seq, head_dim].
"""

from __future__ import annotations

import math
from typing import Any

from cukit.reference._xp import array_namespace, upcast, working_dtype

Array = Any


def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """softmax(scale * q k^T + mask) v over [batch, seq, heads, head_dim], and the log-sum-exp."""
    xp = array_namespace(q)
    q_wide, k_wide, v_wide = upcast(working_dtype(q, k, v), q, k, v)
    scores = _scores(xp, q_wide, k_wide, causal, scale)
    if scores.shape[-1]:
        maximum = scores.max(axis=-1, keepdims=True)
    else:
        maximum = xp.full((*scores.shape[:-1], 1), -math.inf, dtype=scores.dtype)
    # A row without keys has no finite maximum; its exponentials are zeros under any other one.
    base = xp.where(maximum == -math.inf, 0, maximum)
    scores -= base
    weights = xp.exp(scores, out=scores)
    total = weights.sum(axis=-1, keepdims=True)
    out = xp.matmul(weights, _kv_heads(v_wide))
    out /= xp.where(total == 0, 1, total)
    out = _merge_heads(out).astype(q.dtype, copy=False)
    if not return_lse:
        return out
    empty = total == 0
    lse = xp.where(empty, -math.inf, base + xp.log(xp.where(empty, 1, total)))
    batch, seq_q, heads_q, _ = q.shape
    return out, lse.reshape(batch, heads_q, seq_q).astype(q_wide.dtype, copy=False)


def flash_attention_backward(
    grad_out: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    deterministic: bool = False,
) -> tuple[Array, Array, Array]:
    """Gradients of flash_attention for q, k and v. Always deterministic."""
    xp = array_namespace(q)
    dtype = working_dtype(grad_out, q, k, v, out)
    g, q_wide, k_wide, v_wide, o = upcast(dtype, grad_out, q, k, v, out)
    factor = _scale(q, scale)
    group = q.shape[2] // k.shape[2] if k.shape[2] else 1
    # exp(score - lse) is 0 for a row without keys once its lse is +infinity.
    row_lse = xp.where(lse == -math.inf, math.inf, lse).astype(dtype, copy=False)
    row_lse = row_lse.reshape(q.shape[0], k.shape[2], group, q.shape[1], 1)
    weights = _scores(xp, q_wide, k_wide, causal, scale)
    weights -= row_lse
    xp.exp(weights, out=weights)
    g_heads, o_heads = _q_heads(g, group), _q_heads(o, group)
    delta = (g_heads * o_heads).sum(axis=-1, keepdims=True)
    grad_scores = xp.matmul(g_heads, _kv_heads(v_wide).swapaxes(-1, -2))
    grad_scores -= delta
    grad_scores *= weights
    grad_q = xp.matmul(grad_scores, _kv_heads(k_wide)) * factor
    grad_k = xp.matmul(grad_scores.swapaxes(-1, -2), _q_heads(q_wide, group)).sum(axis=2) * factor
    grad_v = xp.matmul(weights.swapaxes(-1, -2), g_heads).sum(axis=2)
    return (
        _merge_heads(grad_q).astype(q.dtype, copy=False),
        xp.ascontiguousarray(grad_k.transpose(0, 2, 1, 3)).astype(k.dtype, copy=False),
        xp.ascontiguousarray(grad_v.transpose(0, 2, 1, 3)).astype(v.dtype, copy=False),
    )


def _scale(q: Array, scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale


def _q_heads(x: Array, group: int) -> Array:
    """[batch, seq, heads_kv * group, d] -> [batch, heads_kv, group, seq, d]."""
    batch, seq, heads, width = x.shape
    return x.reshape(batch, seq, heads // group, group, width).transpose(0, 2, 3, 1, 4)


def _kv_heads(x: Array) -> Array:
    """[batch, seq, heads_kv, d] -> [batch, heads_kv, 1, seq, d]."""
    return x.transpose(0, 2, 1, 3)[:, :, None]


def _merge_heads(x: Array) -> Array:
    """[batch, heads_kv, group, seq, d] -> [batch, seq, heads_kv * group, d]."""
    batch, heads_kv, group, seq, width = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, seq, heads_kv * group, width)


def _scores(xp: Any, q: Array, k: Array, causal: bool, scale: float | None) -> Array:
    """scale * q k^T as [batch, heads_kv, group, seq_q, seq_kv]; -infinity where masked."""
    group = q.shape[2] // k.shape[2] if k.shape[2] else 1
    scaled = q * q.dtype.type(_scale(q, scale))
    scores = xp.matmul(_q_heads(scaled, group), _kv_heads(k).swapaxes(-1, -2))
    if causal:
        seq_q, seq_kv = scores.shape[-2:]
        hidden = xp.arange(seq_kv) > xp.arange(seq_q)[:, None] + (seq_kv - seq_q)
        xp.copyto(scores, -math.inf, where=hidden)
    return scores
