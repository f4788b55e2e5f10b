"""Attention in plain low-precision array code, which rounds every matrix that it materialises.

The error of this code sets the tolerance for the outputs and gradients of the kernels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = Any


def _heads(x: Array, group: int) -> Array:
    """[batch, seq, heads, d] -> float32 [batch, heads * group, seq, d]."""
    return np.repeat(x.astype(np.float32).transpose(0, 2, 1, 3), group, axis=1)


def scores_of(
    q: Array,
    k: Array,
    causal: bool,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
) -> tuple[Array, Array]:
    """Masked scores, and the derivative of the scores with respect to the scaled product."""
    dtype = q.dtype

    def rounded(x: Array) -> Array:
        return x.astype(dtype).astype(np.float32)

    group = q.shape[2] // k.shape[2]
    scores = rounded(_heads(q, 1) @ _heads(k, group).swapaxes(-1, -2) / math.sqrt(q.shape[-1]))
    slope = np.ones_like(scores)
    if softcap is not None:
        bounded = rounded(np.tanh(scores / softcap))
        scores, slope = rounded(softcap * bounded), 1 - bounded * bounded
    seq_q, seq_kv = scores.shape[-2:]
    ahead = np.arange(seq_kv) - np.arange(seq_q)[:, None] - (seq_kv - seq_q)
    if alibi_slopes is not None:
        slopes = np.broadcast_to(alibi_slopes, scores.shape[:2])[..., None, None]
        scores = rounded(scores - slopes * np.abs(ahead).astype(np.float32))
    if bias is not None:
        scores = rounded(scores + bias.astype(np.float32))
    left, right = window_size or (None, None)
    masked = np.zeros(scores.shape, bool)
    if mask is not None:
        masked |= ~mask
    if left is not None:
        masked |= ahead < -left
    if causal or right is not None:
        masked |= ahead > (0 if causal else right)
    scores[masked] = -np.inf
    return scores, slope


def _probabilities(scores: Array, dtype: Any, sinks: Array | None = None) -> tuple[Array, Array]:
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    sink = None if sinks is None else sinks[:, None, None]
    if sink is not None:
        top = np.maximum(top, sink)
    top = np.where(top == -np.inf, 0, top)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink - top)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return (weights / np.where(total == 0, 1, total)).astype(dtype).astype(np.float32), lse


def forward(
    q: Array, k: Array, v: Array, causal: bool, *, sinks: Array | None = None, **options: Any
) -> tuple[Array, Array]:
    """(out, lse)."""
    scores, _ = scores_of(q, k, causal, **options)
    weights, lse = _probabilities(scores, q.dtype, sinks)
    out = weights @ _heads(v, q.shape[2] // k.shape[2])
    return out.transpose(0, 2, 1, 3).astype(q.dtype), lse.astype(np.float32)


def backward(
    grad_out: Array,
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    *,
    sinks: Array | None = None,
    **options: Any,
) -> tuple[Array, ...]:
    """(grad_q, grad_k, grad_v), and grad_sinks if there are sinks."""
    dtype, (batch, seq_kv, heads_kv, width) = q.dtype, k.shape
    group = q.shape[2] // heads_kv
    scores, slope = scores_of(q, k, causal, **options)
    weights, lse = _probabilities(scores, dtype, sinks)
    g = _heads(grad_out, 1)
    grad_weights = (g @ _heads(v, group).swapaxes(-1, -2)).astype(dtype).astype(np.float32)
    delta = (weights * grad_weights).sum(axis=-1, keepdims=True)
    grad_scores = (weights * (grad_weights - delta) * slope).astype(dtype).astype(np.float32)
    grad_scores /= math.sqrt(width)
    grad_q = (grad_scores @ _heads(k, group)).transpose(0, 2, 1, 3)

    def sum_groups(x: Array) -> Array:
        """[batch, heads_q, seq_kv, d] -> [batch, seq_kv, heads_kv, d], groups summed."""
        groups = x.reshape(batch, heads_kv, group, seq_kv, x.shape[-1])
        return groups.sum(axis=2).transpose(0, 2, 1, 3)

    grad_k = sum_groups(grad_scores.swapaxes(-1, -2) @ _heads(q, 1))
    grad_v = sum_groups(weights.swapaxes(-1, -2) @ g)
    gradients = tuple(x.astype(dtype) for x in (grad_q, grad_k, grad_v))
    if sinks is None:
        return gradients
    sink_weights = np.exp(sinks[:, None] - np.where(lse == -np.inf, np.inf, lse))
    grad_sinks = -(sink_weights * delta[..., 0]).sum(axis=(0, 2))
    return *gradients, grad_sinks.astype(np.float32)
