"""The full matrix of attention scores, with all options.

Query heads of a group share keys: arrays are viewed as [batch, heads_kv, group, seq, head_dim].
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

Array = Any


class ScoreOptions(NamedTuple):
    """The operations applied to `q k^T` before the softmax, in the order of the fields."""

    scale: float | None = None
    softcap: float | None = None
    alibi_slopes: Array | None = None  # [heads_q] or [batch, heads_q]
    bias: Array | None = None  # broadcastable to [batch, heads_q, seq_q, seq_kv]
    mask: Array | None = None  # as bias
    causal: bool = False
    window_size: tuple[int | None, int | None] | None = None
    sinks: Array | None = None  # [heads_q]

    def of_sequence(self, index: int, seq_q: int, seq_kv: int) -> ScoreOptions:
        """The options of one sequence: selects its part of per-sequence arrays."""
        slopes = self.alibi_slopes
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[index : index + 1]
        return self._replace(
            alibi_slopes=slopes,
            bias=_part(self.bias, index, seq_q, seq_kv),
            mask=_part(self.mask, index, seq_q, seq_kv),
        )


def _part(matrix: Array | None, index: int, seq_q: int, seq_kv: int) -> Array | None:
    if matrix is None:
        return None
    matrix = four_axes(matrix)
    if matrix.shape[0] > 1:
        matrix = matrix[index : index + 1]
    rows = slice(0, seq_q if matrix.shape[2] > 1 else 1)
    columns = slice(0, seq_kv if matrix.shape[3] > 1 else 1)
    return matrix[:, :, rows, columns]


def four_axes(matrix: Array) -> Array:
    """A view with four axes; leading axes of extent 1 are added, as in broadcasting."""
    return matrix.reshape((1,) * (4 - matrix.ndim) + matrix.shape)


def scale_of(q: Array, scale: float | None) -> float:
    """The scale of the scores; default 1 / sqrt(head_dim)."""
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale


def q_heads(x: Array, group: int) -> Array:
    """[batch, seq, heads_kv * group, d] -> [batch, heads_kv, group, seq, d]."""
    batch, seq, heads, width = x.shape
    return x.reshape(batch, seq, heads // group, group, width).transpose(0, 2, 3, 1, 4)


def kv_heads(x: Array) -> Array:
    """[batch, seq, heads_kv, d] -> [batch, heads_kv, 1, seq, d]."""
    return x.transpose(0, 2, 1, 3)[:, :, None]


def merge_heads(x: Array) -> Array:
    """[batch, heads_kv, group, seq, d] -> [batch, seq, heads_kv * group, d]."""
    batch, heads_kv, group, seq, width = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, seq, heads_kv * group, width)


def group_of(q: Array, k: Array) -> int:
    """Number of query heads per key head."""
    return q.shape[2] // k.shape[2] if k.shape[2] else 1


def attention_scores(
    xp: Any, q: Array, k: Array, options: ScoreOptions
) -> tuple[Array, Array | None]:
    """The scores [batch, heads_kv, group, seq_q, seq_kv], -infinity where masked, and the
    derivative of the softcap (None without a softcap)."""
    group = group_of(q, k)
    scaled = q * q.dtype.type(scale_of(q, options.scale))
    scores = xp.matmul(q_heads(scaled, group), kv_heads(k).swapaxes(-1, -2))
    slope = None
    if options.softcap is not None:
        scores /= options.softcap
        xp.tanh(scores, out=scores)
        slope = 1 - scores * scores
        scores *= options.softcap
    seq_q, seq_kv = scores.shape[-2:]
    # Offset of a key from the diagonal, which is aligned to the ends of both sequences.
    ahead = xp.arange(seq_kv) - xp.arange(seq_q)[:, None] - (seq_kv - seq_q)
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.astype(scores.dtype, copy=False)
        slopes = slopes.reshape(-1, k.shape[2], group, 1, 1)
        scores -= slopes * xp.abs(ahead).astype(scores.dtype)
    if options.bias is not None:
        scores += _grouped(options.bias, k.shape[2], group).astype(scores.dtype, copy=False)
    for masked in _masks(xp, ahead, options, k.shape[2], group):
        xp.copyto(scores, -math.inf, where=masked)
    return scores, slope


def _masks(xp: Any, ahead: Array, options: ScoreOptions, heads_kv: int, group: int) -> list[Array]:
    """Boolean arrays that broadcast to the scores, True where masked."""
    masked = []
    if options.mask is not None:
        masked.append(xp.logical_not(_grouped(options.mask, heads_kv, group)))
    left, right = options.window_size or (None, None)
    if options.causal:
        right = 0
    if left is not None:
        masked.append(ahead < -left)
    if right is not None:
        masked.append(ahead > right)
    return masked


def _grouped(matrix: Array, heads_kv: int, group: int) -> Array:
    """[batch, heads_q or 1, seq_q, seq_kv] -> [batch, heads_kv or 1, group or 1, seq_q, seq_kv]."""
    matrix = four_axes(matrix)
    batch, heads, rows, columns = matrix.shape
    if heads == 1:
        return matrix[:, :, None]
    return matrix.reshape(batch, heads_kv, group, rows, columns)


def log_sum_exp(xp: Any, scores: Array) -> Array:
    """log sum_j exp(scores_j) along the last axis; -infinity for rows without visible keys."""
    if not scores.shape[-1]:
        return xp.full(scores.shape[:-1], -math.inf, dtype=scores.dtype)
    top = scores.max(axis=-1)
    base = xp.where(top == -math.inf, 0, top)
    total = xp.exp(scores - base[..., None]).sum(axis=-1)
    return xp.where(total == 0, -math.inf, base + xp.log(xp.where(total == 0, 1, total)))


def sink_scores(sinks: Array, heads_kv: int, group: int, dtype: Any) -> Array:
    """[heads_q] -> [1, heads_kv, group, 1, 1]."""
    return sinks.astype(dtype, copy=False).reshape(1, heads_kv, group, 1, 1)
