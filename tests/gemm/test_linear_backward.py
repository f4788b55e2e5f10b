"""Gradients of linear layers, plain and gated."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module

import numpy as np
import pytest

from cukit.errors import ArrayShapeError, ConfigError
from cukit.gemm import gated_linear_backward, linear_backward
from cukit.gemm.dense import _gated_gradient
from cukit.gemm.dense._gated_gradient import GatedGradientSm90
from cukit.gemm.dense._linear_plan import ACTIVATIONS, GATED_ACTIVATIONS, Product, configure
from cukit.reference import gemm as reference
from tests.contract import (
    another_order,
    assert_close,
    check_against_reference,
    check_gradient,
    poisoned,
    random,
    to_device,
    to_host,
)
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


@pytest.mark.parametrize(("m", "n", "k"), [(130, 136, 72), (5, 7, 9), (300, 128, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", GATED_ACTIVATIONS)
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_through_the_next_layer(
    device, rng, monkeypatch, m, n, k, dtype, activation, fused
):
    monkeypatch.setattr(_gated_gradient, "_MIN_ROUNDS", 0 if fused else 10**6)
    import_module("cukit.gemm.dense.linear_backward")._prepare_gated.forget()
    grad_out, down = random(rng, (m, k + 32), dtype), random(rng, (k + 32, n), dtype, scale=0.1)
    x, w = operands(rng, m, 2 * n, k, dtype)
    check_against_reference(
        partial(through, gated_linear_backward),
        partial(through, reference.gated_linear_backward),
        (grad_out, x, w, random(rng, (m, 2 * n), dtype), down, activation),
        device=device,
        names=("grad_x", "grad_w"),
    )


def through(backward, grad_out, x, w, z, down, activation):
    return backward(grad_out, x, w, z, activation, down=down)


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
@pytest.mark.parametrize(("m", "n", "k"), [(200, 256, 72), (328, 384, 40), (520, 256, 776)])
def test_the_fused_gradient_of_the_preactivation(device, rng, monkeypatch, m, n, k, num_blocks):
    """Blocks with no tile, one, an odd and an even number of tiles; ragged rows and k steps, fewer
    and more steps than stages. Both divisions of the tiles between the consumer warpgroups give the
    same bits."""
    if device == "cpu":
        pytest.skip("the CPU has no such kernels")
    grad_out, z = random(rng, (m, k), "bfloat16"), random(rng, (m, 2 * n), "bfloat16")
    w = random(rng, (k, n), "bfloat16", scale=k**-0.5)
    low, wide = (preactivation_gradient(grad_out, w, z, t) for t in (np.float32, np.float64))
    product = Product(m, n, k, "bfloat16", major_b="MN")
    config = configure(product, _gated_gradient.TILING, num_blocks)
    config = replace(config, num_blocks=num_blocks)  # also more blocks than tiles
    placed = to_device(device, grad_out, w, z)
    results = []
    for alternating in (True, False):
        monkeypatch.setattr(_gated_gradient, "_ALTERNATING", alternating)
        launch = GatedGradientSm90(config, "silu")
        grad = poisoned(device, (m, 2 * n), "bfloat16")
        for repeat in range(2):
            with another_order(device, repeat):
                launch(*placed, grad)
            assert_close("grad", to_host(grad), low.astype(z.dtype), wide)
        results.append(to_host(grad).view(np.uint16))
    np.testing.assert_array_equal(*results)


def preactivation_gradient(grad_out, w, z, dtype):
    grad_out, w, z = (array.astype(dtype) for array in (grad_out, w, z))
    gate, up = np.split(z, 2, axis=-1)
    gate_value, sigmoid = gate / (1 + np.exp(-gate)), 1 / (1 + np.exp(-gate))
    slope = sigmoid + gate_value * (1 - sigmoid)
    h = grad_out @ w
    return np.concatenate([h * up * slope, h * gate_value], axis=-1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_the_reference(rng, activation):
    x, w, bias = rng.standard_normal((5, 6)), rng.standard_normal((4, 6)), rng.standard_normal(4)

    def backward(grad_out, x, w, bias):
        _, z = reference.linear(x, w, bias, activation, return_preactivation=True)
        z = None if activation is None else z
        return reference.linear_backward(grad_out, x, w, z, activation, with_bias=True)

    forward = partial(reference.linear, activation=activation)
    check_gradient(forward, backward, (x, w, bias), rng)


@pytest.mark.parametrize("activation", GATED_ACTIVATIONS)
def test_gradients_of_the_gated_reference(rng, activation):
    def backward(grad_out, x, w):
        _, z = reference.gated_linear(x, w, activation, return_preactivation=True)
        return reference.gated_linear_backward(grad_out, x, w, z, activation)

    inputs = rng.standard_normal((5, 6)), rng.standard_normal((8, 6))
    check_gradient(partial(reference.gated_linear, activation=activation), backward, inputs, rng)

    def layers(x, w):
        return reference.gated_linear(x, w, activation) @ down.T

    def through_both(grad_out, x, w):
        _, z = reference.gated_linear(x, w, activation, return_preactivation=True)
        return reference.gated_linear_backward(grad_out, x, w, z, activation, down=down)

    down = rng.standard_normal((3, 4))
    check_gradient(layers, through_both, inputs, rng)


X, W = np.ones((4, 16), np.float16), np.ones((6, 16), np.float16)


def test_errors_name_the_argument():
    with pytest.raises(ArrayShapeError, match=r"grad_out must have shape \(4, 6\)"):
        linear_backward(X, X, W)
    with pytest.raises(ConfigError, match="preactivation is required with an activation"):
        linear_backward(X[:, :6].copy(), X, W, None, "relu")
    with pytest.raises(ArrayShapeError, match=r"down must have shape \(.*, 3\)"):
        gated_linear_backward(X, X, W, X[:, :6].copy(), down=X)
