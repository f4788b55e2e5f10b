"""layer_norm and its backward."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cukit.core.device import TYPICAL_DEVICES
from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError
from cukit.layers import layer_norm, layer_norm_backward
from cukit.layers.layer_norm import plan_layer_norm, plan_layer_norm_backward
from cukit.reference import norms as reference
from tests.contract import (
    DTYPES,
    check_against_reference,
    check_gradient,
    offset_by,
    poisoned,
    random,
    to_device,
    to_host,
)
from tests.quick_run import possible

# Rows of one vector, odd rows (scalar accesses), rows longer than one access per thread, many rows.
SHAPES = [(1, 8), (3, 3), (5, 257), (2, 3, 512), (7, 4096), (300, 1000), (2, 16384), (1, 65536)]


# Rows of at most the length that the kernels support for each dtype.
fitting_rows = possible(lambda shape, dtype: dtype != "float32" or shape[-1] <= 32768)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("with_bias", "with_residual"), [(True, False), (False, True)])
@fitting_rows
def test_matches_reference(device, rng, shape, dtype, with_bias, with_residual):
    x, weight = random(rng, shape, dtype), random(rng, shape[-1:], dtype)
    bias = random(rng, shape[-1:], dtype) if with_bias else None
    residual = random(rng, shape, dtype) if with_residual else None
    names = ("y", "new_residual") if with_residual else ("y",)
    inputs = (x, weight, bias, 1e-5, residual)
    check_against_reference(layer_norm, reference.layer_norm, inputs, device=device, names=names)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("has_bias", "with_residual"), [(True, False), (False, True)])
@fitting_rows
def test_backward_matches_reference(device, rng, shape, dtype, has_bias, with_residual):
    grad_out, x = random(rng, shape, dtype), random(rng, shape, dtype)
    weight = random(rng, shape[-1:], dtype)
    added = random(rng, shape, dtype) if with_residual else None

    def flat(function, *arrays):
        results = function(*arrays[:4], has_bias=has_bias, grad_residual=arrays[4])
        assert (results[2] is None) == (not has_bias)
        return results if has_bias else results[:2]

    check_against_reference(
        partial(flat, layer_norm_backward),
        partial(flat, reference.layer_norm_backward),
        (grad_out, x, weight, 1e-5, added),
        device=device,
        names=("grad_x", "grad_weight", "grad_bias")[: 3 if has_bias else 2],
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_far_from_zero(device, rng, dtype):
    """The variance must not be computed as a difference of large numbers."""
    x = (100 + random(rng, (4, 512), "float32")).astype(random(rng, (1,), dtype).dtype)
    weight, bias = random(rng, (512,), dtype), random(rng, (512,), dtype)
    check_against_reference(
        layer_norm, reference.layer_norm, (x, weight, bias, 1e-5, None), device=device
    )


@pytest.mark.parametrize("cols", [96, 1000, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_rows_far_from_zero(device, rng, cols, dtype):
    """The mean is far from zero and differs between the warps of a row."""
    steps = 100 + np.arange(cols) // 32
    x = (steps + random(rng, (9, cols), "float32")).astype(random(rng, (1,), dtype).dtype)
    grad_out, weight = random(rng, (9, cols), dtype), random(rng, (cols,), dtype)
    check_against_reference(
        layer_norm_backward,
        reference.layer_norm_backward,
        (grad_out, x, weight, 1e-5),
        device=device,
        names=("grad_x", "grad_weight", "grad_bias"),
    )


# Rows for a warp or a part of it: every number of lanes and of accesses per lane, idle lanes, and a
# last thread block with fewer rows than it can process at once.
SHORT_ROWS = [
    *((cols, 0) for cols in (2, 24, 72, 100, 127, 128, 384, 512, 1024)),
    (64, 1),
    (200, 1),
]


@pytest.mark.parametrize(("cols", "offset"), SHORT_ROWS)
def test_short_rows(device, rng, cols, offset):
    """With an offset of one element, no row of any array is 16-byte aligned."""

    x, residual, grad_out = (random(rng, (37, cols), "bfloat16") for _ in range(3))
    weight, bias = (random(rng, (cols,), "bfloat16") for _ in range(2))

    def both(*arrays):
        placed = (offset_by(each, offset * each.itemsize) for each in arrays)
        x, weight, bias, residual, grad_out = placed
        y, total = layer_norm(x, weight, bias, residual=residual)
        return y, total, *layer_norm_backward(grad_out, x, weight, grad_residual=residual)

    def expected(x, weight, bias, residual, grad_out):
        y, total = reference.layer_norm(x, weight, bias, residual=residual)
        grads = reference.layer_norm_backward(grad_out, x, weight, grad_residual=residual)
        return y, total, *grads

    check_against_reference(
        both,
        expected,
        (x, weight, bias, residual, grad_out),
        device=device,
        names=("y", "new_residual", "grad_x", "grad_weight", "grad_bias"),
    )


def test_gradient_by_finite_differences(rng):
    inputs = (rng.standard_normal((3, 7)), rng.standard_normal(7), rng.standard_normal(7))

    def backward(grad_out, x, weight, bias):
        return reference.layer_norm_backward(grad_out, x, weight)

    check_gradient(reference.layer_norm, backward, inputs, rng)


def test_residual_gradient_is_added(rng):
    """x + r has two uses, the norm and the new residual: grad_x is the sum of both gradients."""
    grad_out, x, added = (rng.standard_normal((3, 7)) for _ in range(3))
    weight = rng.standard_normal(7)
    alone, with_residual = (
        reference.layer_norm_backward(grad_out, x, weight, grad_residual=extra)[0]
        for extra in (None, added)
    )
    np.testing.assert_allclose(with_residual, alone + added)


def test_out_may_be_the_input(device, rng):
    x, weight = to_device(device, random(rng, (4, 96), "float32"), random(rng, (96,), "float32"))
    expected = to_host(layer_norm(x, weight)).copy()
    out = poisoned(device, (4, 96), "float32")
    assert layer_norm(x, weight, out=out) is out
    np.testing.assert_array_equal(to_host(out), expected)
    np.testing.assert_array_equal(to_host(layer_norm(x, weight, out=x)), expected)


def test_no_rows(device):
    x, weight = to_device(device, np.zeros((0, 64), np.float32), np.ones(64, np.float32))
    assert layer_norm(x, weight).shape == (0, 64)
    grad_x, grad_weight, grad_bias = layer_norm_backward(x, x, weight)
    assert grad_x.shape == (0, 64)
    assert not to_host(grad_weight).any()
    assert not to_host(grad_bias).any()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": np.ones((2, 4), np.int32)}, ArrayDtypeError, "x must be float32"),
        ({"weight": np.ones(5, np.float32)}, ArrayShapeError, r"weight must have shape \(4,\)"),
        ({"bias": np.ones((2, 4), np.float32)}, ArrayShapeError, "bias must have shape"),
        ({"bias": np.ones(4, np.float16)}, ArrayDtypeError, "bias must have the dtype of x"),
        ({"residual": np.ones((4, 2), np.float32)}, ArrayShapeError, "residual"),
        ({"x": np.ones((4, 2), np.float32).T}, ArrayLayoutError, "x must be C-contiguous"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    good = {"x": np.ones((2, 4), np.float32), "weight": np.ones(4, np.float32)}
    with pytest.raises(error, match=f"layer_norm: {message}"):
        layer_norm(**{**good, **arguments})


@pytest.mark.parametrize("cols", [1, 7, 64, 100, 127, 384, 1000, 4096, 8192, 16384, 65536])
def test_plan_covers_every_column(cols):
    vec = next(v for v in (8, 4, 2, 1) if cols % v == 0)
    for device in TYPICAL_DEVICES.values():
        for config in (
            plan_layer_norm(100, cols, "bfloat16", 2, vec, False, True, device),
            plan_layer_norm_backward(100, cols, "bfloat16", 2, vec, False, True, device),
        ):
            split = config.split
            assert split.threads % 32 == 0
            assert split.threads <= 1024
            assert split.threads % split.lanes == 0
            assert split.lanes * split.vec * split.vecs_per_thread >= cols
            assert 1 <= config.num_blocks <= 100
