"""Attention as plain low-precision code would do it: every matrix that it materialises is rounded.

The yardstick of the kernels' error, for outputs and gradients alike.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = Any


def _heads(x: Array, group: int) -> Array:
    """[batch, seq, heads, d] -> float32 [batch, heads * group, seq, d]."""
    return np.repeat(x.astype(np.float32).transpose(0, 2, 1, 3), group, axis=1)


def _probabilities(q: Array, k: Array, causal: bool) -> tuple[Array, Array]:
    group = q.shape[2] // k.shape[2]
    scores = _heads(q, 1) @ _heads(k, group).swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores.astype(q.dtype).astype(np.float32)
    if causal:
        seq_q, seq_kv = scores.shape[-2:]
        hidden = np.arange(seq_kv) > np.arange(seq_q)[:, None] + seq_kv - seq_q
        scores[..., hidden] = -np.inf
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(top == -np.inf, 0, top)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    return (weights / np.where(total == 0, 1, total)).astype(q.dtype).astype(np.float32), lse


def forward(q: Array, k: Array, v: Array, causal: bool) -> tuple[Array, Array]:
    """(out, lse)"""
    weights, lse = _probabilities(q, k, causal)
    out = weights @ _heads(v, q.shape[2] // k.shape[2])
    return out.transpose(0, 2, 1, 3).astype(q.dtype), lse.astype(np.float32)


def backward(grad_out: Array, q: Array, k: Array, v: Array, causal: bool) -> tuple[Array, ...]:
    """(grad_q, grad_k, grad_v)"""
    dtype, (batch, seq_kv, heads_kv, width) = q.dtype, k.shape
    group = q.shape[2] // heads_kv
    weights, _ = _probabilities(q, k, causal)
    g = _heads(grad_out, 1)
    grad_weights = (g @ _heads(v, group).swapaxes(-1, -2)).astype(dtype).astype(np.float32)
    delta = (weights * grad_weights).sum(axis=-1, keepdims=True)
    grad_scores = (weights * (grad_weights - delta)).astype(dtype).astype(np.float32)
    grad_scores /= math.sqrt(width)
    grad_q = (grad_scores @ _heads(k, group)).transpose(0, 2, 1, 3)

    def of_keys(x: Array) -> Array:
        """[batch, heads_q, seq_kv, d] -> [batch, seq_kv, heads_kv, d], groups summed."""
        return x.reshape(batch, heads_kv, group, seq_kv, width).sum(axis=2).transpose(0, 2, 1, 3)

    grad_k = of_keys(grad_scores.swapaxes(-1, -2) @ _heads(q, 1))
    grad_v = of_keys(weights.swapaxes(-1, -2) @ g)
    return grad_q.astype(dtype), grad_k.astype(dtype), grad_v.astype(dtype)
