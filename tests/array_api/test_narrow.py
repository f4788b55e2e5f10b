"""float8 and int4 arrays: rounding, packing, the way back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cukit as ck
from cukit.errors import ArrayShapeError
from tests.contract import to_device, to_host

FLOAT8 = {"float8_e4m3": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
SHAPES = [(1,), (7,), (16,), (5, 3), (4, 64), (3, 2, 1001)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [ck.float8_e4m3, ck.float8_e5m2], ids=repr)
def test_float8_is_the_nearest_value(device, rng, shape, dtype):
    x = (rng.standard_normal(shape) * 10 ** rng.uniform(-4, 2, shape)).astype(np.float32)
    narrow = ck.asarray(to_device(device, x)[0], dtype)
    assert narrow.shape == shape
    assert narrow.nbytes == x.size
    expected = x.astype(FLOAT8[dtype.name]).astype(np.float32)
    np.testing.assert_array_equal(ck.to_numpy(narrow), expected)


@pytest.mark.parametrize("dtype", [ck.float8_e4m3, ck.float8_e5m2], ids=repr)
def test_float8_saturates_and_keeps_nan(device, dtype):
    x = np.array([1e9, -1e9, np.inf, -np.inf, np.nan, 0.0], np.float32)
    got = ck.to_numpy(ck.asarray(to_device(device, x)[0], dtype))
    most = dtype.most
    np.testing.assert_array_equal(got, [most, -most, most, -most, np.nan, 0])


@pytest.mark.parametrize("dtype", [ck.float8_e4m3, ck.float8_e5m2], ids=repr)
def test_every_float8_byte_survives_a_round_trip(device, dtype):
    values = np.arange(256, dtype=np.uint8).view(FLOAT8[dtype.name]).astype(np.float32)
    values = values[np.isfinite(values)]
    np.testing.assert_array_equal(
        ck.to_numpy(ck.asarray(to_device(device, values)[0], dtype)), values
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_int4_rounds_to_even_and_packs_two_to_a_byte(device, rng, shape):
    x = (rng.uniform(-10, 10, shape)).astype(np.float32)
    x.flat[0] = 2.5
    narrow = ck.asarray(to_device(device, x)[0], ck.int4)
    assert narrow.storage.shape == (*shape[:-1], (shape[-1] + 1) // 2)
    np.testing.assert_array_equal(ck.to_numpy(narrow), np.clip(np.rint(x), -8, 7))


def test_int4_puts_the_first_value_in_the_low_bits(device):
    narrow = ck.asarray(to_device(device, np.array([1, -2, 7], np.float32))[0], ck.int4)
    assert to_host(narrow.storage).tolist() == [0xE1, 0x07]


def test_indexing_keeps_the_logical_shape(device, rng):
    x = rng.integers(-8, 8, (4, 5)).astype(np.float32)
    narrow = ck.asarray(to_device(device, x)[0], ck.int4)
    np.testing.assert_array_equal(ck.to_numpy(narrow[1:3]), x[1:3])
    np.testing.assert_array_equal(ck.to_numpy(narrow[2]), x[2])
    with pytest.raises(ArrayShapeError, match="one axis"):
        narrow[0][0]


def test_astype_goes_through_the_values(device, rng):
    x = rng.standard_normal((3, 4)).astype(np.float32)
    narrow = ck.asarray(to_device(device, x)[0], ck.float8_e4m3)
    assert narrow.astype(np.float16).dtype == np.float16
    assert narrow.astype(ck.int4).dtype is ck.int4
    assert (narrow.ndim, narrow.size) == (2, 12)
    assert repr(narrow) == "NarrowArray(float8_e4m3, shape=(3, 4))"
