"""RMSNorm and LayerNorm over the last axis."""

from __future__ import annotations

from typing import Any

from cukit.reference._xp import array_namespace, upcast, working_dtype

Array = Any


def rms_norm(
    x: Array,
    weight: Array,
    eps: float = 1e-6,
    residual: Array | None = None,
) -> Array | tuple[Array, Array]:
    """y = s / sqrt(mean(s^2) + eps) * weight with s = x; with a residual, s = x + residual is also
    returned."""
    xp = array_namespace(x)
    wide, w, r = upcast(working_dtype(x), x, weight, residual)
    new_residual = None
    if r is not None:
        # The sum is rounded before the norm, so that y is the norm of the returned sum.
        new_residual = (wide + r).astype(x.dtype, copy=False)
        wide = new_residual.astype(wide.dtype, copy=False)
    rstd = 1.0 / xp.sqrt(xp.mean(wide * wide, axis=-1, keepdims=True) + wide.dtype.type(eps))
    y = (wide * rstd * w).astype(x.dtype, copy=False)
    return y if new_residual is None else (y, new_residual)


def rms_norm_backward(
    grad_out: Array,
    x: Array,
    weight: Array,
    eps: float = 1e-6,
    *,
    grad_residual: Array | None = None,
) -> tuple[Array, Array]:
    """Gradients of rms_norm with respect to the normalised array and the weight."""
    xp = array_namespace(x)
    g, wide, w, gr = upcast(working_dtype(x), grad_out, x, weight, grad_residual)
    rstd = 1.0 / xp.sqrt(xp.mean(wide * wide, axis=-1, keepdims=True) + wide.dtype.type(eps))
    normalised = wide * rstd
    scaled = g * w
    grad_x = rstd * (scaled - normalised * xp.mean(scaled * normalised, axis=-1, keepdims=True))
    if gr is not None:
        grad_x = grad_x + gr
    grad_weight = xp.sum((g * normalised).reshape(-1, x.shape[-1]), axis=0)
    return grad_x.astype(x.dtype, copy=False), grad_weight.astype(weight.dtype, copy=False)


def layer_norm(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    eps: float = 1e-5,
    residual: Array | None = None,
) -> Array | tuple[Array, Array]:
    """y = (x - mean) / sqrt(var + eps) * weight + bias; residual as in rms_norm."""
    wide, w, b, r = upcast(working_dtype(x), x, weight, bias, residual)
    new_residual = None
    if r is not None:
        new_residual = (wide + r).astype(x.dtype, copy=False)
        wide = new_residual.astype(wide.dtype, copy=False)
    y = _normalise(wide, eps)[0] * w
    if b is not None:
        y = y + b
    y = y.astype(x.dtype, copy=False)
    return y if new_residual is None else (y, new_residual)


def layer_norm_backward(
    grad_out: Array,
    x: Array,
    weight: Array,
    eps: float = 1e-5,
    *,
    has_bias: bool = True,
    grad_residual: Array | None = None,
) -> tuple[Array, Array, Array | None]:
    """Gradients of layer_norm with respect to the normalised array, the weight and the bias."""
    xp = array_namespace(x)
    g, wide, w, gr = upcast(working_dtype(x), grad_out, x, weight, grad_residual)
    normalised, rstd = _normalise(wide, eps)
    scaled = g * w
    grad_x = scaled - xp.mean(scaled, axis=-1, keepdims=True)
    grad_x = grad_x - normalised * xp.mean(scaled * normalised, axis=-1, keepdims=True)
    grad_x = rstd * grad_x
    if gr is not None:
        grad_x = grad_x + gr
    grad_weight = xp.sum((g * normalised).reshape(-1, x.shape[-1]), axis=0)
    grad_weight = grad_weight.astype(weight.dtype, copy=False)
    grad_bias = None
    if has_bias:
        grad_bias = xp.sum(g.reshape(-1, x.shape[-1]), axis=0).astype(weight.dtype, copy=False)
    return grad_x.astype(x.dtype, copy=False), grad_weight, grad_bias


def _normalise(wide: Array, eps: float) -> tuple[Array, Array]:
    """(x - mean) / sqrt(var + eps), and the factor 1 / sqrt(var + eps)."""
    xp = array_namespace(wide)
    centred = wide - xp.mean(wide, axis=-1, keepdims=True)
    variance = xp.mean(centred * centred, axis=-1, keepdims=True)
    rstd = 1.0 / xp.sqrt(variance + wide.dtype.type(eps))
    return centred * rstd, rstd
