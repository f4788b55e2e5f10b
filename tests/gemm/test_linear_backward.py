"""Gradients of linear layers, plain and gated."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cukit.errors import ArrayShapeError, ConfigError
from cukit.gemm import gated_linear_backward, linear_backward
from cukit.gemm.dense._linear_plan import ACTIVATIONS, GATED_ACTIVATIONS
from cukit.reference import gemm as reference
from tests.contract import check_against_reference, check_gradient, random
from tests.gemm.test_linear import DTYPES, SHAPES, operands


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_backward_matches_reference(device, rng, m, n, k, dtype, activation):
    x, w = operands(rng, m, n, k, dtype)
    grad_out = random(rng, (m, n), dtype)
    z = None if activation is None else random(rng, (m, n), dtype)
    check_against_reference(
        linear_backward,
        reference.linear_backward,
        (grad_out, x, w, z, activation),
        device=device,
        names=("grad_x", "grad_w", "grad_bias"),
        with_bias=True,
    )


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", GATED_ACTIVATIONS)
def test_gated_linear_backward_matches_reference(device, rng, m, n, k, dtype, activation):
    x, w = operands(rng, m, 2 * n, k, dtype)
    inputs = random(rng, (m, n), dtype), x, w, random(rng, (m, 2 * n), dtype), activation
    check_against_reference(
        gated_linear_backward,
        reference.gated_linear_backward,
        inputs,
        device=device,
        names=("grad_x", "grad_w"),
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_reference_s_gradients(rng, activation):
    x, w, bias = rng.standard_normal((5, 6)), rng.standard_normal((4, 6)), rng.standard_normal(4)

    def backward(grad_out, x, w, bias):
        _, z = reference.linear(x, w, bias, activation, return_preactivation=True)
        z = None if activation is None else z
        return reference.linear_backward(grad_out, x, w, z, activation, with_bias=True)

    forward = partial(reference.linear, activation=activation)
    check_gradient(forward, backward, (x, w, bias), rng)


@pytest.mark.parametrize("activation", GATED_ACTIVATIONS)
def test_the_gated_reference_s_gradients(rng, activation):
    def backward(grad_out, x, w):
        _, z = reference.gated_linear(x, w, activation, return_preactivation=True)
        return reference.gated_linear_backward(grad_out, x, w, z, activation)

    inputs = rng.standard_normal((5, 6)), rng.standard_normal((8, 6))
    check_gradient(partial(reference.gated_linear, activation=activation), backward, inputs, rng)


X, W = np.ones((4, 16), np.float16), np.ones((6, 16), np.float16)


def test_errors_name_the_argument():
    with pytest.raises(ArrayShapeError, match=r"grad_out must have shape \(4, 6\)"):
        linear_backward(X, X, W)
    with pytest.raises(ConfigError, match="preactivation is required with an activation"):
        linear_backward(X[:, :6].copy(), X, W, None, "relu")
