"""A bank of layers with a router that selects a few layers per sample."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukit.reference._xp import array_namespace, working_dtype
from cukit.reference.activations import activate, activation_slope
from cukit.reference.grouped_gemm import grouped_gemm, grouped_gemm_backward
from cukit.reference.moe import Routing, moe_permute, topk_router, topk_router_backward

Array = Any


class BankActivations(NamedTuple):
    """Intermediate results of `layer_bank` for its backward.

    means: float32 (float64 for float64 x) [batch, dim], the mean token of each sample.
    logits: dtype of means [batch, num_layers].
    routing: result of :func:`topk_router`.
    permuted: dtype of x [batch * top_k, seq_len, dim], the samples sorted by layer.
    hidden: like permuted, pre-activations.
    """

    means: Array
    logits: Array
    routing: Routing
    permuted: Array
    hidden: Array


class BankGradients(NamedTuple):
    """Gradients of `layer_bank`, each with the shape of its argument."""

    x: Array
    router: Array
    layers: Array


def layer_bank(
    x: Array,
    router: Array,
    layers: Array,
    top_k: int,
    *,
    activation: str = "silu",
    renormalize: bool = False,
    keep: bool = False,
) -> Array | tuple[Array, BankActivations]:
    """`y = x + sum_i p_i act(layers[i] x)` over the selected layers of each sample."""
    xp = array_namespace(x)
    dtype = working_dtype(x)
    batch, seq_len, dim = x.shape
    means = x.astype(dtype, copy=False).sum(axis=1) / max(seq_len, 1)
    logits = means @ router.astype(dtype, copy=False).T
    routing = topk_router(logits, top_k, renormalize=renormalize)
    permuted = moe_permute(x.reshape(batch, -1), routing.rows).reshape(-1, dim)
    hidden = grouped_gemm(permuted, layers, routing.expert_offsets * seq_len)
    hidden = hidden.reshape(-1, seq_len, dim)
    y = x.astype(dtype)
    for choice in range(top_k):
        activated = activate(hidden[routing.rows[:, choice]].astype(dtype, copy=False), activation)
        y += routing.weights[:, choice, None, None].astype(dtype, copy=False) * activated
    y = y.astype(x.dtype)
    if not keep:
        return y
    narrow = logits if dtype == xp.float64 else logits.astype(xp.float32)
    permuted = permuted.reshape(hidden.shape)
    return y, BankActivations(means, narrow, routing, permuted, hidden)


def layer_bank_backward(
    grad_out: Array,
    activations: BankActivations,
    router: Array,
    layers: Array,
    *,
    activation: str = "silu",
    renormalize: bool = False,
) -> BankGradients:
    """Gradients of :func:`layer_bank` with respect to input, router and layers."""
    means, logits, routing, permuted, hidden = activations
    dtype = working_dtype(grad_out)
    _, seq_len, dim = grad_out.shape
    grad = grad_out.astype(dtype, copy=False)
    weights = routing.weights.astype(dtype, copy=False)
    wide = hidden.astype(dtype, copy=False)
    activated, slope = activate(wide, activation), activation_slope(wide, activation)
    grad_hidden = slope  # overwritten row by row
    grad_weights = weights.copy()
    for choice in range(weights.shape[1]):
        rows = routing.rows[:, choice]
        grad_weights[:, choice] = (grad * activated[rows]).sum(axis=(1, 2))
        grad_hidden[rows] = weights[:, choice, None, None] * grad * slope[rows]
    grad_logits = topk_router_backward(
        grad_weights, logits, routing.experts, routing.rows, routing.expert_counts,
        renormalize=renormalize,
    )  # fmt: skip
    grad_permuted, grad_layers = grouped_gemm_backward(
        grad_hidden.astype(hidden.dtype).reshape(-1, dim),
        permuted.reshape(-1, dim),
        layers,
        routing.expert_offsets * seq_len,
    )
    grad_permuted = grad_permuted.reshape(hidden.shape)
    grad_means = grad_logits @ router.astype(grad_logits.dtype, copy=False)
    grad_x = grad + (grad_means / max(seq_len, 1))[:, None]
    for choice in range(weights.shape[1]):
        grad_x += grad_permuted[routing.rows[:, choice]].astype(dtype, copy=False)
    grad_router = (grad_logits.T @ means).astype(router.dtype)
    return BankGradients(grad_x.astype(grad_out.dtype), grad_router, grad_layers)
