"""rms_norm and its backward."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cukit.core.device import TYPICAL_DEVICES
from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError
from cukit.layers import rms_norm, rms_norm_backward
from cukit.layers.rms_norm import plan_rms_norm, plan_rms_norm_backward
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

# Rows of one vector, odd rows (scalar accesses), rows longer than one access per thread, many rows.
SHAPES = [(1, 8), (3, 1), (5, 257), (2, 3, 512), (7, 4096), (300, 1000), (2, 16384), (1, 65536)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_matches_reference(device, rng, shape, dtype, with_residual):
    if dtype == "float32" and shape[-1] > 32768:
        pytest.skip("longer than a float32 row may be")
    x, weight = random(rng, shape, dtype), random(rng, shape[-1:], dtype)
    residual = random(rng, shape, dtype) if with_residual else None
    names = ("y", "new_residual") if with_residual else ("y",)
    check_against_reference(
        rms_norm, reference.rms_norm, (x, weight, 1e-6, residual), device=device, names=names
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_backward_matches_reference(device, rng, shape, dtype, with_residual):
    if dtype == "float32" and shape[-1] > 32768:
        pytest.skip("longer than a float32 row may be")
    grad_out, x = random(rng, shape, dtype), random(rng, shape, dtype)
    weight = random(rng, shape[-1:], dtype)
    added = random(rng, shape, dtype) if with_residual else None

    def call(function, *arrays):
        return function(*arrays[:4], grad_residual=arrays[4])

    check_against_reference(
        partial(call, rms_norm_backward),
        partial(call, reference.rms_norm_backward),
        (grad_out, x, weight, 1e-6, added),
        device=device,
        names=("grad_x", "grad_weight"),
    )


# Rows for a warp or a part of it: every number of lanes and of accesses per lane, idle lanes, and a
# last thread block with fewer rows than it can process at once.
SHORT_ROWS = [
    *((cols, 0) for cols in (1, 24, 72, 100, 127, 128, 384, 512, 1024)),
    (64, 1),
    (200, 1),
]


@pytest.mark.parametrize(("cols", "offset"), SHORT_ROWS)
def test_short_rows(device, rng, cols, offset):
    """With an offset of one element, no row of any array is 16-byte aligned."""

    x, residual, grad_out = (random(rng, (37, cols), "bfloat16") for _ in range(3))
    weight = random(rng, (cols,), "bfloat16")

    def both(*arrays):
        x, weight, residual, grad_out = (offset_by(each, offset * each.itemsize) for each in arrays)
        y, total = rms_norm(x, weight, residual=residual)
        return y, total, *rms_norm_backward(grad_out, x, weight, grad_residual=residual)

    def expected(x, weight, residual, grad_out):
        y, total = reference.rms_norm(x, weight, residual=residual)
        grads = reference.rms_norm_backward(grad_out, x, weight, grad_residual=residual)
        return y, total, *grads

    check_against_reference(
        both,
        expected,
        (x, weight, residual, grad_out),
        device=device,
        names=("y", "new_residual", "grad_x", "grad_weight"),
    )


def test_gradient_by_finite_differences(rng):
    inputs = (rng.standard_normal((3, 7)), rng.standard_normal(7))
    check_gradient(reference.rms_norm, reference.rms_norm_backward, inputs, rng)


def test_out_is_filled_and_returned(device, rng):
    x, weight = to_device(device, random(rng, (4, 96), "float32"), random(rng, (96,), "float32"))
    out = poisoned(device, (4, 96), "float32")
    assert rms_norm(x, weight, out=out) is out
    np.testing.assert_array_equal(to_host(out), to_host(rms_norm(x, weight)))


def test_out_may_be_the_input(device, rng):
    x, weight = to_device(device, random(rng, (4, 96), "float32"), random(rng, (96,), "float32"))
    expected = to_host(rms_norm(x, weight)).copy()
    np.testing.assert_array_equal(to_host(rms_norm(x, weight, out=x)), expected)


def test_no_rows(device):
    x, weight = to_device(device, np.zeros((0, 64), np.float32), np.ones(64, np.float32))
    assert rms_norm(x, weight).shape == (0, 64)
    grad_x, grad_weight = rms_norm_backward(x, x, weight)
    assert grad_x.shape == (0, 64)
    assert not to_host(grad_weight).any()


def test_rows_that_are_not_16_byte_aligned(device, rng):
    """A view that starts 2 bytes into an allocation must not be read 16 bytes at a time."""
    flat, weight = random(rng, (1 + 4 * 64,), "bfloat16"), random(rng, (64,), "bfloat16")
    flat_placed, weight_placed = to_device(device, flat, weight)
    got = rms_norm(flat_placed[1:].reshape(4, 64), weight_placed)
    expected = rms_norm(flat[1:].reshape(4, 64).copy(), weight)
    np.testing.assert_allclose(
        to_host(got).astype(np.float32), expected.astype(np.float32), rtol=8e-3, atol=8e-3
    )


@pytest.mark.gpu
def test_more_than_2_31_elements(rng):
    """Offsets are computed in 64 bits: the last row is past 2^31 elements."""
    import cupy

    rows, cols = 2**31 // 4096 + 3, 4096
    x = cupy.ones((rows, cols), cupy.float16)
    x[-1] = cupy.asarray(random(rng, (cols,), "float16"))
    weight = cupy.ones(cols, cupy.float16)
    y = rms_norm(x, weight, out=x.copy())
    expected = reference.rms_norm(to_host(x[-1:]), to_host(weight))
    np.testing.assert_allclose(to_host(y[-1:]), expected, rtol=2e-3, atol=1e-3)
    assert float(y[: rows - 1].max()) == float(y[: rows - 1].min()) == 1.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": np.ones((2, 4), np.int32)}, ArrayDtypeError, "x must be float32"),
        ({"weight": np.ones(5, np.float32)}, ArrayShapeError, r"weight must have shape \(4,\)"),
        ({"weight": np.ones(4, np.float64)}, ArrayDtypeError, "weight must have the dtype of x"),
        ({"residual": np.ones((4, 2), np.float32)}, ArrayShapeError, "residual"),
        ({"x": np.ones((4, 2), np.float32).T}, ArrayLayoutError, "x must be C-contiguous"),
        ({"out": np.ones((2, 4), np.float16)}, ArrayDtypeError, "out must have the dtype of x"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    good = {"x": np.ones((2, 4), np.float32), "weight": np.ones(4, np.float32)}
    with pytest.raises(error, match=f"rms_norm: {message}"):
        rms_norm(**{**good, **arguments})


@pytest.mark.parametrize("cols", [1, 7, 64, 100, 127, 384, 1000, 4096, 8192, 16384, 65536])
def test_plan_covers_every_column(cols):
    vec = next(v for v in (8, 4, 2, 1) if cols % v == 0)
    for device in TYPICAL_DEVICES.values():
        for config in (
            plan_rms_norm(100, cols, "bfloat16", 2, vec, False, device),
            plan_rms_norm_backward(100, cols, "bfloat16", 2, vec, False, device),
        ):
            split = config.split
            assert split.threads % 32 == 0
            assert split.threads <= 1024
            assert split.threads % split.lanes == 0
            assert split.lanes * split.vec * split.vecs_per_thread >= cols
            assert 1 <= config.num_blocks <= 100


def test_plan_rejects_rows_that_do_not_fit():
    with pytest.raises(ArrayShapeError, match="supports up to 65536"):
        plan_rms_norm(1, 65536 * 2, "bfloat16", 2, 8, False, TYPICAL_DEVICES["sm_90"])
