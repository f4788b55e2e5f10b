"""Mixture of experts: routing, permutation to expert order and back, with gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cukit.reference._xp import array_namespace, check_range, sigmoid, working_dtype

Array = Any


class ExpertOrder(NamedTuple):
    """A permutation of the tokens' choices that makes the rows of each expert contiguous.

    rows: int32, shape of the expert ids: the row of each choice of a token; -1 for an expert id out
        of range and for a choice beyond the capacity.
    expert_counts: int32 [num_experts], number of choices per expert.
    expert_offsets: int32 [num_experts + 1], exclusive prefix sum of the counts; the last is the
        total.
    """

    rows: Array
    expert_counts: Array
    expert_offsets: Array


class Routing(NamedTuple):
    """The experts of each token, and the expert order.

    weights: float32 (float64 for float64 logits) [num_tokens, top_k]; 0 for dropped choices.
    experts: int32 [num_tokens, top_k], best first.
    rows, expert_counts, expert_offsets: see :class:`ExpertOrder`; counts include dropped choices.
    balance_loss, z_loss: scalars of the dtype of weights, None if not requested.
    """

    weights: Array
    experts: Array
    rows: Array
    expert_counts: Array
    expert_offsets: Array
    balance_loss: Array | None = None
    z_loss: Array | None = None


def topk_router(
    logits: Array,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias: Array | None = None,
    capacity: int | None = None,
    losses: bool = False,
) -> Routing:
    """The `top_k` experts of each row of `logits [num_tokens, num_experts]`."""
    xp = array_namespace(logits)
    wide = logits.astype(working_dtype(logits), copy=False)
    scores = _scores(wide, scoring)
    ranked = wide if bias is None else scores + bias.astype(wide.dtype, copy=False)
    # Stable sort of the negated values: NaN last, ties by expert index.
    experts = xp.argsort(-ranked, axis=1, kind="stable")[:, :top_k]
    weights = xp.take_along_axis(scores, experts, axis=1)
    if renormalize:
        weights = weights / _nonzero(xp, weights.sum(axis=1, keepdims=True))
    experts = experts.astype(xp.int32)
    order = expert_order(experts, logits.shape[1], capacity=capacity)
    weights = xp.where(order.rows < 0, xp.zeros_like(weights), weights)
    if not losses:
        return Routing(weights, experts, *order)
    return Routing(weights, experts, *order, *_losses(xp, wide, scores, scoring, order, top_k))


def topk_router_backward(
    grad_weights: Array,
    logits: Array,
    experts: Array,
    rows: Array,
    expert_counts: Array,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    grad_balance_loss: float = 0.0,
    grad_z_loss: float = 0.0,
) -> Array:
    """Gradient of `topk_router` with respect to `logits`; expert counts are constants."""
    xp = array_namespace(logits)
    num_tokens, num_experts = logits.shape
    if num_tokens == 0:
        return xp.zeros_like(logits)
    check_range("topk_router_backward", "experts", experts, num_experts)
    wide = logits.astype(working_dtype(logits), copy=False)
    scores = _scores(wide, scoring)
    grad = xp.where(rows < 0, 0, grad_weights).astype(wide.dtype, copy=False)
    if renormalize:
        chosen = xp.take_along_axis(scores, experts, axis=1)
        total = _nonzero(xp, chosen.sum(axis=1, keepdims=True))
        grad = (grad - (grad * chosen / total).sum(axis=1, keepdims=True)) / total
    grad_scores = xp.zeros_like(wide)
    grad_scores[xp.arange(num_tokens)[:, None], experts] = grad
    # balance_loss = num_experts * sum_e share[e] * mean_t probability[t, e]
    share = expert_counts.astype(wide.dtype) / (num_tokens * experts.shape[1])
    grad_probability = share * (grad_balance_loss * num_experts / num_tokens)
    if scoring == "softmax":
        grad_scores += grad_probability
        grad_logits = scores * (grad_scores - (scores * grad_scores).sum(axis=1, keepdims=True))
    else:
        total = _nonzero(xp, scores.sum(axis=1, keepdims=True))
        mean = (scores * grad_probability).sum(axis=1, keepdims=True) / total
        grad_scores += (grad_probability - mean) / total
        grad_logits = grad_scores * scores * (1 - scores)
    if grad_z_loss:
        probability = scores if scoring == "softmax" else _scores(wide, "softmax")
        slope = grad_z_loss * 2 / num_tokens * _log_sum_exp(xp, wide)
        grad_logits += slope[:, None] * probability
    return grad_logits.astype(logits.dtype, copy=False)


def expert_order(experts: Array, num_experts: int, *, capacity: int | None = None) -> ExpertOrder:
    """Stable counting sort of expert ids of any shape; ids out of range get no row."""
    xp = array_namespace(experts)
    ids = experts.reshape(-1)
    ids = xp.where((ids < 0) | (ids >= num_experts), num_experts, ids)
    counts = xp.bincount(ids, minlength=num_experts + 1)[: num_experts + 1]
    offsets = xp.zeros(num_experts + 2, xp.int64)
    offsets[1:] = xp.cumsum(counts)
    order = xp.argsort(ids, kind="stable")
    places = xp.empty(ids.size, xp.int64)
    places[order] = xp.arange(ids.size)
    rank = places - offsets[ids]
    if capacity is None:
        rows = xp.where(ids == num_experts, -1, places)
    else:
        rows = xp.where((ids == num_experts) | (rank >= capacity), -1, ids * capacity + rank)
    return ExpertOrder(
        rows.astype(xp.int32).reshape(experts.shape),
        counts[:num_experts].astype(xp.int32),
        offsets[: num_experts + 1].astype(xp.int32),
    )


def moe_permute(x: Array, rows: Array, num_rows: int | None = None) -> Array:
    """`y[rows[t, s]] = x[t]`; other rows of `y [num_rows, hidden]` are zero."""
    xp = array_namespace(x)
    num_rows = rows.size if num_rows is None else num_rows
    token, choice = xp.nonzero(rows >= 0)
    check_range("moe_permute", "rows", rows[token, choice], num_rows)
    permuted = xp.zeros((num_rows, x.shape[1]), x.dtype)
    permuted[rows[token, choice]] = x[token]
    return permuted


def moe_permute_backward(grad_out: Array, rows: Array) -> Array:
    """`grad_x[t] = sum_s grad_out[rows[t, s]]`."""
    return moe_unpermute(grad_out, rows)


def moe_unpermute(y: Array, rows: Array, weights: Array | None = None) -> Array:
    """`x[t] = sum_s weights[t, s] y[rows[t, s]]`; weights default to 1."""
    xp = array_namespace(y)
    wide = working_dtype(y)
    total = xp.zeros((rows.shape[0], y.shape[1]), wide)
    check_range("moe_unpermute", "rows", rows[rows >= 0], y.shape[0])
    for choice in range(rows.shape[1]):
        token = xp.flatnonzero(rows[:, choice] >= 0)
        part = y[rows[token, choice]].astype(wide, copy=False)
        if weights is not None:
            part = part * weights[token, choice, None].astype(wide, copy=False)
        total[token] += part
    return total.astype(y.dtype, copy=False)


def moe_unpermute_backward(
    grad_out: Array, y: Array, rows: Array, weights: Array
) -> tuple[Array, Array]:
    """Gradients of `moe_unpermute` with respect to `y` (0 in unused rows) and `weights`."""
    xp = array_namespace(y)
    wide = working_dtype(y)
    grad_y = xp.zeros_like(y)
    grad_weights = xp.zeros_like(weights)
    check_range("moe_unpermute_backward", "rows", rows[rows >= 0], y.shape[0])
    for choice in range(rows.shape[1]):
        token = xp.flatnonzero(rows[:, choice] >= 0)
        row = rows[token, choice]
        grad = grad_out[token].astype(wide, copy=False)
        grad_y[row] = grad * weights[token, choice, None].astype(wide, copy=False)
        grad_weights[token, choice] = (grad * y[row].astype(wide, copy=False)).sum(axis=1)
    return grad_y, grad_weights


def _scores(wide: Array, scoring: str) -> Array:
    """Scores of all experts, [num_tokens, num_experts]."""
    xp = array_namespace(wide)
    if scoring == "sigmoid":
        return sigmoid(wide)
    with np.errstate(invalid="ignore"):  # a row without a finite largest logit is NaN
        exponential = xp.exp(wide - _row_max(xp, wide))
    return exponential / exponential.sum(axis=1, keepdims=True)


def _row_max(xp: Any, wide: Array) -> Array:
    if not wide.size:
        return xp.zeros((wide.shape[0], 1), dtype=wide.dtype)
    return wide.max(axis=1, keepdims=True)


def _log_sum_exp(xp: Any, wide: Array) -> Array:
    largest = _row_max(xp, wide)
    with np.errstate(invalid="ignore"):  # as in _scores
        return largest[:, 0] + xp.log(xp.exp(wide - largest).sum(axis=1))


def _nonzero(xp: Any, total: Array) -> Array:
    """`total` as a divisor: 1 in place of 0, where the dividends are 0 too."""
    return xp.where(total == 0, xp.ones_like(total), total)


def _losses(
    xp: Any, wide: Array, scores: Array, scoring: str, order: ExpertOrder, top_k: int
) -> tuple[Array, Array]:
    num_tokens, num_experts = wide.shape
    if num_tokens == 0:
        return xp.zeros((), wide.dtype), xp.zeros((), wide.dtype)
    if scoring == "sigmoid":
        scores = scores / _nonzero(xp, scores.sum(axis=1, keepdims=True))
    share = order.expert_counts.astype(wide.dtype) / (num_tokens * top_k)
    balance = num_experts * (share * scores.mean(axis=0)).sum()
    z = (_log_sum_exp(xp, wide) ** 2).mean()
    return xp.asarray(balance, wide.dtype), xp.asarray(z, wide.dtype)
