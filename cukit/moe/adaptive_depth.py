"""Adaptive depth: each token passes through its own number of layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    Array,
    adopt,
    check_array,
    check_same_dtype,
    empty,
    is_gpu_array,
    namespace,
)
from cukit.core.scalars import check_choice, check_flag, check_integer
from cukit.errors import ArrayError
from cukit.gemm import linear, linear_backward
from cukit.moe.depth_routing import depth_gather, row_specs
from cukit.reference import depth as reference
from cukit.registry import register

__all__ = [
    "DepthStates",
    "adaptive_depth",
    "adaptive_depth_backward",
    "create_adaptive_depth_mask",
]

_ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")


def create_adaptive_depth_mask(depth: Array, num_layers: int) -> Array:
    """The mask of the tokens that pass through each layer.

    Args:
        depth: int32|int64 [tokens], the number of layers that each token passes through.
        num_layers: number of layers of the stack.

    Returns:
        bool [num_layers, tokens], on the device of `depth`. Raises ArrayError or ConfigError.
    """
    op = "create_adaptive_depth_mask"
    (depth,) = adopt(op, depth)
    check_array(op, "depth", depth, dtypes=INDEX_DTYPES, ndim=1, contiguous=None)
    check_integer(op, "num_layers", num_layers, least=0, most=2**20)
    return reference.create_adaptive_depth_mask(depth, num_layers)


class DepthStates(NamedTuple):
    """The forward's intermediate results, for :func:`adaptive_depth_backward`."""

    order: Array
    """int32 [1, tokens]: the tokens sorted by depth, deepest first; the sort is stable."""
    places: Array
    """int32 [1, tokens]: the position of each token in that order."""
    counts: tuple[int, ...]
    """Tokens that pass through each layer: the first `count` of the order."""
    inputs: tuple[Array, ...]
    """Input of each layer that any token reaches, [count, hidden]."""
    preactivations: tuple[Array | None, ...]
    """Preactivation of each such layer; None without an activation."""


def adaptive_depth(
    x: Array,
    weights: Array,
    depth: Array,
    activation: str | None = None,
    *,
    return_states: bool = False,
) -> Any:
    """Passes each token through its first `depth` layers, `h <- f(h w_l^T)`.

    Tokens are sorted by depth, deepest first, so that the tokens of each layer are the first rows
    of one matrix and a layer is one dense product.

    Args:
        x: float16|bfloat16 (float32|float64 on the CPU) [tokens, hidden], C-contiguous.
        weights: dtype of `x`, [layers, hidden, hidden].
        depth: int32|int64 [tokens], 0 to `layers`; 0 leaves a token unchanged. A NumPy array, or an
            array on the GPU, which is copied to the host with a synchronisation.
        activation: f, as in :func:`linear`.
        return_states: also return the states that the backward needs.

    Returns:
        A new array [tokens, hidden]; with `return_states` the pair `(out, DepthStates)`.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument, or a depth out of range.
        ConfigError: an unknown activation.

    The host sorts the tokens. Runs on CuPy's current stream; deterministic.

    >>> import numpy as np, cukit as ck
    >>> double = np.stack([2 * np.eye(4, dtype=np.float32)] * 3)
    >>> ck.adaptive_depth(np.ones((4, 4), np.float32), double, np.array([0, 3, 1, 2]))[:, 0]
    array([1., 8., 2., 4.], dtype=float32)
    """
    x, weights, depth = adopt("adaptive_depth", x, weights, depth)
    check_choice("adaptive_depth", "activation", activation, _ACTIVATIONS)
    check_flag("adaptive_depth", "return_states", return_states)
    check_array("adaptive_depth", "x", x, dtypes=FLOAT_DTYPES, ndim=2)
    check_array("adaptive_depth", "weights", weights, shape=(None, x.shape[1], x.shape[1]))
    check_array("adaptive_depth", "depth", depth, dtypes=INDEX_DTYPES, shape=x.shape[:1])
    check_same_dtype("adaptive_depth", x=x, weights=weights)
    order, counts = _sort(depth, weights.shape[0])
    order, places = (namespace(x).asarray(each[None]) for each in (order, _inverse(order)))

    rows = depth_gather(x[None], order)[0]
    finished = rows.copy() if return_states else rows
    inputs: list[Array] = []
    preactivations: list[Array | None] = []
    for layer, count in enumerate(counts):
        if not count:
            break
        inputs.append(rows[:count])
        keeps = return_states and activation is not None
        result = linear(inputs[-1], weights[layer], None, activation, return_preactivation=keeps)
        rows, before = result if keeps else (result, None)
        preactivations.append(before)
        further = counts[layer + 1] if layer + 1 < len(counts) else 0
        finished[further:count] = rows[further:]
    out = depth_gather(finished[None], places)[0]
    if not return_states:
        return out
    return out, DepthStates(order, places, counts, tuple(inputs), tuple(preactivations))


def adaptive_depth_backward(
    grad_out: Array, weights: Array, states: DepthStates, activation: str | None = None
) -> tuple[Array, Array]:
    """Gradients of :func:`adaptive_depth`.

    Args:
        grad_out: dtype of the forward's `x`, [tokens, hidden].
        weights, activation: as in the forward.
        states: the forward's, from `return_states`.

    Returns:
        `(grad_x, grad_weights)`, [tokens, hidden] and [layers, hidden, hidden].

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: an unknown activation.

    Deterministic.
    """
    op = "adaptive_depth_backward"
    grad_out, weights = adopt(op, grad_out, weights)
    check_choice(op, "activation", activation, _ACTIVATIONS)
    if not isinstance(states, DepthStates):
        raise ArrayError(
            f"{op}: states must be the DepthStates of the forward, got {type(states).__name__}"
        )
    tokens = states.order.shape[1]
    check_array(op, "grad_out", grad_out, dtypes=FLOAT_DTYPES, shape=(tokens, None))
    hidden = grad_out.shape[1]
    check_array(op, "weights", weights, shape=(len(states.counts), hidden, hidden))
    check_same_dtype(op, grad_out=grad_out, weights=weights)
    # The first `count` rows hold the gradient of the layer's output, the others still `grad_out`.
    grad = depth_gather(grad_out[None], states.order)[0]
    grad_weights = empty(weights, weights.shape)
    for layer in reversed(range(len(states.counts))):
        count = states.counts[layer]
        if not count:
            grad_weights[layer].fill(0)
            continue
        grad[:count], grad_weights[layer] = linear_backward(
            grad[:count],
            states.inputs[layer],
            weights[layer],
            states.preactivations[layer],
            activation,
        )
    return depth_gather(grad[None], states.places)[0], grad_weights


def _sort(depth: Array, num_layers: int) -> tuple[np.ndarray[Any, Any], tuple[int, ...]]:
    """The tokens sorted deepest first, and the number that pass through each layer."""
    host = depth.get() if is_gpu_array(depth) else depth
    if host.size and not 0 <= host.min() <= host.max() <= num_layers:
        raise ArrayError(
            f"adaptive_depth: depth must be 0 to the number of layers, {num_layers}, got "
            f"{host.min()} to {host.max()}"
        )
    order = np.argsort(-host, kind="stable").astype(np.int32)
    reached = np.bincount(host, minlength=num_layers + 1)[::-1].cumsum()[::-1]
    return order, tuple(reached[1:].tolist())


def _inverse(order: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    places = np.empty_like(order)
    places[order] = np.arange(order.size, dtype=np.int32)
    return places


register(
    name="adaptive_depth",
    family="moe",
    function=adaptive_depth,
    reference=reference.adaptive_depth,
    specs=row_specs("depth_gather"),
)
register(
    name="adaptive_depth_backward",
    family="moe",
    function=adaptive_depth_backward,
    reference=reference.adaptive_depth_backward,
    specs=row_specs("depth_gather"),
)
