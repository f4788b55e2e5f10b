"""The feed-forward layer of a mixture of experts, composed of other references."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukit.reference.activations import silu_and_mul, silu_and_mul_backward
from cukit.reference.grouped_gemm import grouped_gemm, grouped_gemm_backward
from cukit.reference.moe import (
    Routing,
    moe_permute,
    moe_permute_backward,
    moe_unpermute,
    moe_unpermute_backward,
)

Array = Any


class ExpertActivations(NamedTuple):
    """Intermediate results of `moe_ffn` for its backward, in expert order.

    permuted: [rows, hidden], or [num_experts, capacity, hidden].
    joined: [..., 2 * width], gate and up, pre-activation.
    gated: [..., width].
    out: [..., hidden], before the weighted sum.
    """

    permuted: Array
    joined: Array
    gated: Array
    out: Array


class ExpertGradients(NamedTuple):
    """Gradients of `moe_ffn`.

    x: [num_tokens, hidden].
    weights: routing weights, float32 [num_tokens, top_k].
    gate_up, down: shapes of the experts' weights.
    """

    x: Array
    weights: Array
    gate_up: Array
    down: Array


def moe_ffn(
    x: Array,
    routing: Routing,
    gate_up: Array,
    down: Array,
    *,
    capacity: int | None = None,
    keep: bool = False,
) -> Array | tuple[Array, ExpertActivations]:
    """`y[t] = sum_s weights[t, s] down[e] (silu(gate[e] x[t]) * (up[e] x[t]))`."""
    num_experts, hidden = down.shape[:2]
    groups = groups_of(routing, capacity)
    num_rows = routing.rows.size if capacity is None else num_experts * capacity
    permuted = moe_permute(x, routing.rows, num_rows)
    if capacity is not None:
        permuted = permuted.reshape(num_experts, capacity, hidden)
    joined = grouped_gemm(permuted, gate_up, **groups)
    gated = silu_and_mul(joined)
    out = grouped_gemm(gated, down, **groups)
    y = moe_unpermute(out.reshape(-1, hidden), routing.rows, routing.weights)
    return (y, ExpertActivations(permuted, joined, gated, out)) if keep else y


def moe_ffn_backward(
    grad_out: Array,
    activations: ExpertActivations,
    routing: Routing,
    gate_up: Array,
    down: Array,
    *,
    capacity: int | None = None,
) -> ExpertGradients:
    """Gradients of `moe_ffn`, from its intermediate results."""
    permuted, joined, gated, out = activations
    hidden = grad_out.shape[1]
    groups = groups_of(routing, capacity)
    grad_rows, grad_weights = moe_unpermute_backward(
        grad_out, out.reshape(-1, hidden), routing.rows, routing.weights
    )
    grad_gated, grad_down = grouped_gemm_backward(
        grad_rows.reshape(out.shape), gated, down, **groups
    )
    grad_joined = silu_and_mul_backward(grad_gated, joined)
    grad_permuted, grad_gate_up = grouped_gemm_backward(grad_joined, permuted, gate_up, **groups)
    grad_x = moe_permute_backward(grad_permuted.reshape(-1, hidden), routing.rows)
    return ExpertGradients(grad_x, grad_weights, grad_gate_up, grad_down)


def groups_of(routing: Routing, capacity: int | None) -> dict[str, Array]:
    """The keyword argument of grouped products that locates the rows of the experts."""
    if capacity is None:
        return {"expert_offsets": routing.expert_offsets}
    return {"expert_counts": routing.expert_counts}
