"""Mean squared error between two models' raw attention scores, in time linear in the number of
keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cukit.attention.divergence.kl_pairs import RowArrays, check_pairs, head_map_of, kl_options
from cukit.core.arrays import Array, adopt, namespace
from cukit.core.scalars import check_flag, check_number

_CHUNK = 256  # queries per block of a causal call


def attention_score_mse(
    q_t: Array,
    k_t: Array,
    q_s: Array,
    k_s: Array,
    *,
    causal: bool = False,
    scale_t: float | None = None,
    scale_s: float | None = None,
    head_map: Sequence[int] | None = None,
    row_weights: Array | None = None,
    return_grad: bool = False,
    grad_loss: float = 1.0,
) -> Array | tuple[Array, Array, Array]:
    """Mean squared difference of a student's and a teacher's raw attention scores (TinyBERT):

        row(b, h, i) = mean over unmasked keys j of (scale_t q_t k_t - scale_s q_s k_s)^2

    averaged over rows. The difference of two scores is a dot product of longer vectors,
    x_i y_j with x = [scale_t q_t, -scale_s q_s] and y = [k_t, k_s]. The sum over keys is then the
    quadratic form x_i^T (sum_j y_j y_j^T) x_i: matrix products in float32, O(seq_len d^2), without
    forming the scores. With a causal mask, the quadratic form covers the keys that are unmasked for
    all queries of a block of 256; the scores of the block's partly masked keys are formed.

    Args:
        q_t: the teacher's queries, float16|bfloat16|float32|float64
            [batch, seq_len_q, num_heads_t, head_dim_t].
        k_t: the teacher's keys, [batch, seq_len_kv, num_kv_heads_t, head_dim_t].
        q_s: the student's queries, [batch, seq_len_q, num_heads_s, head_dim_s]; dtype of q_t.
        k_s: the student's keys, [batch, seq_len_kv, num_kv_heads_s, head_dim_s].
        causal, scale_t, scale_s, head_map, row_weights: as in attention_kl; the mean is over heads,
            and over queries by weight.
        return_grad: also return the gradients of q_s and k_s.
        grad_loss: upstream gradient, a number.

    Returns:
        The loss, float32 0-d (float64 for float64 inputs); with `return_grad`,
        `(loss, grad_q_s, grad_k_s)`.

    Raises:
        ArrayError: dtype, shape or device of an argument.
        ConfigError: an option's value.

    The float32 rounding error is relative to the squared scores, not to their squared difference.
    Paper: Jiao et al., TinyBERT, arXiv:1909.10351.
    """
    op = "attention_score_mse"
    check_flag(op, "return_grad", return_grad)
    check_number(op, "grad_loss", grad_loss)
    options = kl_options(op, causal, None, 1.0, False, scale_t, scale_s, "mean", None, None, None)
    q_t, k_t, q_s, k_s, row_weights = adopt(op, q_t, k_t, q_s, k_s, row_weights)
    check_pairs(op, q_t, k_t, q_s, k_s, RowArrays(row_weights, None, None, None, None), options)
    heads = head_map_of(op, head_map, q_t.shape[2], q_s.shape[2]) or range(q_s.shape[2])
    xp, dtype = namespace(q_s), np.promote_types(q_s.dtype, np.float32)
    width_t = q_t.shape[-1]
    factor_t, factor_s = options.factor_t(width_t), options.factor_s(q_s.shape[-1])
    own = range(q_s.shape[2])
    x = xp.concatenate(
        [_by_heads(q_t, heads, dtype) * factor_t, _by_heads(q_s, own, dtype) * -factor_s], axis=-1
    )
    y = xp.concatenate(
        [_by_heads(k, each, dtype) for k, each in _key_heads(q_t, k_t, q_s, k_s, heads)], axis=-1
    )
    batch, num_heads, seq_q, _ = x.shape
    seq_kv = y.shape[2]
    num_keys = xp.full(seq_q, seq_kv)
    if causal:
        num_keys = xp.clip(xp.arange(seq_q) + seq_kv - seq_q + 1, 0, seq_kv)
    weights = xp.ones((batch, seq_q), dtype) if row_weights is None else row_weights
    total = weights.sum() * num_heads
    factors = (weights / xp.where(total == 0, 1, total) / xp.maximum(num_keys, 1)).astype(dtype)
    factors = factors[:, None, :, None]
    grad_x, loss = xp.zeros_like(x), xp.zeros((), dtype)
    pieces = _pieces(seq_q, seq_kv, causal)
    form = xp.zeros((batch, num_heads, x.shape[-1], x.shape[-1]), dtype)  # sum of y y^T
    done = 0
    for rows, before, end in pieces:
        more = y[:, :, done:before]
        form = form + more.swapaxes(-1, -2) @ more
        done = before
        part = x[:, :, rows] @ form
        if end > before:
            part += _differences(xp, x, y, rows, before, end) @ y[:, :, before:end]
        loss = loss + (part * x[:, :, rows] * factors[:, :, rows]).sum()
        grad_x[:, :, rows] = part
    if not return_grad:
        return loss
    grad_x *= factors * dtype.type(2 * grad_loss)
    weighted = x * (factors * dtype.type(2 * grad_loss))
    grad_y, form = xp.zeros_like(y), xp.zeros_like(form)  # sum of x x^T of later queries
    until = seq_kv
    for rows, before, end in reversed(pieces):
        # Keys before..until are unmasked for all queries of the pieces processed so far.
        grad_y[:, :, before:until] += y[:, :, before:until] @ form
        until = before
        form = form + weighted[:, :, rows].swapaxes(-1, -2) @ x[:, :, rows]
        if end > before:
            own_pairs = _differences(xp, x, y, rows, before, end).swapaxes(-1, -2)
            grad_y[:, :, before:end] += own_pairs @ weighted[:, :, rows]
    grad_y[:, :, :until] += y[:, :, :until] @ form
    grad_q = (grad_x[..., width_t:] * -factor_s).transpose(0, 2, 1, 3).astype(q_s.dtype)
    grad_k = grad_y[..., width_t:].transpose(0, 2, 1, 3)
    group = num_heads // k_s.shape[2]
    grad_k = grad_k.reshape(batch, seq_kv, k_s.shape[2], group, k_s.shape[3]).sum(axis=3)
    return loss, xp.ascontiguousarray(grad_q), grad_k.astype(k_s.dtype)


def _by_heads(array: Array, heads: Sequence[int], dtype: Any) -> Array:
    """[batch, seq, heads, d] -> [batch, heads, seq, d] of the given heads, as `dtype`."""
    xp = namespace(array)
    chosen = xp.take(array.transpose(0, 2, 1, 3), xp.asarray(list(heads)), axis=1)
    return chosen.astype(dtype)


def _key_heads(
    q_t: Array, k_t: Array, q_s: Array, k_s: Array, heads: Sequence[int]
) -> tuple[tuple[Array, list[int]], tuple[Array, list[int]]]:
    """Both models' keys, and the head that each of the student's query heads uses."""
    group_t, group_s = q_t.shape[2] // k_t.shape[2], q_s.shape[2] // k_s.shape[2]
    own = range(q_s.shape[2])
    return (k_t, [head // group_t for head in heads]), (k_s, [head // group_s for head in own])


def _pieces(seq_q: int, seq_kv: int, causal: bool) -> list[tuple[slice, int, int]]:
    """Blocks of queries, each with the number of keys unmasked for all of them, and for any."""
    if not causal:
        return [(slice(0, seq_q), seq_kv, seq_kv)]
    causal_offset = seq_kv - seq_q
    pieces = []
    for index in range(math.ceil(seq_q / _CHUNK)):
        first, last = index * _CHUNK, min((index + 1) * _CHUNK, seq_q)
        before, end = (min(max(0, row + causal_offset), seq_kv) for row in (first + 1, last))
        pieces.append((slice(first, last), before, end))
    return pieces


def _differences(xp: Any, x: Array, y: Array, rows: slice, before: int, end: int) -> Array:
    """Score differences for the keys that are masked for some of a block's queries, 0 if masked."""
    causal_offset = y.shape[2] - x.shape[2]
    queries, keys = xp.arange(rows.start, rows.stop)[:, None], xp.arange(before, end)
    differences = x[:, :, rows] @ y[:, :, before:end].swapaxes(-1, -2)
    return xp.where(keys <= queries + causal_offset, differences, 0)
