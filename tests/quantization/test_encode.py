"""float8, int8 and int4 arrays: rounding, packing, decoding."""

from __future__ import annotations

import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import cukit as ck
from cukit.array_api import NarrowDtype
from cukit.core.narrow_dtype import NARROW_DTYPES
from cukit.errors import ArrayDtypeError, ArrayShapeError
from cukit.quantization import encode as encode_module
from cukit.quantization.encode import plan_encode
from cukit.reference import narrow as reference
from tests.contract import dtype_of, poison_pool, to_device, to_host

FLOAT8 = {"float8_e4m3": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
INTEGER = {"int8": (-128, 127), "int4": (-8, 7)}
DTYPES = ("float32", "float16", "bfloat16")
SHAPES = [(1,), (7,), (5, 3), (4, 64), (3, 2, 1001), (2, 0), (0, 4)]
PER_BLOCK = (1023, 1024, 1025, 2048, 4095, 4097, 9001)
"""Sizes near multiples of the number of elements that a thread block converts."""

every_narrow = pytest.mark.parametrize("narrow", NARROW_DTYPES, ids=repr)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def expected_values(x, narrow):
    """The float32 values to which `x` is rounded."""
    x = x.astype(np.float32)
    if narrow.integer:
        return np.clip(np.rint(np.nan_to_num(x, nan=0.0)), *INTEGER[narrow.name])
    with np.errstate(invalid="ignore"):  # NaN
        codes = np.clip(x, -narrow.most, narrow.most).astype(FLOAT8[narrow.name])
    return codes.astype(np.float32)


def ties(narrow):
    """float32 values at and next to the midpoints of adjacent representable values."""
    if narrow.integer:
        low, high = INTEGER[narrow.name]
        codes = np.arange(low - 2, high + 3, dtype=np.float32)
    else:
        codes = np.arange(256, dtype=np.uint8).view(FLOAT8[narrow.name]).astype(np.float32)
        codes = np.unique(codes[np.isfinite(codes)])
    middles = (codes[1:] + codes[:-1]) / 2
    sides = [np.nextafter(middles, side, dtype=np.float32) for side in (-np.inf, np.inf)]
    return np.concatenate([codes, middles, *sides]).astype(np.float32)


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


@every_narrow
def test_ties_go_to_even(device, narrow):
    x = ties(narrow)
    got = ck.to_numpy(ck.asarray(to_device(device, x)[0], narrow))
    np.testing.assert_array_equal(got, expected_values(x, narrow))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@every_narrow
def test_every_number_of_sixteen_bits(device, narrow, dtype):
    """Infinities and NaN included."""
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype_of(dtype))
    got = ck.QuantizedArray.encode(to_device(device, x)[0], narrow)
    np.testing.assert_array_equal(ck.to_numpy(got), expected_values(x, narrow))


@every_dtype
@every_narrow
def test_every_code_survives_a_round_trip(device, narrow, dtype):
    """Also for 16-bit floats, which represent every value exactly."""
    codes = np.arange(256, dtype=np.uint8).view(narrow.storage_dtype)
    array = ck.QuantizedArray(to_device(device, codes)[0], narrow, (256 * 8 // narrow.bits,))
    values = array.decode(dtype)
    assert values.dtype == dtype_of(dtype)
    expected = reference.decode(codes, narrow.name, array.size)
    np.testing.assert_array_equal(to_host(values).astype(np.float32), expected)
    again = to_host(ck.QuantizedArray.encode(values, narrow).storage)
    kept = np.isfinite(expected).reshape(-1, 8 // narrow.bits).all(axis=-1)
    np.testing.assert_array_equal(again[kept], codes[kept])


@pytest.mark.parametrize("shape", [*SHAPES, *((size,) for size in PER_BLOCK)])
@every_dtype
@every_narrow
def test_ragged_shapes(device, rng, narrow, dtype, shape):
    x = (rng.standard_normal(shape) * 4).astype(dtype_of(dtype))
    poison_pool(device)
    array = ck.QuantizedArray.encode(to_device(device, x)[0], narrow)
    assert (array.shape, array.dtype) == (shape, narrow)
    np.testing.assert_array_equal(
        to_host(array.storage), reference.encode(x, narrow.name), strict=True
    )
    poison_pool(device)
    values = array.decode(dtype)
    assert values.dtype == x.dtype
    np.testing.assert_array_equal(to_host(values).astype(np.float32), expected_values(x, narrow))


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
@every_dtype
@every_narrow
def test_unaligned_arrays(device, rng, narrow, dtype, offset):
    """Values and codes `offset` elements after a multiple of 16 bytes."""
    x = (rng.standard_normal(5000) * 4).astype(dtype_of(dtype))
    (placed,) = to_device(device, x)
    array = ck.QuantizedArray.encode(placed[offset:], narrow)
    expected = reference.encode(x[offset:], narrow.name)
    np.testing.assert_array_equal(to_host(array.storage), expected)
    codes = array.storage[offset:]
    tail = ck.QuantizedArray(codes, narrow, (codes.size * 8 // narrow.bits,))
    np.testing.assert_array_equal(
        to_host(tail.decode(dtype)).astype(np.float32),
        reference.decode(expected[offset:], narrow.name, tail.size),
    )


@pytest.mark.parametrize(
    "view", [lambda x: x[::2, 1:], lambda x: x.transpose(2, 0, 1)], ids=["slices", "transposed"]
)
@every_narrow
def test_any_layout(device, rng, narrow, view):
    x = (rng.standard_normal((6, 10, 14)) * 4).astype(np.float32)
    array = ck.QuantizedArray.encode(view(to_device(device, x)[0]), narrow)
    expected = expected_values(view(x), narrow)
    np.testing.assert_array_equal(ck.to_numpy(array), expected)
    storage = array.storage[::-1, :, :3]
    part = ck.QuantizedArray(storage, narrow, (*storage.shape[:-1], 3 * 8 // narrow.bits))
    np.testing.assert_array_equal(ck.to_numpy(part), expected[::-1, :, : part.shape[-1]])


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


@pytest.mark.parametrize("shape", [(3, 997), (2989,)])
def test_indices_of_64_bits(device, rng, monkeypatch, shape):
    """Required by arrays of 2^32 values. No other test has these shapes: launches are cached."""

    def wide(*args, **options):
        return replace(plan_encode(*args, **options), index="uint64")

    monkeypatch.setattr(encode_module, "plan_encode", wide)
    x = (rng.standard_normal(shape) * 4).astype(np.float32)
    array = ck.QuantizedArray.encode(to_device(device, x)[0], ck.int4)
    np.testing.assert_array_equal(to_host(array.storage), reference.encode(x, "int4"))
    np.testing.assert_array_equal(ck.to_numpy(array), expected_values(x, ck.int4))


def test_plans():
    """16-byte accesses for aligned arrays; 64-bit indices where 32 bits do not suffice."""
    for entry, narrow, dtype in itertools.product(("encode", "decode"), NARROW_DTYPES, DTYPES):
        kind = dtype_of(dtype)
        config = plan_encode(entry, narrow, kind, 1, 1 << 20)
        assert config.vec * kind.itemsize == 16
        assert config.index == "uint32"
        assert plan_encode(entry, narrow, kind, 1, 1 << 33).index == "uint64"
        assert plan_encode(entry, narrow, kind, 1, 1 << 20, aligned=False).vec == 1
        assert plan_encode(entry, narrow, kind, 4, 33).vec == 1
        assert plan_encode(entry, narrow, kind, 1, 1).num_blocks == 1
        assert plan_encode(entry, narrow, kind, 1, 0).num_blocks == 0


def test_dtypes_without_codes_are_rejected(device):
    x = to_device(device, np.ones(4, np.float32))[0]
    with pytest.raises(ArrayDtypeError, match="x must be float32, float16, bfloat16, got int64"):
        ck.QuantizedArray.encode(x.astype(np.int64), ck.int4)
    with pytest.raises(ArrayDtypeError, match=r"dtype must be float8_e4m3, .* got int2"):
        ck.QuantizedArray.encode(x, NarrowDtype("int2", 2, 1.0, integer=True))
    with pytest.raises(ArrayDtypeError, match=r"dtype must be float8_e4m3, .* got int8"):
        ck.QuantizedArray.encode(x, np.dtype(np.int8))
    with pytest.raises(ArrayDtypeError, match=r"dtype must be float32, .* got 'float64'"):
        ck.asarray(x, ck.int4).decode(np.float64)
    with pytest.raises(ArrayShapeError, match="x must have at least 1 axis"):
        ck.QuantizedArray.encode(x[:1].reshape(()), ck.int4)


def test_astype_goes_through_the_values(device, rng):
    x = rng.standard_normal((3, 4)).astype(np.float32)
    narrow = ck.asarray(to_device(device, x)[0], ck.float8_e4m3)
    assert narrow.astype(np.float16).dtype == np.float16
    assert narrow.astype(ck.int4).dtype is ck.int4
    assert (narrow.ndim, narrow.size) == (2, 12)
    assert repr(narrow) == "QuantizedArray(float8_e4m3, shape=(3, 4))"
