"""Layers that skip tokens: per-token depth, or tokens chosen by a router (mixture of depths)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cukit.reference._xp import array_namespace, check_range, sigmoid, upcast, working_dtype
from cukit.reference.gemm import linear, linear_backward

Array = Any


class DepthRouting(NamedTuple):
    """The tokens of each sequence that a router selects for a block."""

    indices: Array
    """int32 [batch, capacity]: positions of the selected tokens, ascending."""
    slots: Array
    """int32 [batch, seq_len]: index of each token in `indices`; -1 if not selected."""
    weights: Array
    """float32 [batch, capacity] (float64 for float64 logits): factors of the block's results."""


def depth_router(logits: Array, capacity: int) -> DepthRouting:
    """Selects the `capacity` tokens with the largest logits; ties by position, NaN last."""
    xp = array_namespace(logits)
    (wide,) = upcast(working_dtype(logits), logits)
    order = xp.argsort(-wide, axis=1, kind="stable")
    indices = xp.sort(order[:, :capacity], axis=1).astype(np.int32)
    slots = xp.full(logits.shape, -1, np.int32)
    slots[xp.arange(len(logits))[:, None], indices] = xp.arange(capacity, dtype=np.int32)
    chosen = xp.take_along_axis(wide, indices.astype(np.int64), axis=1)
    return DepthRouting(indices, slots, sigmoid(chosen))


def depth_router_backward(
    grad_weights: Array, weights: Array, slots: Array, dtype: Any = None
) -> Array:
    """Gradient of the logits: grad_weights times the sigmoid's derivative; 0 for other tokens."""
    grad = grad_weights * weights * (1 - weights)
    return _at_slots(grad[:, :, None], slots)[:, :, 0].astype(
        weights.dtype if dtype is None else dtype
    )


def _at_slots(rows: Array, slots: Array) -> Array:
    """The rows of [batch, capacity, hidden] at slots [batch, seq_len]; zeros for slots out of
    range."""
    xp = array_namespace(rows)
    batch, capacity, hidden = rows.shape
    padded = xp.concatenate([rows, xp.zeros((batch, 1, hidden), rows.dtype)], axis=1)
    at = xp.where((slots >= 0) & (slots < capacity), slots, capacity).astype(np.int64)
    return xp.take_along_axis(padded, at[:, :, None], axis=1)


def depth_gather(x: Array, indices: Array) -> Array:
    """The rows of x [batch, seq_len, hidden] at indices [batch, capacity]."""
    xp = array_namespace(x)
    check_range("depth_gather", "indices", indices, x.shape[1])
    bits = x.view(np.uint16) if x.itemsize == 2 else x  # CuPy cannot index bfloat16
    chosen = xp.take_along_axis(bits, indices[:, :, None].astype(np.int64), axis=1)
    return chosen.view(x.dtype)


def depth_combine(x: Array, y: Array, weights: Array, slots: Array) -> Array:
    """x plus weights * y at the selected tokens."""
    wide, rows, factors = upcast(working_dtype(x), x, y, weights)
    added = _at_slots(rows * factors[:, :, None], slots)
    return (wide + added).astype(x.dtype, copy=False)


def depth_combine_backward(
    grad_out: Array, y: Array, weights: Array, indices: Array
) -> tuple[Array, Array]:
    """Gradients of y and weights; the gradient of x is grad_out."""
    grad, rows, factors = upcast(working_dtype(grad_out), grad_out, y, weights)
    chosen = depth_gather(grad, indices)
    grad_y = (chosen * factors[:, :, None]).astype(y.dtype, copy=False)
    return grad_y, (chosen * rows).sum(axis=2).astype(weights.dtype, copy=False)


def create_adaptive_depth_mask(depth: Array, num_layers: int) -> Array:
    """bool [num_layers, tokens]: whether a token passes through each layer."""
    xp = array_namespace(depth)
    return depth[None] >= xp.arange(1, num_layers + 1, dtype=depth.dtype)[:, None]


def adaptive_depth(x: Array, weights: Array, depth: Array, activation: str | None = None) -> Array:
    """Applies the first `depth[t]` layers to token t."""
    xp = array_namespace(x)
    for mask, weight in zip(create_adaptive_depth_mask(depth, len(weights)), weights, strict=True):
        x = xp.where(mask[:, None], linear(x, weight, None, activation), x)
    return x


def adaptive_depth_backward(
    grad_out: Array,
    x: Array,
    weights: Array,
    depth: Array,
    activation: str | None = None,
) -> tuple[Array, Array]:
    """Gradients of x and weights."""
    xp = array_namespace(x)
    masks = create_adaptive_depth_mask(depth, len(weights))
    states = []
    for mask, weight in zip(masks, weights, strict=True):
        y, z = linear(x, weight, None, activation, return_preactivation=True)
        states.append((x, z))
        x = xp.where(mask[:, None], y, x)
    grad, grad_weights = grad_out, xp.empty_like(weights)
    for layer in reversed(range(len(weights))):
        here = xp.where(masks[layer][:, None], grad, 0).astype(grad.dtype, copy=False)
        before, grad_weights[layer] = linear_backward(
            here, states[layer][0], weights[layer], states[layer][1], activation
        )
        grad = xp.where(masks[layer][:, None], before, grad)
    return grad, grad_weights
