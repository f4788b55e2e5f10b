"""QuantizedArray: valid combinations of scales and arrays, errors, and values."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import cukit as ck
from cukit.array_api import NarrowArray, NarrowDtype
from cukit.attention import flash_attention
from cukit.core.narrow_dtype import NARROW_DTYPES
from cukit.core.quantized_array import block_shape, is_float8, scales_shape
from cukit.errors import (
    ArrayDtypeError,
    ArrayError,
    ArrayShapeError,
    ConfigError,
    UnsupportedDeviceError,
)
from tests.contract import dtype_of, to_device, to_host

INT2 = NarrowDtype("int2", 2, 1.0, integer=True)

# Combinations used by the op families: shape, axis, group_size, shape of the scales.
GROUPINGS = {
    "tensor": ((6, 10), None, None, (1, 1)),
    "token": ((6, 10), 1, None, (6, 1)),
    "channel": ((6, 10), 0, None, (1, 10)),
    "last axis": ((2, 6, 10), -1, None, (2, 6, 1)),
    "groups along k": ((6, 128), 1, 32, (6, 4)),
    "ragged k": ((6, 100), -1, 32, (6, 4)),
    "k shorter than a group": ((6, 10), 1, 128, (6, 1)),
    "1x4 blocks": ((6, 10), 1, 4, (6, 3)),
    "4x4 blocks": ((6, 10), None, 4, (2, 3)),
    "4x4 blocks of each expert": ((3, 6, 10), (-2, -1), 4, (3, 2, 3)),
    "4x2 blocks": ((6, 10), (1, 0), (2, 4), (2, 5)),
    "keys by channel": ((9, 2, 8), 0, 4, (3, 2, 8)),
    "values by token": ((9, 2, 8), 2, 4, (9, 2, 2)),
    "heads that share scales": ((3, 9, 4, 8), (1, 2, 3), (None, 2, None), (3, 1, 2, 1)),
    "each element": ((2, 3), (), None, (2, 3)),
    "no rows": ((0, 10), 1, 4, (0, 3)),
}

every_grouping = pytest.mark.parametrize("case", GROUPINGS.values(), ids=GROUPINGS.keys())


def storage_of(shape, dtype=ck.int4):
    return np.zeros(dtype.storage_shape(shape), dtype.storage_dtype)


def quantized(shape, *args, dtype=ck.int4, **options):
    return ck.QuantizedArray(storage_of(shape, dtype), dtype, shape, *args, **options)


def by_element(shape, block, factors):
    """The scale of every element, computed one by one."""
    full = np.empty(shape, np.float32)
    for index in itertools.product(*map(range, shape)):
        full[index] = factors[tuple(i // size for i, size in zip(index, block, strict=True))]
    return full


@every_grouping
def test_scales_must_have_one_element_per_group(case):
    shape, axis, group_size, expected = case
    assert scales_shape(shape, axis, group_size) == expected
    scales = np.ones(expected, np.float32)
    array = quantized(shape, scales, axis=axis, group_size=group_size)
    assert array.block_shape == block_shape(shape, axis, group_size)
    assert isinstance(array.axis, tuple)
    assert len(array.axis) == len(array.group_size)
    again = quantized(shape, scales, axis=array.axis, group_size=array.group_size)
    assert again.block_shape == array.block_shape
    for wrong in ((*expected[:-1], expected[-1] + 1), (*expected, 1), ()):
        with pytest.raises(ArrayShapeError, match=r"scales of shape .* must have shape"):
            quantized(shape, np.ones(wrong, np.float32), axis=axis, group_size=group_size)
        with pytest.raises(ArrayShapeError, match=r"zero_points of shape .* must have shape"):
            quantized(shape, scales, np.ones(wrong, np.int8), axis=axis, group_size=group_size)


@pytest.mark.parametrize("zero_points", [None, "int8", "float32"])
@every_grouping
def test_values_are_codes_minus_zero_points_times_scales(device, rng, case, zero_points):
    shape, axis, group_size, factors_shape = case
    codes = rng.integers(-128, 128, shape).astype(np.int8)
    scales = rng.uniform(0.1, 2, factors_shape).astype(np.float32)
    zeros = None
    if zero_points is not None:
        zeros = (rng.standard_normal(factors_shape) * 3).astype(zero_points)
    array = ck.QuantizedArray(
        *to_device(device, codes),
        ck.int8,
        shape,
        *to_device(device, scales, zeros),
        axis,
        group_size,
    )
    block = array.block_shape
    shift = 0 if zeros is None else by_element(shape, block, zeros)
    expected = (codes.astype(np.float32) - shift) * by_element(shape, block, scales)
    np.testing.assert_array_equal(to_host(array.decode()), expected)
    again = ck.QuantizedArray.encode(
        array.decode(), ck.int8, scales=array.scales, zero_points=array.zero_points,
        axis=axis, group_size=group_size,
    )  # fmt: skip
    np.testing.assert_array_equal(to_host(again.storage), codes)
    assert (again.axis, again.group_size) == (array.axis, array.group_size)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("narrow", NARROW_DTYPES, ids=repr)
def test_scales_of_every_dtype_keep_the_error_below_half_a_step(device, rng, narrow, dtype):
    x = rng.standard_normal((5, 70)).astype(np.float32)
    largest = np.abs(np.pad(x, ((0, 0), (0, 26))).reshape(5, 3, 32)).max(axis=-1)
    scales = (largest / narrow.most).astype(dtype_of(dtype))
    array = ck.QuantizedArray.encode(
        *to_device(device, x), narrow, scales=to_device(device, scales)[0], axis=1, group_size=32
    )
    full = by_element(x.shape, array.block_shape, scales)
    # Rounding of the scale may move the largest value beyond the last code.
    rounding = float(np.finfo(dtype_of("float16")).eps) * 8 if dtype != "float32" else 1e-6
    step = 1.0 if narrow.integer else np.abs(x / full) * 2 ** (-3 if "e4m3" in narrow.name else -2)
    step = np.maximum(step, 2.0**-9)
    error = np.abs(to_host(array.decode()) - x)
    assert (error <= full * (step / 2 + narrow.most * rounding)).all()


@pytest.mark.parametrize("narrow", NARROW_DTYPES, ids=repr)
def test_zeros_with_a_scale_of_zero_remain_zero(device, narrow):
    x = np.array([[0.0, -0.0, 0.0], [1.0, 2.0, -2.0]], np.float32)
    scales = np.abs(x).max(axis=1, keepdims=True) / np.float32(2)
    placed = to_device(device, x, scales)
    array = ck.QuantizedArray.encode(placed[0], narrow, scales=placed[1], axis=1)
    np.testing.assert_array_equal(to_host(array.decode()), x)


def test_storage_that_does_not_fit_the_shape_is_rejected():
    for dtype, shape in itertools.product((*NARROW_DTYPES, INT2), ((5,), (3, 8), (2, 3, 7))):
        quantized(shape, dtype=dtype)
        bytes_of_row = math.ceil(shape[-1] * dtype.bits / 8)
        for last in (bytes_of_row - 1, bytes_of_row + 1):
            storage = np.zeros((*shape[:-1], last), dtype.storage_dtype)
            with pytest.raises(ArrayShapeError, match=rf"storage of {dtype.name} of shape .* must"):
                ck.QuantizedArray(storage, dtype, shape)
    with pytest.raises(ArrayShapeError, match="at least one axis"):
        ck.QuantizedArray(np.zeros((), np.uint8), ck.int4, ())
    with pytest.raises(ArrayDtypeError, match="storage of int8 must be int8, got uint8"):
        ck.QuantizedArray(np.zeros(4, np.uint8), ck.int8, (4,))
    with pytest.raises(ArrayDtypeError, match="storage of int4 must be uint8, got float32"):
        ck.QuantizedArray(np.zeros(4, np.float32), ck.int4, (8,))
    with pytest.raises(ArrayDtypeError, match=r"dtype must be one of .*, got 'int4'"):
        ck.QuantizedArray(np.zeros(4, np.uint8), "int4", (8,))
    with pytest.raises(ArrayError, match="got list"):
        ck.QuantizedArray([0, 0], ck.int4, (4,))


def test_scales_that_do_not_fit_are_rejected():
    row = np.ones((3, 1), np.float32)
    with pytest.raises(ArrayDtypeError, match=r"scales must be float32, .*, got float64"):
        quantized((3, 8), row.astype(np.float64), axis=1)
    with pytest.raises(ArrayDtypeError, match=r"zero_points must be int8, .*, got int32"):
        quantized((3, 8), row, row.astype(np.int32), axis=1)
    with pytest.raises(ArrayDtypeError, match="zero_points are for integer dtypes, got float8"):
        quantized((3, 8), row, row, axis=1, dtype=ck.float8_e4m3)
    for options in ({"zero_points": row}, {"axis": 1}, {"group_size": 4}):
        with pytest.raises(ConfigError, match=rf"{next(iter(options))} needs scales"):
            quantized((3, 8), **options)
    for axis in (2, -3, (0, 0), (1, -1)):
        with pytest.raises(ConfigError, match="axis must name distinct axes of shape"):
            quantized((3, 8), row, axis=axis)
    for group_size in (0, -1, (1, 2), ()):
        with pytest.raises(ConfigError, match="group_size must be"):
            quantized((3, 8), row, axis=1, group_size=group_size)


@pytest.mark.gpu
def test_arrays_of_two_devices_are_rejected():
    (storage,) = to_device("gpu", storage_of((3, 8)))
    with pytest.raises(ck.ArrayLayoutError, match="storage on the GPU and scales on the CPU"):
        ck.QuantizedArray(storage, ck.int4, (3, 8), np.ones((3, 1), np.float32), axis=1)


@pytest.mark.parametrize(
    ("axis", "group_size", "index"),
    [
        (1, 4, 2), (1, 4, -1), (1, 4, slice(1, 4)), (1, 4, slice(None, None, -2)), (1, None, 3),
        (0, 4, 5), (0, 4, slice(4, 8)), (0, 4, slice(4, None)), (0, 4, slice(5, 7)),
        (0, 4, slice(3, 3)), (0, None, 4), (0, None, slice(2, 5)), (None, 4, slice(8, 10)),
        (None, None, slice(None, None, 3)), ((0, 2), 4, 6), ((), None, 1),
    ],
)  # fmt: skip
def test_indexing_includes_the_scales(device, rng, axis, group_size, index):
    x = rng.integers(-8, 8, (10, 6, 5)).astype(np.float32)
    shape = scales_shape(x.shape, axis, group_size)
    scales, zeros = to_device(
        device,
        rng.uniform(0.5, 2, shape).astype(np.float32),
        rng.integers(-3, 3, shape).astype(np.int8),
    )
    array = ck.QuantizedArray(
        ck.asarray(to_device(device, x)[0], ck.int4).storage,
        ck.int4, x.shape, scales, zeros, axis, group_size,
    )  # fmt: skip
    part = array[index]
    np.testing.assert_array_equal(ck.to_numpy(part), ck.to_numpy(array)[index], strict=True)
    assert part.zero_points.shape == part.scales.shape


def test_slices_that_split_a_group_are_rejected():
    array = quantized((10, 4), np.ones((3, 4), np.float32), axis=0, group_size=4)
    for index in (slice(2, 6), slice(None, None, 2), slice(0, 8, 4)):
        with pytest.raises(ArrayShapeError, match="a slice across groups of 4"):
            array[index]
    with pytest.raises(ArrayError, match="must be an int or a slice of the first axis, got tuple"):
        array[1, 2]


def test_copies_and_moves_keep_the_values(device, rng):
    codes = rng.integers(-128, 128, (4, 6)).astype(np.int8)
    scales = rng.uniform(1, 2, (4, 3)).astype(np.float32)
    placed = to_device(device, codes[:, ::2].copy(), scales, np.ones((4, 3), np.int8))
    array = ck.QuantizedArray(placed[0], ck.int8, (4, 3), *placed[1:], axis=(), group_size=None)
    assert array.device == ("gpu" if device == "gpu" else "cpu")
    assert array.nbytes == 12 + 48 + 12
    values = ck.to_numpy(array)
    copy = array.copy()
    placed[0][...] = 0
    placed[1][...] = 0
    np.testing.assert_array_equal(ck.to_numpy(copy), values)
    assert copy.to_device(copy.device) is copy
    host = copy.to_device("cpu")
    assert host.device == "cpu"
    assert isinstance(host.storage, np.ndarray)
    np.testing.assert_array_equal(ck.to_numpy(host), values)
    if device == "gpu":
        np.testing.assert_array_equal(ck.to_numpy(host.to_device("gpu")), values)
    with pytest.raises(ConfigError, match="expected 'cpu' or 'gpu'"):
        copy.to_device("tpu")


def test_moving_to_a_missing_gpu_is_rejected():
    if ck.default_device() == "gpu":
        pytest.skip("there is a GPU")
    with pytest.raises(UnsupportedDeviceError, match="cukit doctor"):
        quantized((3, 4)).to_device("gpu")


def test_repr_shows_shapes_and_dtypes_of_scales_and_zero_points():
    assert NarrowArray is ck.QuantizedArray
    assert repr(quantized((3, 8))) == "QuantizedArray(int4, shape=(3, 8))"
    scales = np.ones((3, 2), np.float16)
    assert repr(quantized((3, 8), scales, scales.astype(np.int8), axis=-1, group_size=4)) == (
        "QuantizedArray(int4, shape=(3, 8), scales=float16 (3, 2), zero_points=int8 (3, 2), "
        "axis=1, group_size=4)"
    )


def test_is_float8_if_any_array_is():
    float8, integers = quantized((4,), dtype=ck.float8_e5m2), quantized((4,))
    assert is_float8(float8)
    assert is_float8(None, integers, float8)
    assert not is_float8(integers, quantized((4,), dtype=ck.int8), np.zeros(4), None)


def test_attention_accepts_only_float8_and_only_without_scales():
    shape = (1, 3, 1, 16)
    plain, integers = quantized(shape, dtype=ck.float8_e4m3), quantized(shape)
    with pytest.raises(ArrayDtypeError, match=r"k must be float8_e4m3 .*, got int4"):
        flash_attention(plain, integers, plain)
    with pytest.raises(ArrayError, match="got QuantizedArray"):
        flash_attention(integers, integers, integers)
    scaled = quantized(shape, np.ones((1, 1, 1, 1), np.float32), dtype=ck.float8_e4m3)
    with pytest.raises(ArrayError, match="v has scales; pass them as v_descale"):
        flash_attention(plain, plain, scaled)
