"""causal_conv: compared with explicit sums and finite differences; calls that continue others."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.errors import ArrayDtypeError, ArrayShapeError, ConfigError
from cukit.reference import convolution as reference
from cukit.sequence import causal_conv, causal_conv_backward, causal_conv_step
from tests.contract import check_against_reference, check_gradient, random, to_device, to_host

CASES = [
    (2, 150, 40, 4, "bfloat16"),
    (1, 33, 7, 2, "float16"),
    (3, 1, 16, 3, "float32"),
    (1, 2, 600, 4, "float32"),
]
"""[batch, seq_len, channels, width, dtype]"""


def inputs(rng, batch, seq_len, channels, width, dtype):
    """x, weight, bias, initial_state, grad_y."""
    shapes = [(batch, seq_len, channels), (channels, width), (channels,)]
    shapes += [(batch, width - 1, channels), (batch, seq_len, channels)]
    return [random(rng, shape, dtype) for shape in shapes]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "none"])
def test_matches_reference(device, rng, case, activation):
    if device == "emulator" and activation == "none" and case is not CASES[1]:
        pytest.skip("one case without an activation suffices here")
    x, weight, bias, state, grad = inputs(rng, *case)

    def forward(function):
        return lambda x, w, b, s: function(x, w, b, initial_state=s, activation=activation)

    def backward(function):
        return lambda g, x, w, b, s: tuple(
            function(g, x, w, b, initial_state=s, activation=activation)
        )

    check_against_reference(
        forward(causal_conv),
        forward(reference.causal_conv),
        (x, weight, bias, state),
        device=device,
        names=("y",),
    )
    check_against_reference(
        backward(causal_conv_backward),
        backward(reference.causal_conv_backward),
        (grad, x, weight, bias, state),
        device=device,
        names=("x", "weight", "bias", "initial_state"),
    )


def test_reference_matches_the_sum(rng):
    x, weight, bias, state, _ = (array.astype(np.float64) for array in inputs(rng, *CASES[1]))
    y = reference.causal_conv(x, weight, bias, initial_state=state, activation="none")
    padded = np.concatenate([state, x], axis=1)
    for t in range(x.shape[1]):
        z = bias + sum(weight[:, k] * padded[:, t + k] for k in range(weight.shape[1]))
        np.testing.assert_allclose(y[:, t], z, rtol=1e-12)


@pytest.mark.parametrize("activation", ["silu", "none"])
def test_gradients_match_finite_differences(rng, activation):
    arrays = [array.astype(np.float64) for array in inputs(rng, 2, 9, 5, 4, "float32")[:4]]
    check_gradient(
        lambda x, w, b, s: reference.causal_conv(x, w, b, initial_state=s, activation=activation),
        lambda g, x, w, b, s: reference.causal_conv_backward(
            g, x, w, b, initial_state=s, activation=activation
        ),
        arrays,
        rng,
    )


def test_calls_and_steps_continue_each_other(device, rng):
    x, weight, bias, state, _ = inputs(rng, *CASES[0])
    (whole,) = (to_host(y) for y in (causal_conv(*to_device(device, x, weight, bias)),))
    first, second = np.ascontiguousarray(x[:, :50]), np.ascontiguousarray(x[:, 50:])
    last = np.ascontiguousarray(first[:, -3:])
    placed = to_device(device, second, weight, bias, last)
    rest = causal_conv(*placed[:3], initial_state=placed[3])
    np.testing.assert_array_equal(to_host(rest), whole[:, 50:])
    (running,) = to_device(device, np.zeros_like(state))
    for t in range(5):
        token = to_device(device, np.ascontiguousarray(x[:, t]), weight, bias)
        np.testing.assert_array_equal(to_host(causal_conv_step(running, *token)), whole[:, t])
    np.testing.assert_array_equal(to_host(running), x[:, 2:5])


def test_without_tokens_the_state_has_a_zero_gradient(device, rng):
    x, weight, bias, state, grad = to_device(device, *inputs(rng, 2, 0, 8, 4, "float32"))
    grads = causal_conv_backward(grad, x, weight, bias, initial_state=state)
    for found in (grads.initial_state, grads.weight, grads.bias):
        assert not to_host(found).any()


def test_kernels_reject_sequences_beyond_the_grid(device):
    if device == "cpu":
        pytest.skip("a requirement of the kernels")
    x, weight = to_device(device, np.zeros((1, 65535 * 64 + 1, 1), np.float16), np.ones((1, 2)))
    with pytest.raises(ConfigError, match="seq_len of at most 4194240, got 4194241"):
        causal_conv(x, weight.astype(np.float16))


def test_errors_name_the_argument(rng):
    x, weight, bias, state, grad = inputs(rng, 2, 9, 8, 4, "float32")
    with pytest.raises(ArrayShapeError, match="x must have 3 axes"):
        causal_conv(x[0], weight)
    with pytest.raises(ArrayShapeError, match="width of 2, 3 or 4, got 1"):
        causal_conv(x, weight[:, :1].copy())
    with pytest.raises(ArrayDtypeError, match="initial_state must be float32"):
        causal_conv(x, weight, bias, initial_state=state.astype(np.float16))
    with pytest.raises(ConfigError, match="activation must be 'silu' or 'none', got 'gelu'"):
        causal_conv(x, weight, activation="gelu")
    with pytest.raises(ArrayShapeError, match=r"grad_y must have shape \(2, 9, 8\)"):
        causal_conv_backward(grad[:1].copy(), x, weight)
    with pytest.raises(ArrayShapeError, match=r"state must have shape \(2, 3, 8\)"):
        causal_conv_step(state[:1].copy(), x[:, 0].copy(), weight)
