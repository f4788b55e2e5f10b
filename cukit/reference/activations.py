"""Gated and plain activations (SwiGLU, GeGLU, GELU) and their gradients.

A gated input is the concatenation of gate and up projection along the last axis, `[..., 2H]`.
"""

from __future__ import annotations

import math
from typing import Any

from cukit.reference._xp import array_namespace, sigmoid, working_dtype

Array = Any

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715


def silu_and_mul(x: Array) -> Array:
    """`silu(gate) * up` with `gate, up = x[..., :H], x[..., H:]` (Shazeer 2020, SwiGLU)."""
    gate, up = _split(x)
    out = sigmoid(gate)
    out *= gate
    out *= up
    return out.astype(x.dtype, copy=False)


def silu_and_mul_backward(grad_out: Array, x: Array) -> Array:
    """Gradient of `silu_and_mul` with respect to `x`."""
    gate, up = _split(x)
    grad = grad_out.astype(gate.dtype, copy=False)
    sigma = sigmoid(gate)
    silu = gate * sigma
    grad_up = grad * silu
    # silu' = sigma (1 + gate (1 - sigma)) = silu + sigma (1 - silu)
    slope = 1 - silu
    slope *= sigma
    slope += silu
    slope *= grad
    slope *= up
    return _join(slope, grad_up, x)


def gelu_and_mul(x: Array, *, approximate: str = "tanh") -> Array:
    """`gelu(gate) * up` with `gate, up = x[..., :H], x[..., H:]` (Shazeer 2020, GeGLU)."""
    gate, up = _split(x)
    return (_gelu(gate, approximate) * up).astype(x.dtype)


def gelu_and_mul_backward(grad_out: Array, x: Array, *, approximate: str = "tanh") -> Array:
    """Gradient of `gelu_and_mul` with respect to `x`."""
    gate, up = _split(x)
    grad = grad_out.astype(gate.dtype, copy=False)
    grad_gate = grad * up * _gelu_slope(gate, approximate)
    return _join(grad_gate, grad * _gelu(gate, approximate), x)


def gelu(x: Array, *, approximate: str = "none") -> Array:
    """`x Phi(x)`, Phi the standard normal CDF (Hendrycks & Gimpel 2016)."""
    return _gelu(x.astype(working_dtype(x), copy=False), approximate).astype(x.dtype)


def gelu_backward(grad_out: Array, x: Array, *, approximate: str = "none") -> Array:
    """Gradient of `gelu` with respect to `x`."""
    wide = x.astype(working_dtype(x), copy=False)
    slope = _gelu_slope(wide, approximate)
    return (grad_out.astype(wide.dtype, copy=False) * slope).astype(x.dtype)


def activate(z: Array, name: str | None) -> Array:
    """Applies the activation of a linear layer: None, "relu", "gelu", "gelu_tanh" or "silu"."""
    if name is None:
        return z
    if name == "relu":
        return array_namespace(z).maximum(z, 0)
    if name == "silu":
        return z * sigmoid(z)
    return _gelu(z, _APPROXIMATE[name])


def activation_slope(z: Array, name: str | None) -> Array:
    """Derivative of `activate` at `z`; that of ReLU is 0 at 0."""
    if name is None:
        return array_namespace(z).ones_like(z)
    if name == "relu":
        return (z > 0).astype(z.dtype)
    if name == "silu":
        sigma = sigmoid(z)
        return sigma * (1 + z * (1 - sigma))
    return _gelu_slope(z, _APPROXIMATE[name])


_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def _split(x: Array) -> tuple[Array, Array]:
    wide = x.astype(working_dtype(x), copy=False)
    hidden = x.shape[-1] // 2
    return wide[..., :hidden], wide[..., hidden:]


def _join(grad_gate: Array, grad_up: Array, x: Array) -> Array:
    grad_x = array_namespace(x).empty(x.shape, x.dtype)
    hidden = x.shape[-1] // 2
    grad_x[..., :hidden] = grad_gate
    grad_x[..., hidden:] = grad_up
    return grad_x


def _gelu(x: Array, approximate: str) -> Array:
    return x * _gelu_gate(x, approximate)


def _gelu_gate(x: Array, approximate: str) -> Array:
    """GELU(x) / x. Uses 0.5 (1 + tanh(u)) = sigmoid(2u)."""
    if approximate == "tanh":
        return sigmoid(2 * SQRT_2_OVER_PI * (x + GELU_CUBIC * x**3))
    return 0.5 * _erfc(x * -math.sqrt(0.5))


def _gelu_slope(x: Array, approximate: str) -> Array:
    gate = _gelu_gate(x, approximate)
    if approximate == "tanh":
        return gate + x * gate * (1 - gate) * 2 * SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * x**2)
    density = array_namespace(x).exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    return gate + x * density


def _erfc(x: Array) -> Array:
    """The complementary error function. NumPy has none: math.erfc is applied to each element."""
    xp = array_namespace(x)
    if xp.__name__ == "numpy":
        return xp.asarray(xp.frompyfunc(math.erfc, 1, 1)(x), x.dtype)
    from cupyx.scipy.special import erfc

    return erfc(x)
