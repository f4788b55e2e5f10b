"""Scans, sorts, reductions and histograms, compared with NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.errors import ArrayError, ArrayShapeError, ConfigError
from cukit.sequence import histogram, parallel_scan, parallel_sort, strided_reduction
from tests.contract import to_device, to_host

DTYPES = ("float32", "float16", "int32")
PLACES = pytest.mark.parametrize("place", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])


def values(rng, shape, dtype):
    return rng.integers(-3, 4, shape).astype(dtype)


@PLACES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("reverse", [False, True])
def test_scan(place, rng, dtype, axis, reverse):
    x = values(rng, (4, 5, 6), dtype)
    ordered = np.flip(x, axis) if reverse else x
    want = np.cumsum(ordered, axis=axis)
    want = np.flip(want, axis) if reverse else want
    (placed,) = to_device(place, x)
    got = to_host(parallel_scan(placed, axis=axis, reverse=reverse))
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, want)
    before = to_host(parallel_scan(placed, axis=axis, reverse=reverse, exclusive=True))
    np.testing.assert_array_equal(before, want - x)


def test_scan_of_products(rng):
    x = values(rng, (7,), "float64") + 0.5
    np.testing.assert_allclose(parallel_scan(x, operation="product"), np.cumprod(x))
    before = parallel_scan(x, operation="product", exclusive=True)
    np.testing.assert_allclose(before, np.concatenate([[1], np.cumprod(x)[:-1]]))


@PLACES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("descending", [False, True])
def test_sort_is_stable(place, rng, dtype, descending):
    x = values(rng, (5, 40), dtype)[:, ::2]
    (placed,) = to_device(place, x)
    ordered, indices = map(
        to_host, parallel_sort(placed, descending=descending, return_indices=True)
    )
    want = np.argsort(-x.astype(float) if descending else x, axis=1, kind="stable")
    np.testing.assert_array_equal(indices, want)
    np.testing.assert_array_equal(ordered, np.take_along_axis(x, want, axis=1))
    np.testing.assert_array_equal(to_host(parallel_sort(placed, descending=descending)), ordered)


@PLACES
@pytest.mark.parametrize("operation", ["sum", "product", "mean", "max", "min"])
@pytest.mark.parametrize("axis", [0, (0, 2), None, -1])
def test_reduction_of_a_view(place, rng, operation, axis):
    x = values(rng, (4, 6, 8), "float32")
    (placed,) = to_device(place, x)
    view, same = placed[::2].transpose(2, 0, 1), x[::2].transpose(2, 0, 1)
    function = {"product": np.prod}.get(operation) or getattr(np, operation)
    want = function(same.astype(np.float64), axis=axis, keepdims=True)
    got = to_host(strided_reduction(view, axis=axis, operation=operation, keepdims=True))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert got.dtype == np.float32


@PLACES
def test_histogram(place, rng):
    x = rng.standard_normal((30, 50)).astype(np.float32)
    x[0, :3] = np.nan, -2.0, 2.0
    (placed,) = to_device(place, x)
    want, _ = np.histogram(x[~np.isnan(x)], bins=8, range=(-2, 2))
    np.testing.assert_array_equal(to_host(histogram(placed, 8, low=-2.0, high=2.0)), want)
    assert to_host(histogram(placed, 3, low=100.0, high=101.0)).tolist() == [0, 0, 0]


def test_errors_name_the_argument(rng):
    x = values(rng, (3, 4), "float32")
    with pytest.raises(ConfigError, match="axis"):
        parallel_scan(x, axis=2)
    with pytest.raises(ConfigError, match="operation"):
        parallel_scan(x, operation="mean")
    with pytest.raises(ArrayError, match="x must be"):
        parallel_sort(x.astype(complex))
    with pytest.raises(ArrayShapeError, match="max of no elements"):
        strided_reduction(x[:0], axis=0, operation="max")
    with pytest.raises(ConfigError, match="duplicates"):
        strided_reduction(x, axis=(0, -2))
    with pytest.raises(ConfigError, match="high"):
        histogram(x, 3, low=1.0, high=1.0)
