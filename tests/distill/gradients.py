"""Checks of gradients of losses, relative to each element, because gradients are small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.contract import to_host
from tests.tolerances import FINITE_DIFFERENCE

# Two roundings to the dtype.
RELATIVE = {"float32": 2e-7, "float16": 1e-3, "bfloat16": 8e-3}
SUBNORMAL = {"float32": 0.0, "float16": 6e-8, "bfloat16": 0.0}
FLOAT32_ARITHMETIC = 4e-6
"""Relative error of the probabilities whose difference is a gradient: sums of 1e5 exponentials."""


def softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Softmax over the last axis, in float64."""
    exps = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True).astype(np.float64))
    result: np.ndarray[Any, Any] = exps / exps.sum(-1, keepdims=True)
    return result


def assert_elements_close(
    got: Any, exact: np.ndarray[Any, Any], probabilities: np.ndarray[Any, Any]
) -> None:
    """Each element must be within its dtype's rounding of the float64 value, even a tiny one."""
    host = to_host(got)
    dtype = host.dtype.name
    assert host.shape == exact.shape
    bound = RELATIVE[dtype] * np.abs(exact) + FLOAT32_ARITHMETIC * probabilities
    error = np.abs(host.astype(np.float64) - exact)
    wrong = ~(error <= bound + SUBNORMAL[dtype])
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} elements are off, first {np.argwhere(wrong)[0]}: got "
        f"{host[wrong][0]}, expected {exact[wrong][0]}"
    )


def assert_gradient(
    loss: Callable[[Any], Any],
    gradient: Callable[[Any, Any], Any],
    value: np.ndarray[Any, Any],
    rng: np.random.Generator,
) -> None:
    """Compare each element of `gradient(grad_loss, value)` with differences of `loss(value)`."""
    grad_loss = np.asarray(rng.standard_normal(np.shape(loss(value))))
    got = gradient(grad_loss, value)
    expected = np.empty_like(value)
    step = 1e-6
    for index in np.ndindex(value.shape):
        above, below = value.copy(), value.copy()
        above[index] += step
        below[index] -= step
        expected[index] = np.sum(grad_loss * (loss(above) - loss(below))) / (2 * step)
    assert got.shape == value.shape
    np.testing.assert_allclose(got, expected, rtol=FINITE_DIFFERENCE, atol=FINITE_DIFFERENCE)
