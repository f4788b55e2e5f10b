"""Gradients of losses, which may be scalars, against central differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.tolerances import FINITE_DIFFERENCE


def assert_gradient(
    loss: Callable[[Any], Any],
    gradient: Callable[[Any, Any], Any],
    value: np.ndarray[Any, Any],
    rng: np.random.Generator,
) -> None:
    """`gradient(grad_loss, value)` against differences of `loss(value)`, every element of it."""
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
