"""MetaAttention: compared with explicit sums and finite differences; causality, steps."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.errors import ArrayShapeError, ConfigError
from cukit.models import MetaAttention, MetaAttentionConfig
from tests.contract import random, to_device, to_host

CONFIG = MetaAttentionConfig(hidden=32, num_heads=2, state_dim=8, num_groups=1, filter_length=9)


def layer(device, dtype, config=CONFIG):
    xp = np
    if device == "gpu":
        import cupy as xp
    return MetaAttention.initialise(config, seed=3, dtype=dtype, xp=xp)


def test_gradients_match_finite_differences(rng):
    """Gradients of x and of every parameter, along random directions."""
    model = layer("cpu", np.float64)
    x, grad_y = rng.standard_normal((2, 2, 21, CONFIG.hidden))
    _, kept = model.forward(x)
    grad_x, grads = model.backward(grad_y, kept)
    assert grads.keys() == model.parameters.keys()

    def loss(x, parameters):
        return float(np.sum(MetaAttention(CONFIG, parameters).forward(x)[0] * grad_y))

    step = 1e-6
    for name, gradient in {"x": grad_x, **grads}.items():
        direction = rng.standard_normal(gradient.shape)
        values = []
        for sign in (1, -1):
            moved = sign * step * direction
            if name == "x":
                values.append(loss(x + moved, model.parameters))
            else:
                changed = {**model.parameters, name: model.parameters[name] + moved}
                values.append(loss(x, changed))
        expected = (values[0] - values[1]) / (2 * step)
        assert np.sum(gradient * direction) == pytest.approx(expected, rel=1e-5, abs=1e-6), name


def test_the_filter_is_a_causal_sum(rng):
    model = layer("cpu", np.float64)
    u = rng.standard_normal((1, 30, 2, 16))
    filtered = model._filter(np, u).reshape(30, 32)
    taps, flat = model.parameters["filter"], u.reshape(30, 32)
    for t in range(30):
        expected = sum(taps[:, j] * flat[t - j] for j in range(min(t + 1, 9)))
        np.testing.assert_allclose(filtered[t], expected, atol=1e-12)


def test_outputs_do_not_depend_on_later_tokens(rng):
    model = layer("cpu", np.float64)
    x = rng.standard_normal((1, 20, CONFIG.hidden))
    before = model.forward(x)[0]
    x[:, 12:] += 1
    np.testing.assert_allclose(model.forward(x)[0][:, :12], before[:, :12], atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_steps_equal_the_forward(device, rng, dtype):
    """14 steps, more than the filter has taps; also with kernels."""
    x = random(rng, (2, 14, CONFIG.hidden), dtype)
    model = layer(device, x.dtype)
    whole = to_host(model.forward(*to_device(device, x))[0]).astype(np.float32)
    state = model.start(2, 14)
    for t in range(14):
        (token,) = to_device(device, np.ascontiguousarray(x[:, t]))
        y = to_host(model.step(token, state)).astype(np.float32)
        error = np.linalg.norm(y - whole[:, t]) / np.linalg.norm(whole[:, t])
        assert error < (3e-3 if dtype == "float16" else 2e-2)
    with pytest.raises(ArrayShapeError, match="is full, with 14 tokens"):
        model.step(token, state)


@pytest.fixture
def problem(rng):
    """x, grad_y, and float64 gradients, computed before `device` selects the backend."""
    x, grad_y = (random(rng, (1, 70, CONFIG.hidden), "float16") for _ in range(2))
    parameters = layer("cpu", np.float16).parameters.items()
    exact = MetaAttention(CONFIG, {name: p.astype(np.float64) for name, p in parameters})
    _, kept = exact.forward(x.astype(np.float64))
    return x, grad_y, exact.backward(grad_y.astype(np.float64), kept)


def test_gradients_in_low_precision(problem, device):
    x, grad_y, wide = problem
    model = layer(device, np.float16)
    placed, grad = to_device(device, x, grad_y)
    got = model.backward(grad, model.forward(placed)[1])
    for name in ("x", *wide[1]):
        result, expected = (g[0] if name == "x" else g[1][name] for g in (got, wide))
        error = np.linalg.norm(to_host(result).astype(np.float64) - expected)
        assert error < 1e-2 * np.linalg.norm(expected), name


def test_errors_name_the_argument():
    model = layer("cpu", np.float32)
    with pytest.raises(ArrayShapeError, match=r"x must have shape \(any, any, 32\)"):
        model.forward(np.zeros((1, 3, 31), np.float32))
    with pytest.raises(ConfigError, match="hidden must be a multiple of num_heads"):
        MetaAttentionConfig(hidden=30, num_heads=4)
    with pytest.raises(ConfigError, match="parameters must be in_proj"):
        MetaAttention(CONFIG, {})
