"""silu_and_mul and its backward, and the code shared by all gated activations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cukit.core.kernel import load_kernel
from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError
from cukit.layers import silu_and_mul, silu_and_mul_backward
from cukit.layers._elementwise import index_type, plan_elementwise
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

# Shapes of the result: one vector, odd rows (scalar accesses), narrower accesses, several axes,
# rows that end within a thread block, many thread blocks.
SHAPES = [(1, 8), (3, 1), (5, 257), (7, 12), (2, 3, 512), (33, 1376), (300, 1000)]


def doubled(shape):
    return (*shape[:-1], 2 * shape[-1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(device, rng, shape, dtype):
    x = random(rng, doubled(shape), dtype, scale=3)
    check_against_reference(silu_and_mul, reference.silu_and_mul, (x,), device=device)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_matches_reference(device, rng, shape, dtype):
    inputs = random(rng, shape, dtype), random(rng, doubled(shape), dtype, scale=3)
    check_against_reference(
        silu_and_mul_backward, reference.silu_and_mul_backward, inputs, device=device
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_gates(device, dtype):
    """Where exp overflows or underflows, the result is 0 or the gate itself, never NaN."""
    gate = np.array([[-6e4, -200, -90, -20, 0, 20, 90, 200, 6e4]])
    x = np.concatenate([gate, np.ones_like(gate)], axis=-1).astype(
        random(np.random, (1,), dtype).dtype
    )
    (x_placed,) = to_device(device, x)
    got = to_host(silu_and_mul(x_placed)).astype(np.float64)
    exact = reference.silu_and_mul(x.astype(np.float64))
    np.testing.assert_allclose(got, exact, rtol=1e-2, atol=1e-6)
    (ones,) = to_device(device, np.ones_like(x[:, :9]))
    assert np.isfinite(to_host(silu_and_mul_backward(ones, x_placed)).astype(np.float64)).all()


def test_gradient_by_finite_differences(rng):
    x = 3 * rng.standard_normal((3, 10))
    check_gradient(
        reference.silu_and_mul,
        lambda grad_out, x: (reference.silu_and_mul_backward(grad_out, x),),
        (x,),
        rng,
    )


def test_out_is_filled_and_returned(device, rng):
    (x,) = to_device(device, random(rng, (4, 96), "float32"))
    out = poisoned(device, (4, 48), "float32")
    assert silu_and_mul(x, out=out) is out
    np.testing.assert_array_equal(to_host(out), to_host(silu_and_mul(x)))


def test_no_rows(device):
    (x,) = to_device(device, np.zeros((0, 64), np.float32))
    assert silu_and_mul(x).shape == (0, 32)
    assert silu_and_mul_backward(silu_and_mul(x), x).shape == (0, 64)


def test_rows_that_are_not_16_byte_aligned(device, rng):
    """A view that starts 2 bytes into an allocation must not be read 16 bytes at a time."""
    flat = random(rng, (1 + 4 * 64,), "bfloat16")
    (placed,) = to_device(device, flat)
    got = silu_and_mul(placed[1:].reshape(4, 64))
    expected = reference.silu_and_mul(flat[1:].reshape(4, 64).astype(np.float32))
    np.testing.assert_allclose(to_host(got).astype(np.float32), expected, rtol=8e-3, atol=8e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [{"vecs_per_thread": 1}, {"vecs_per_thread": 4}, {"index": "uint64"}],
    ids=str,
)
def test_variants_are_bitwise_equal(rng, change):
    rows, hidden = 37, 1000
    x, grad_out = to_device(
        "gpu", random(rng, (rows, 2 * hidden), "bfloat16"), random(rng, (rows, hidden), "bfloat16")
    )
    scalars = (np.int64(rows * hidden // 8), np.int32(hidden // 8))
    for op, inputs, expected in (
        ("silu_and_mul", (x,), silu_and_mul(x)),
        ("silu_and_mul_backward", (grad_out, x), silu_and_mul_backward(grad_out, x)),
    ):
        config = replace(plan_elementwise(rows * hidden, 2, 8), **change)
        num_blocks = -(-rows * hidden // (8 * config.threads * config.vecs_per_thread))
        out = poisoned("gpu", expected.shape, "bfloat16")
        kernel = load_kernel(config.spec(op, op, ("DTYPE", "bfloat16")))
        kernel((num_blocks,), (*inputs, out, *scalars))
        assert to_host(out).tobytes() == to_host(expected).tobytes()


@pytest.mark.gpu
def test_more_than_2_31_elements(rng):
    """Offsets are computed in 64 bits: the last row is past 2^31 elements."""
    import cupy

    hidden = 4096
    rows = 2**31 // (2 * hidden) + 3
    x = cupy.ones((rows, 2 * hidden), cupy.float16)
    x[-1] = cupy.asarray(random(rng, (2 * hidden,), "float16"))
    y = silu_and_mul(x)
    expected = reference.silu_and_mul(to_host(x[-1:]))
    np.testing.assert_allclose(to_host(y[-1:]), expected, rtol=2e-3, atol=1e-3)
    assert float(y[: rows - 1].max()) == float(y[: rows - 1].min())


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.ones((2, 4), np.int32), ArrayDtypeError, "x must be float32"),
        (np.ones((2, 5), np.float32), ArrayShapeError, "the last extent of x must be even"),
        (np.ones((4, 2), np.float32).T, ArrayLayoutError, "x must be C-contiguous"),
    ],
)
def test_errors_name_the_argument(x, error, message):
    with pytest.raises(error, match=f"silu_and_mul: {message}"):
        silu_and_mul(x)


def test_errors_of_the_other_arguments():
    x = np.ones((2, 4), np.float32)
    with pytest.raises(ArrayShapeError, match=r"silu_and_mul: out must have shape \(2, 2\)"):
        silu_and_mul(x, out=np.ones((2, 4), np.float32))
    with pytest.raises(ArrayDtypeError, match="grad_out must have the dtype of x"):
        silu_and_mul_backward(np.ones((2, 2), np.float16), x)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 1000, 10**7 + 1, 8192 * 4096, 2**34])
def test_plan_covers_every_element(size):
    vec = next(v for v in (8, 4, 2, 1) if size % v == 0)
    config = plan_elementwise(size, 2, vec)
    per_block = config.threads * config.vec * config.vecs_per_thread
    assert config.num_blocks * per_block >= size
    assert (config.num_blocks - 1) * per_block < size or size == 0
    assert config.num_blocks < 2**31


def test_index_type_holds_its_bound():
    assert index_type(2**32) == "uint32"
    assert index_type(2**32 + 1) == "uint64"
