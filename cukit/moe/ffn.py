"""The feed-forward layer of a mixture of experts: gate, up and down projections of each expert."""

from __future__ import annotations

from functools import partial
from typing import Any

from cukit.core.arrays import Array, adopt, check_array, check_same_dtype, int32
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec
from cukit.core.scalars import check_flag
from cukit.errors import ArrayError, ArrayShapeError
from cukit.gemm import grouped_gated_linear, grouped_gemm, grouped_gemm_backward
from cukit.layers import silu_and_mul_backward
from cukit.moe.order import check_capacity, check_expert_count
from cukit.moe.permute import (
    moe_permute,
    moe_permute_backward,
    moe_unpermute,
    moe_unpermute_backward,
)
from cukit.reference import moe_ffn as reference
from cukit.reference.moe import Routing
from cukit.reference.moe_ffn import ExpertActivations, ExpertGradients, groups_of
from cukit.registry import get_op, register


def moe_ffn(
    x: Array,
    routing: Routing,
    gate_up: Array,
    down: Array,
    *,
    capacity: int | None = None,
    keep: bool = False,
) -> Array | tuple[Array, ExpertActivations]:
    """A mixture of SwiGLU experts: a token's output is the weighted sum of its experts' outputs.

        y[t] = sum_s weights[t, s] down[e] (silu(gate[e] x[t]) * (up[e] x[t])),  e = experts[t, s]

    Four launches: the permutation to expert order, a grouped product for gate and up with SwiGLU, a
    grouped product for down, and the weighted sum.

    Args:
        x: float16|bfloat16 [num_tokens, hidden], C-contiguous; float32|float64 on the CPU only.
        routing: from :func:`topk_router`; its `weights`, `rows`, `expert_counts` and
            `expert_offsets` are used.
        gate_up: dtype of `x`, [num_experts, 2 * width, hidden]: the rows of gate, then those of up.
        down: dtype of `x`, [num_experts, hidden, width].
        capacity: the capacity that was passed to the router.
        keep: also return the activations that the backward needs.

    Returns:
        `y`, [num_tokens, hidden]; with `keep`, `(y, ExpertActivations)`.

    Raises:
        ArrayError: dtype, shape or layout of an argument.
        ConfigError: `capacity` out of range, or `keep` is not a bool.

    Runs on CuPy's current stream, without synchronisation; deterministic.

    >>> import numpy as np, cukit as ck
    >>> x, gate_up, down = np.ones((1, 2)), np.ones((3, 2, 2)), np.ones((3, 2, 1))
    >>> ck.moe_ffn(x, ck.topk_router(np.zeros((1, 3)), 2), gate_up, down).round(3)
    array([[3.523, 3.523]])
    """
    op = "moe_ffn"
    check_flag(op, "keep", keep)
    _check_parts(op, "routing", routing, Routing)
    x, gate_up, down, *arrays = adopt(op, x, gate_up, down, *routing)
    routing = Routing(*arrays)
    capacity = _check(op, x, routing, gate_up, down, capacity)
    groups = groups_of(routing, capacity)
    num_experts, hidden = down.shape[:2]
    rows = routing.rows
    if capacity is None:
        permuted = moe_permute(x, rows)
    else:
        permuted = moe_permute(x, rows, num_rows=num_experts * capacity)
        permuted = permuted.reshape(num_experts, capacity, hidden)
    joined = None
    if keep:
        gated, joined = grouped_gated_linear(permuted, gate_up, **groups, keep=True)
    else:
        gated = grouped_gated_linear(permuted, gate_up, **groups)
    out = grouped_gemm(gated, down, **groups)
    y = moe_unpermute(out.reshape(-1, hidden), rows, routing.weights)
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
    """Gradients of :func:`moe_ffn` with respect to `x`, the routing's weights and the experts.

    Args:
        grad_out: gradient of `y`, [num_tokens, hidden].
        activations: as the forward returned them with `keep`.
        routing, gate_up, down, capacity: as in the forward.

    Returns:
        The :class:`ExpertGradients`; experts without tokens have gradients of zero.

    Raises:
        ArrayError, ConfigError: as :func:`moe_ffn`.
    """
    op = "moe_ffn_backward"
    _check_parts(op, "routing", routing, Routing)
    _check_parts(op, "activations", activations, ExpertActivations)
    grad_out, gate_up, down, *arrays = adopt(op, grad_out, gate_up, down, *routing)
    routing = Routing(*arrays)
    capacity = _check(op, grad_out, routing, gate_up, down, capacity)
    groups = groups_of(routing, capacity)
    activations = ExpertActivations(*adopt(op, *activations))
    rows, hidden = routing.rows, grad_out.shape[1]
    _check_activations(op, activations, grad_out, rows, down, capacity)
    permuted, joined, gated, out = activations
    grad_rows, grad_weights = moe_unpermute_backward(
        grad_out, out.reshape(-1, hidden), rows, routing.weights
    )
    grad_gated, grad_down = grouped_gemm_backward(
        grad_rows.reshape(out.shape), gated, down, **groups
    )
    grad_joined = silu_and_mul_backward(grad_gated, joined)
    grad_permuted, grad_gate_up = grouped_gemm_backward(grad_joined, permuted, gate_up, **groups)
    grad_x = moe_permute_backward(grad_permuted.reshape(-1, hidden), rows)
    return ExpertGradients(grad_x, grad_weights, grad_gate_up, grad_down)


def _check_parts(op: str, name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise ArrayError(f"{op}: {name} must be {kind.__name__}, got {type(value).__name__}")


def _check(
    op: str, x: Array, routing: Routing, gate_up: Array, down: Array, capacity: int | None
) -> int | None:
    """Checks the arguments; returns `capacity` as an int."""
    name = "x" if op == "moe_ffn" else "grad_out"
    check_array(op, "routing.rows", routing.rows, dtypes=(int32,), ndim=2)
    check_array(op, "routing.expert_counts", routing.expert_counts, dtypes=(int32,), ndim=1)
    num_experts = routing.expert_counts.shape[0]
    check_expert_count(op, num_experts)
    check_array(op, name, x, shape=(routing.rows.shape[0], None))
    check_array(op, "gate_up", gate_up, shape=(num_experts, None, x.shape[1]))
    if gate_up.shape[1] % 2:
        raise ArrayShapeError(
            f"{op}: gate_up holds gate and up rows, so axis 1 must be even; "
            f"got shape {gate_up.shape}"
        )
    width = gate_up.shape[1] // 2
    check_array(op, "down", down, shape=(num_experts, x.shape[1], width))
    check_same_dtype(op, **{name: x}, gate_up=gate_up, down=down)
    return check_capacity(op, capacity, num_experts)


def _check_activations(
    op: str,
    activations: ExpertActivations,
    grad_out: Array,
    rows: Array,
    down: Array,
    capacity: int | None,
) -> None:
    num_experts, hidden, width = down.shape
    leading = (rows.size,) if capacity is None else (num_experts, capacity)
    columns = {"permuted": hidden, "joined": 2 * width, "gated": width, "out": hidden}
    for name, extent in columns.items():
        array = getattr(activations, name)
        check_array(op, f"activations.{name}", array, shape=(*leading, extent))
        check_same_dtype(op, grad_out=grad_out, **{f"activations.{name}": array})


def _specs(ops: tuple[str, ...], device: Device) -> list[KernelSpec]:
    """Kernel variants of `ops`, which this op calls."""
    return list(dict.fromkeys(spec for name in ops for spec in get_op(name).specs(device)))


register(
    name="moe_ffn",
    family="moe",
    function=moe_ffn,
    reference=reference.moe_ffn,
    specs=partial(_specs, ("moe_permute", "grouped_gated_linear", "grouped_gemm", "moe_unpermute")),
)
register(
    name="moe_ffn_backward",
    family="moe",
    function=moe_ffn_backward,
    reference=reference.moe_ffn_backward,
    specs=partial(_specs, ("moe_unpermute_backward", "grouped_gemm_backward")),
)
