"""The attention that each key of a cache receives, which ranks keys for eviction."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukit.attention import flash_attention, flash_attention_backward
from cukit.core.arrays import Array, namespace

_COLUMNS = 8
"""head_dim of the values: the smallest that the kernels support."""
_MAX_SUM = 2.0**15
"""Upper bound of the sums: representable in every 16-bit dtype."""


def attention_received(queries: Any, k: Array, *, scale: float | None = None) -> Array:
    """The total attention of each key: float32 [batch, num_heads_kv, seq_len].

        received[j] = sum of the probabilities P[i, j] over queries i and the query heads of a group

    This is the gradient with respect to the values for an output gradient of ones, so
    `flash_attention_backward` computes it without materialising the scores. The values passed to it
    are zeros with few columns.

    queries: [batch, seq_len_q, num_heads_q, head_dim], of the last tokens; causal.
    """
    xp = namespace(k)
    batch, seq_q, heads_q, _ = queries.shape
    v = xp.zeros((*k.shape[:-1], _COLUMNS), np.float32).astype(k.dtype)
    options: dict[str, Any] = {"causal": True, "scale": scale}
    out, lse = flash_attention(queries, k, v, return_lse=True, **options)
    # A power of two, so that scaling is exact; small enough that no sum overflows.
    weight = 2.0 ** min(0, np.floor(np.log2(_MAX_SUM / (seq_q * heads_q // k.shape[2]))))
    ones = xp.full((batch, seq_q, heads_q, _COLUMNS), weight, np.float32).astype(k.dtype)
    _, _, sums = flash_attention_backward(
        ones, queries, k, v, out, lse, deterministic=True, **options
    )
    received = sums[..., 0].astype(np.float32) / np.float32(weight)
    return xp.ascontiguousarray(received.swapaxes(1, 2))


def pooled(scores: Array, size: int) -> Array:
    """Max pooling over windows of `size` along the last axis, with stride 1."""
    xp = namespace(scores)
    before, after = size // 2, (size - 1) // 2
    widths = [(0, 0)] * (scores.ndim - 1) + [(before, after)]
    padded = xp.pad(scores, widths, constant_values=-np.inf)
    best = scores
    for begin in range(size):
        best = xp.maximum(best, padded[..., begin : begin + scores.shape[-1]])
    return best


def top_positions(scores: Array, seq_len: int, count: int) -> Array:
    """The `count` of `seq_len` positions to keep, ascending: the newest, which have no scores, and
    those with the highest scores.

    scores: [batch, heads, positions]. Of equal scores, the lower position is kept.
    """
    xp = namespace(scores)
    num_scored = scores.shape[-1]
    best = xp.argsort(-scores, axis=-1, kind="stable")[..., : count - (seq_len - num_scored)]
    newest = xp.arange(num_scored, seq_len)
    newest = xp.broadcast_to(newest, (*scores.shape[:-1], newest.size))
    return xp.concatenate([xp.sort(best, axis=-1), newest], axis=-1)
