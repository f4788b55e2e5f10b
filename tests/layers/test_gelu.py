"""gelu and its backward."""

from __future__ import annotations

import math
import re

import ml_dtypes
import numpy as np
import pytest

from cukit.core.source import read_source
from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError, ConfigError
from cukit.layers import gelu, gelu_backward
from cukit.reference import activations as reference
from tests.contract import (
    DTYPES,
    check_against_reference,
    check_gradient,
    dtype_of,
    poisoned,
    random,
    to_device,
    to_host,
)

# Less than one vector, a few elements after the last whole vector, several axes, many blocks.
SHAPES = [(1,), (7,), (8,), (3, 5, 67), (1, 2049), (33, 4096)]
APPROXIMATE = ["none", "tanh"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_matches_reference(device, rng, shape, dtype, approximate):
    x = random(rng, shape, dtype, scale=2)
    check_against_reference(gelu, reference.gelu, (x,), device=device, approximate=approximate)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_backward_matches_reference(device, rng, shape, dtype, approximate):
    inputs = random(rng, shape, dtype), random(rng, shape, dtype, scale=2)
    check_against_reference(
        gelu_backward, reference.gelu_backward, inputs, device=device, approximate=approximate
    )


@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_tail_is_accurate(device, dtype, approximate):
    """Far below zero the result is tiny; its relative error stays within two eps of the dtype."""
    x = np.linspace(-12, 12, 4001).astype(dtype_of(dtype))
    (placed,) = to_device(device, x)
    got = to_host(gelu(placed, approximate=approximate)).astype(np.float64)
    exact = reference.gelu(x.astype(np.float64), approximate=approximate)
    info = ml_dtypes.finfo(x.dtype)
    np.testing.assert_allclose(
        got, exact, rtol=2 * float(info.eps), atol=float(info.smallest_subnormal) + 1e-37
    )


@pytest.mark.parametrize("approximate", APPROXIMATE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_inputs(device, dtype, approximate):
    x = np.array([-6e4, -300, 0, 300, 6e4], dtype_of(dtype))
    (placed,) = to_device(device, x)
    ones = placed * 0 + 1
    got = to_host(gelu(placed, approximate=approximate)).astype(np.float64)
    np.testing.assert_allclose(got, np.maximum(x.astype(np.float64), 0))
    slope = to_host(gelu_backward(ones, placed, approximate=approximate)).astype(np.float64)
    np.testing.assert_allclose(slope, [0, 0, 0.5, 1, 1])


@pytest.mark.gpu
@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_squares_that_overflow(approximate):
    """x^2 overflows float32 for |x| above 1.8e19, which bfloat16 and float32 can represent."""
    x = np.array([-3e38, -1e20, 1e20, 3e38], np.float32)
    (placed,) = to_device("gpu", x)
    np.testing.assert_allclose(to_host(gelu(placed, approximate=approximate)), np.maximum(x, 0))
    slope = to_host(gelu_backward(placed * 0 + 1, placed, approximate=approximate))
    np.testing.assert_allclose(slope, [0, 0, 1, 1])


@pytest.mark.parametrize("approximate", APPROXIMATE)
def test_gradient_by_finite_differences(rng, approximate):
    check_gradient(
        lambda x: reference.gelu(x, approximate=approximate),
        lambda grad_out, x: (reference.gelu_backward(grad_out, x, approximate=approximate),),
        (2 * rng.standard_normal((3, 10)),),
        rng,
    )


def test_relative_error_of_the_normal_cdf_polynomial():
    """The coefficients in activation.cuh, read from the source and evaluated in float64."""
    source = read_source("common/activation.cuh")
    text = source[source.index("float p = ") : source.index("const float tail")]
    coefficients = [float(number) for number in re.findall(r"(-?\d+\.\d+)f", text)]
    assert len(coefficients) == 8
    z = np.linspace(0, 9.5, 2001)
    t = 1 / (1 + 0.43 * z)
    tail = np.exp(-(z**2)) * t * np.polyval(coefficients, t)
    exact = np.array([0.5 * math.erfc(value) for value in z])
    assert np.max(np.abs(tail / exact - 1)) < 1e-7


def test_out_may_be_the_input(device, rng):
    (x,) = to_device(device, random(rng, (5, 13), "float32"))
    expected = to_host(gelu(x)).copy()
    out = poisoned(device, (5, 13), "float32")
    assert gelu(x, out=out) is out
    np.testing.assert_array_equal(to_host(out), expected)
    np.testing.assert_array_equal(to_host(gelu(x, out=x)), expected)


def test_no_elements(device):
    (x,) = to_device(device, np.zeros((0, 64), np.float32))
    assert gelu(x).shape == (0, 64)
    assert gelu_backward(x, x).shape == (0, 64)


def test_memory_that_is_not_16_byte_aligned(device, rng):
    flat = random(rng, (258,), "bfloat16")
    (placed,) = to_device(device, flat)
    expected = reference.gelu(flat[1:].astype(np.float32))
    np.testing.assert_allclose(
        to_host(gelu(placed[1:])).astype(np.float32), expected, rtol=8e-3, atol=8e-3
    )


def test_errors_name_the_argument():
    x = np.ones((2, 4), np.float32)
    with pytest.raises(ConfigError, match="gelu: approximate must be one of 'none', 'tanh'"):
        gelu(x, approximate="sigmoid")
    with pytest.raises(ArrayDtypeError, match="gelu: x must be float32"):
        gelu(x.astype(np.int32))
    with pytest.raises(ArrayLayoutError, match="gelu: x must be C-contiguous"):
        gelu(x.T)
    with pytest.raises(ArrayShapeError, match="gelu: out must have shape"):
        gelu(x, out=x[0].copy())
    with pytest.raises(ArrayShapeError, match="gelu_backward: grad_out must have shape"):
        gelu_backward(x[0].copy(), x)
