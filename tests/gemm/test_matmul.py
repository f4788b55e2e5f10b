"""matmul: every layout, dtype and kind of accumulation."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError, ConfigError
from cukit.gemm import matmul
from cukit.reference import gemm as reference
from tests.contract import (
    DTYPES,
    assert_close,
    check_against_reference,
    poisoned,
    random,
    to_device,
    to_host,
)

SIZES = [(1, 1, 1), (3, 5, 7), (64, 128, 96), (130, 66, 257)]


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_matches_reference(device, rng, m, n, k, dtype, transpose_a, transpose_b):
    a = random(rng, (k, m) if transpose_a else (m, k), dtype)
    b = random(rng, (n, k) if transpose_b else (k, n), dtype)
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    check_against_reference(matmul, reference.matmul, (a, b), device=device, **options)


def test_the_reference_equals_the_product_of_numpy(rng):
    a, b = rng.standard_normal((4, 6)), rng.standard_normal((6, 3))
    np.testing.assert_allclose(reference.matmul(a, b), a @ b, rtol=1e-13)
    np.testing.assert_allclose(reference.matmul(a.T.copy(), b, transpose_a=True), a @ b, rtol=1e-13)
    np.testing.assert_allclose(reference.matmul(a, b.T.copy(), transpose_b=True), a @ b, rtol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_axes_are_rows(device, rng, dtype):
    a, b = random(rng, (2, 3, 16), dtype), random(rng, (5, 16), dtype)
    placed_a, placed_b = to_device(device, a, b)
    out = matmul(placed_a, placed_b, transpose_b=True)
    assert out.shape == (2, 3, 5)
    wide = np.einsum("bsk,nk->bsn", a.astype(np.float64), b.astype(np.float64))
    assert_close("out", out, wide.astype(a.dtype), wide)


def test_transposed_operands_are_summed_over_all_tokens(device, rng):
    """The gradient of a linear layer's weight, directly from [batch, seq_len, features] arrays."""
    grad, x = random(rng, (2, 7, 5), "float32"), random(rng, (2, 7, 6), "float32")
    out = matmul(*to_device(device, grad, x), transpose_a=True)
    np.testing.assert_allclose(
        to_host(out), np.einsum("bsi,bsj->ij", grad, x), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", ["same", "float32"])
def test_accumulates_into_out(device, rng, dtype, out_dtype):
    out_dtype = dtype if out_dtype == "same" else out_dtype
    a, b = random(rng, (33, 40), dtype), random(rng, (40, 17), dtype)
    start = random(rng, (33, 17), out_dtype)
    placed_a, placed_b, out = to_device(device, a, b, start.copy())
    assert matmul(placed_a, placed_b, out=out, accumulate=True) is out
    wide = a.astype(np.float64) @ b.astype(np.float64) + start.astype(np.float64)
    assert_close("out", out, wide.astype(start.dtype), wide)


def test_out_is_filled_and_returned(device, rng):
    a, b = to_device(device, random(rng, (9, 8), "bfloat16"), random(rng, (8, 4), "bfloat16"))
    out = poisoned(device, (9, 4), "bfloat16")
    assert matmul(a, b, out=out) is out
    np.testing.assert_array_equal(
        to_host(out).view(np.uint16), to_host(matmul(a, b)).view(np.uint16)
    )


def test_out_dtype_float32_is_not_rounded_to_float16(device):
    a, b = to_device(device, np.ones((1, 4098), np.float16), np.ones((4098, 1), np.float16))
    assert to_host(matmul(a, b, out_dtype=np.float32))[0, 0] == 4098  # 4096 in float16
    assert matmul(a, b).dtype == np.float16


def test_sums_are_kept_in_float32(device):
    """4096 + many ones: a running sum in bfloat16 would not change."""
    a = np.ones((1, 4096), dtype="float32")
    a[0, 0] = 4096
    x = random(np.random.default_rng(0), (1, 1), "bfloat16").dtype
    placed = to_device(device, a.astype(x), np.ones((4096, 64), x))
    assert (to_host(matmul(*placed, out_dtype=np.float32)) == 4096 + 4095).all()


def test_rows_may_have_gaps(device, rng):
    whole_a, whole_b = random(rng, (6, 20), "float32"), random(rng, (5, 12), "float32")
    placed_a, placed_b = to_device(device, whole_a, whole_b)
    out = to_device(device, np.full((6, 10), 7, np.float32))[0]
    matmul(placed_a[:, 3:15], placed_b, transpose_b=True, out=out[:, 2:7])
    got = to_host(out)
    np.testing.assert_allclose(got[:, 2:7], whole_a[:, 3:15] @ whole_b.T, rtol=1e-4, atol=1e-5)
    assert (got[:, :2] == 7).all()
    assert (got[:, 7:] == 7).all()


def test_empty_extents(device):
    a, b = to_device(device, np.zeros((3, 0), np.float32), np.zeros((0, 2), np.float32))
    assert not to_host(matmul(a, b)).any()
    kept = to_device(device, np.ones((3, 2), np.float32))[0]
    assert to_host(matmul(a, b, out=kept, accumulate=True)).all()
    assert matmul(
        *to_device(device, np.zeros((0, 4), np.float32), np.zeros((4, 2), np.float32))
    ).shape == (0, 2)


A, B = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"b": np.ones((4, 3), np.float32)}, ArrayShapeError, "inner extents 3 and 4"),
        ({"b": B.astype(np.float16)}, ArrayDtypeError, "b must have the dtype of a"),
        ({"a": np.ones((2, 3), np.int32)}, ArrayDtypeError, "a must be float32"),
        ({"b": np.ones((4, 3), np.float32).T}, ArrayLayoutError, "last axis of b"),
        ({"a": np.ones((2, 4, 3), np.float32)[:, :2]}, ArrayLayoutError, "leading axes of a"),
        ({"a": A[::-1]}, ArrayLayoutError, "rows of a must not overlap or run backwards"),
        ({"out": np.ones((2, 3), np.float32)}, ArrayShapeError, "out must have shape"),
        ({"out": np.ones((2, 4), np.float16)}, ArrayDtypeError, "out must be float32"),
        ({"out_dtype": np.float64}, ArrayDtypeError, "out_dtype must be float32"),
        ({"accumulate": True}, ConfigError, "accumulate=True needs out"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=f"matmul: .*{message}"):
        matmul(**{"a": A, "b": B, **arguments})
