"""Causal depthwise convolutions along time."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukit.reference._xp import array_namespace, sigmoid, upcast, working_dtype

Array = Any

ACTIVATIONS = ("silu", "none")


class ConvGradients(NamedTuple):
    """Gradients of a causal convolution's arguments, each with dtype and shape of its argument;
    None for an argument that is None."""

    x: Array
    weight: Array
    bias: Array | None
    initial_state: Array | None


def causal_conv(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    initial_state: Array | None = None,
    activation: str = "silu",
) -> Array:
    """`z[t] = bias + sum_k weight[:, k] x[t - (width - 1) + k]`, `y = activation(z)`.

    x [batch, seq_len, channels]; weight [channels, width]; initial_state [batch, width - 1,
    channels]: the inputs before x, by default zeros.
    """
    z = _before_activation(x, weight, bias, initial_state)[0]
    y = z * sigmoid(z) if activation == "silu" else z
    return y.astype(x.dtype)


def causal_conv_step(
    state: Array,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: str = "silu",
) -> Array:
    """One token per sequence, x [batch, channels]; updates `state` and returns y."""
    y = causal_conv(x[:, None], weight, bias, initial_state=state, activation=activation)[:, 0]
    state[:, :-1] = state[:, 1:].copy()
    state[:, -1] = x
    return y


def causal_conv_backward(
    grad_y: Array,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    initial_state: Array | None = None,
    activation: str = "silu",
) -> ConvGradients:
    """Gradients of :func:`causal_conv`."""
    xp = array_namespace(x)
    z, padded, filters = _before_activation(x, weight, bias, initial_state)
    grad_z = grad_y.astype(z.dtype)
    if activation == "silu":
        gate = sigmoid(z)
        grad_z = grad_z * gate * (1 + z * (1 - gate))
    width, tokens = weight.shape[1], x.shape[1]
    grad_padded, grad_weight = xp.zeros_like(padded), xp.zeros_like(filters)
    for k in range(width):
        grad_padded[:, k : k + tokens] += filters[:, k] * grad_z
        grad_weight[:, k] = xp.sum(grad_z * padded[:, k : k + tokens], axis=(0, 1))
    return ConvGradients(
        grad_padded[:, width - 1 :].astype(x.dtype),
        grad_weight.astype(weight.dtype),
        None if bias is None else xp.sum(grad_z, axis=(0, 1)).astype(bias.dtype),
        None if initial_state is None else grad_padded[:, : width - 1].astype(x.dtype),
    )


def _before_activation(
    x: Array, weight: Array, bias: Array | None, initial_state: Array | None
) -> tuple[Array, Array, Array]:
    """z, the padded input (initial state followed by x) and the weights, in the working dtype."""
    xp = array_namespace(x)
    work = working_dtype(x, weight, bias, initial_state)
    wide, filters, shift, past = upcast(work, x, weight, bias, initial_state)
    batch, tokens, channels = x.shape
    width = weight.shape[1]
    if past is None:
        past = xp.zeros((batch, width - 1, channels), work)
    padded = xp.concatenate([past, wide], axis=1)
    z = xp.zeros(x.shape, work)
    if shift is not None:
        z += shift
    for k in range(width):
        z += filters[:, k] * padded[:, k : k + tokens]
    return z, padded, filters
