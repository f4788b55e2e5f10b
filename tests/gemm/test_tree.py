"""tree_matmul: pairwise sums, Strassen's seven products, and the errors of both."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError, ConfigError
from cukit.gemm import matmul, tree_matmul
from cukit.reference import gemm as reference
from tests.contract import check_against_reference, poisoned, random, to_device, to_host


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("k", [1, 16, 17, 100])
def test_matches_reference(device, rng, dtype, transpose_b, k):
    a = random(rng, (2, 5, k), dtype)
    b = random(rng, (7, k) if transpose_b else (k, 7), dtype)
    options = {"transpose_b": transpose_b, "leaf": 16}
    check_against_reference(tree_matmul, reference.tree_matmul, (a, b), device=device, **options)


def test_float32_from_16_bits(device, rng):
    a, b = random(rng, (16, 200), "bfloat16"), random(rng, (24, 200), "bfloat16")
    options = {"transpose_b": True, "leaf": 64, "out_dtype": np.float32}
    got = tree_matmul(*to_device(device, a, b), **options)
    np.testing.assert_allclose(
        to_host(got), a.astype(np.float64) @ b.astype(np.float64).T, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("transpose_b", [False, True])
def test_strassen_matches_a_product(device, rng, transpose_b):
    a, b = random(rng, (6, 40), "float32"), random(rng, (40, 10), "float32")
    placed = to_device(device, a, np.ascontiguousarray(b.T) if transpose_b else b)
    out = poisoned(device, (6, 10), "float32")
    assert tree_matmul(*placed, transpose_b=transpose_b, strassen=True, leaf=8, out=out) is out
    np.testing.assert_allclose(to_host(out), a @ b, atol=1e-4)


def test_float64_is_accurate(rng):
    a, b = rng.standard_normal((4, 300)), rng.standard_normal((300, 6))
    for strassen in (False, True):
        np.testing.assert_allclose(tree_matmul(a, b, leaf=32, strassen=strassen), a @ b, rtol=1e-11)


def test_the_tree_is_more_accurate_than_one_accumulator():
    """A million equal terms, summed one after another and pairwise from leaves of 64 terms."""
    k = 1 << 20
    terms = np.full((1, k), 0.1, np.float32)
    exact = k * float(np.float32(0.1)) ** 2
    one_by_one = float(np.cumsum(terms[0] * terms[0], dtype=np.float32)[-1])
    tree = float(tree_matmul(terms, terms, transpose_b=True, leaf=64)[0, 0])
    assert abs(tree - exact) < 1e-5 * exact < 1e-2 * abs(one_by_one - exact)


@pytest.mark.gpu
def test_no_worse_than_cublas_on_long_sums(rng):
    a = np.abs(random(rng, (64, 65536), "bfloat16"))
    placed = to_device("gpu", a, a)
    exact = a.astype(np.float64) @ a.astype(np.float64).T
    plain = matmul(*placed, transpose_b=True, out_dtype=np.float32)
    tree = tree_matmul(*placed, transpose_b=True, out_dtype=np.float32)
    errors = [np.abs(to_host(x) - exact).max() for x in (tree, plain)]
    assert errors[0] <= errors[1]


A, B = np.ones((2, 4), np.float32), np.ones((4, 6), np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"b": np.ones((5, 6), np.float32)}, ArrayShapeError, "inner extents 4 and 5"),
        ({"b": B.astype(np.float16)}, ArrayDtypeError, "b must have the dtype of a"),
        ({"a": A[0]}, ArrayShapeError, "at least 2 axes"),
        ({"out": np.ones((2, 5), np.float32)}, ArrayShapeError, "out must have shape"),
        ({"out_dtype": np.float64}, ArrayDtypeError, "out_dtype must be float32"),
        ({"out": B.ravel()[:12].reshape(2, 6)}, ArrayLayoutError, "out overlaps b in memory"),
        ({"strassen": 1}, ConfigError, "strassen must be True or False, got 1"),
        ({"leaf": 0}, ConfigError, "leaf must be an integer of 1 or more, got 0"),
        ({"a": A[:1], "strassen": True}, ArrayShapeError, "even extents, got 1 x 4 x 6"),
        (
            {"a": A.astype(np.float16), "b": B.astype(np.float16), "strassen": True},
            ArrayDtypeError,
            "strassen takes float32 and float64, got float16",
        ),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=f"tree_matmul: .*{message}"):
        tree_matmul(**{"a": A, "b": B, **arguments})
