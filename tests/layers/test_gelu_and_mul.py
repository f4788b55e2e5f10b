"""gelu_and_mul and its backward; test_silu_and_mul covers the code shared by gated activations."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.errors import ArrayShapeError, ConfigError
from cukit.layers import gelu_and_mul, gelu_and_mul_backward
from cukit.reference import activations as reference
from tests.contract import (
    DTYPES,
    check_against_reference,
    check_gradient,
    poisoned,
    random,
    to_device,
    to_host,
)

SHAPES = [(1, 8), (3, 1), (5, 257), (2, 3, 512), (33, 1376)]
APPROXIMATE = ["tanh", "none"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_matches_reference(device, rng, shape, dtype, approximate):
    x = random(rng, (*shape[:-1], 2 * shape[-1]), dtype, scale=2)
    check_against_reference(
        gelu_and_mul, reference.gelu_and_mul, (x,), device=device, approximate=approximate
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_backward_matches_reference(device, rng, shape, dtype, approximate):
    x = random(rng, (*shape[:-1], 2 * shape[-1]), dtype, scale=2)
    check_against_reference(
        gelu_and_mul_backward,
        reference.gelu_and_mul_backward,
        (random(rng, shape, dtype), x),
        device=device,
        approximate=approximate,
    )


@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_gradient_by_finite_differences(rng, approximate):
    check_gradient(
        lambda x: reference.gelu_and_mul(x, approximate=approximate),
        lambda grad_out, x: (
            reference.gelu_and_mul_backward(grad_out, x, approximate=approximate),
        ),
        (2 * rng.standard_normal((3, 10)),),
        rng,
    )


def test_out_is_filled_and_returned(device, rng):
    (x,) = to_device(device, random(rng, (4, 96), "float32"))
    out = poisoned(device, (4, 48), "float32")
    assert gelu_and_mul(x, out=out) is out
    np.testing.assert_array_equal(to_host(out), to_host(gelu_and_mul(x)))


def test_errors_name_the_argument():
    x = np.ones((2, 4), np.float32)
    with pytest.raises(
        ConfigError, match="gelu_and_mul: approximate must be one of 'none', 'tanh'"
    ):
        gelu_and_mul(x, approximate="sigmoid")
    with pytest.raises(ConfigError, match="gelu_and_mul_backward: approximate must be"):
        gelu_and_mul_backward(x[:, :2].copy(), x, approximate="sigmoid")
    with pytest.raises(ArrayShapeError, match=r"grad_out must have shape \(2, 2\)"):
        gelu_and_mul_backward(x, x)
