"""AdamW, the global norm of a list of gradients, and moving averages of parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cukit.reference._xp import array_namespace

Array = Any


def adamw(
    params: Sequence[Array],
    grads: Sequence[Array],
    state: Any,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    step: int,
    grad_scale: Any = None,
) -> None:
    """One step of Adam with decoupled weight decay, in place.

    m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,
    w = w - lr (weight_decay w + (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps)).

    g: the gradient, multiplied by `grad_scale` if given. `state` has the lists `master` (w),
    `exp_avg` (m) and `exp_avg_sq` (v); parameters are the rounded masters.
    """
    step_size = lr / (1.0 - beta1**step)
    root = math.sqrt(1.0 - beta2**step)
    for param, grad, master, m, v in zip(
        params, grads, state.master, state.exp_avg, state.exp_avg_sq, strict=True
    ):
        xp = array_namespace(param)
        g = grad.astype(m.dtype, copy=False)
        if grad_scale is not None:
            g = g * xp.asarray(grad_scale, m.dtype)
        m *= beta1
        m += g * (1.0 - beta1)
        v *= beta2
        v += g * g * (1.0 - beta2)
        if weight_decay:
            master *= 1.0 - lr * weight_decay
        master -= step_size * m / (xp.sqrt(v) * (1.0 / root) + eps)
        if master is not param:
            param[...] = master.astype(param.dtype, copy=False)


def global_norm(arrays: Sequence[Array]) -> Array:
    """Square root of the sum of all squares, float32 (float64 for float64 arrays)."""
    xp = array_namespace(arrays[0])
    work = xp.float64 if any(array.dtype == xp.float64 for array in arrays) else xp.float32
    total = xp.zeros((), xp.float64)
    for array in arrays:
        flat = array.reshape(-1).astype(work, copy=False)
        total = total + xp.sum(xp.square(flat), dtype=xp.float64)
    return xp.sqrt(total).astype(work)


def ema_update(
    averages: Sequence[Array],
    values: Sequence[Array],
    decay: float,
    copies: Sequence[Array] | None = None,
) -> None:
    """average += (1 - decay) (value - average), in place; copies are the rounded averages."""
    for average, value in zip(averages, values, strict=True):
        average += (1.0 - decay) * (value.astype(average.dtype, copy=False) - average)
    for copy, average in zip(copies or (), averages, strict=bool(copies)):
        copy[...] = average.astype(copy.dtype, copy=False)
