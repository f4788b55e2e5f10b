"""quantize: codes, scales, zero points and decoded values are bitwise equal to the references."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cukit as ck
from cukit.core.device import typical_device
from cukit.core.kernel import KernelSpec
from cukit.core.quantized_array import block_shape
from cukit.errors import ArrayDtypeError, ArrayError, ArrayShapeError, ConfigError
from cukit.quantization._matrices import matrices_of
from cukit.quantization._quantize_plan import Rounding, plan_quantize
from cukit.reference import quantize as reference
from tests.contract import (
    DTYPES,
    another_order,
    dtype_of,
    poison_pool,
    random,
    to_device,
    to_host,
)

FORMATS = (ck.int8, ck.int4, ck.float8_e4m3, ck.float8_e5m2)

# Shape, axis and group_size of every path through the kernels.
GRANULARITIES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "rows of a warp": ((9, 96), {}),
    "rows of a block": ((3, 2056), {}),
    "rows beyond registers": ((2, 66000), {}),
    "rows of any alignment": ((5, 37), {}),
    "leading axes": ((2, 3, 64), {}),
    "groups of 32": ((5, 96), {"group_size": 32}),
    "groups of 128, ragged": ((7, 200), {"group_size": 128}),
    "groups of 64, any alignment": ((3, 101), {"group_size": 64}),
    "group beyond k": ((3, 40), {"group_size": 64}),
    "tiles": ((130, 260), {"axis": (-2, -1), "group_size": 128}),
    "tiles of experts": ((2, 70, 64), {"axis": (-2, -1), "group_size": 64}),
    "small tensor": ((9, 24), {"axis": None}),
    "tensor": ((260, 264), {"axis": None}),
    "tensor of each expert": ((2, 260, 264), {"axis": (-2, -1)}),
    "columns": ((70, 72), {"axis": -2}),
    "columns of any alignment": ((5, 13), {"axis": 0}),
    "32 tokens of channels": ((70, 3, 8), {"axis": 0, "group_size": 32}),
    "32 rows of columns": ((2, 70, 24), {"axis": -2, "group_size": 32}),
}
OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "int8": (ck.int8, {}),
    "int8 zero points": (ck.int8, {"zero_points": True}),
    "int4": (ck.int4, {"scale_dtype": "bfloat16"}),
    "int4 zero points": (ck.int4, {"zero_points": True, "scale_dtype": np.float16}),
    "e4m3": (ck.float8_e4m3, {}),
    "e4m3 powers of two": (ck.float8_e4m3, {"power_of_two": True}),
    "e5m2": (ck.float8_e5m2, {}),
}


def expected(x, dtype, shape_options, options):
    """The reference's codes, scales and zero points."""
    block = block_shape(x.shape, shape_options.get("axis", -1), shape_options.get("group_size"))
    scale_dtype = options.get("scale_dtype", np.float32)
    scale_dtype = dtype_of(scale_dtype) if isinstance(scale_dtype, str) else scale_dtype
    return reference.quantize(x, dtype.name, block, **{**options, "scale_dtype": scale_dtype})


def assert_same(name, got, want):
    got, want = to_host(got), to_host(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape), name
    different = np.ascontiguousarray(got).view(np.uint8) != np.ascontiguousarray(want).view(
        np.uint8
    )
    assert not different.any(), f"{name}: {different.sum()} bytes differ"


def values(rng, shape, dtype="bfloat16"):
    """Rows of magnitudes from 1e-3 to 1e3, each with a smaller fifth; the last row is zero."""
    x = rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3, (*shape[:-1], 1))
    x[..., : shape[-1] // 5] *= 0.01
    x.reshape(-1, shape[-1])[-1] = 0
    return x.astype(dtype_of(dtype))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("case", GRANULARITIES.values(), ids=GRANULARITIES.keys())
def test_every_granularity_is_bitwise_equal_to_the_reference(device, rng, case, options):
    (shape, granularity), (dtype, rounding) = case, options
    x = values(rng, shape)
    placed = to_device(device, x)[0]
    codes, scales, zeros = expected(x, dtype, granularity, rounding)
    for repeat in range(1 if device == "cpu" else 2):
        poison_pool(device)
        with another_order(device, repeat):
            array = ck.quantize(placed, dtype, **granularity, **rounding)
            assert_same("codes", array.storage, codes)
            assert_same("scales", array.scales, scales)
            if zeros is not None:
                assert_same("zero points", array.zero_points, zeros)
            poison_pool(device)
            decoded = ck.dequantize(array, "bfloat16")
    wide = reference.dequantize(codes, dtype.name, shape[-1], scales, zeros, array.block_shape)
    assert_same("values", decoded, wide.astype(ml_dtypes.bfloat16))
    assert_same("x", placed, x)


@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 77])
def test_every_dtype(device, rng, width, dtype, scale_dtype):
    x = values(rng, (6, width), dtype)
    options = {"zero_points": True, "scale_dtype": scale_dtype}
    array = ck.quantize(*to_device(device, x), ck.int4, group_size=32, **options)
    codes, scales, zeros = expected(x, ck.int4, {"group_size": 32}, options)
    assert_same("codes", array.storage, codes)
    assert_same("scales", array.scales, scales)
    assert_same("zero points", array.zero_points, zeros)
    got = to_host(ck.dequantize(array, dtype))
    wide = reference.dequantize(codes, "int4", width, scales, zeros, array.block_shape)
    with np.errstate(over="ignore"):
        assert_same("values", got, wide.astype(got.dtype))


@pytest.mark.parametrize("width", [64, 2056, 37])
@pytest.mark.parametrize("zero_points", [False, True])
def test_searched_clips_are_never_worse_than_the_full_range(device, rng, width, zero_points):
    """The kernel sums errors in another order than the reference, so ties may be broken
    differently."""
    x = random(rng, (8, width), "bfloat16")
    x[0] = 0
    options = {"group_size": 128, "zero_points": zero_points}
    placed = to_device(device, x)[0]

    def error(array):
        return ((ck.to_numpy(array).astype(np.float64) - x.astype(np.float64)) ** 2).sum(axis=-1)

    searched = error(ck.quantize(placed, ck.int4, clip="mse", **options))
    whole = error(ck.quantize(placed, ck.int4, **options))
    block = block_shape(x.shape, -1, 128)
    codes, scales, zeros = reference.quantize(x, "int4", block, clip="mse", zero_points=zero_points)
    best = reference.dequantize(codes, "int4", width, scales, zeros, block).astype(np.float64) - x
    assert (searched <= whole * (1 + 1e-6)).all()
    np.testing.assert_allclose(searched, (best**2).sum(axis=-1), rtol=1e-5)
    assert searched.sum() < whole.sum()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_nonfinite_values_make_only_their_block_nan(device, rng, options, bad):
    dtype, rounding = options
    x = random(rng, (4, 64), "float32")
    clean = ck.quantize(*to_device(device, x), dtype, group_size=32, **rounding)
    x[2, 40] = bad
    array = ck.quantize(*to_device(device, x), dtype, group_size=32, **rounding)
    got, want = ck.to_numpy(array), ck.to_numpy(clean)
    assert np.isnan(got[2, 32:]).all()
    want[2, 32:] = np.nan
    np.testing.assert_array_equal(got, want)
    _, scales, _ = expected(x, dtype, {"group_size": 32}, rounding)
    np.testing.assert_array_equal(
        to_host(array.scales).astype(np.float32), scales.astype(np.float32)
    )


@pytest.mark.parametrize("case", ["columns", "tensor", "tiles"])
def test_nan_in_the_other_kernels(device, rng, case):
    shape, granularity = GRANULARITIES[case]
    x = random(rng, shape, "bfloat16")
    x[3, 5] = np.nan
    array = ck.quantize(*to_device(device, x), ck.int8, **granularity)
    codes, scales, _ = expected(x, ck.int8, granularity, {})
    assert_same("codes", array.storage, codes)
    np.testing.assert_array_equal(
        to_host(array.scales).astype(np.float32), scales.astype(np.float32)
    )
    assert np.isnan(scales).sum() == 1


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_zeros_have_the_scale_one(device, options):
    dtype, rounding = options
    x = np.zeros((3, 64), np.float32)
    array = ck.quantize(*to_device(device, x), dtype, group_size=32, **rounding)
    assert (to_host(array.scales).astype(np.float32) == 1).all()
    assert not ck.to_numpy(array).any()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_extreme_magnitudes_stay_finite(device, rng, options):
    """Rows near the largest and the smallest float32 values, with scales of every dtype."""
    dtype, rounding = options
    x = rng.choice(np.array([1, -1], np.float32), (6, 32))
    x *= np.array([3.4e38, 1e38, 1e-20, 1e-37, 1e-40, 1e-45], np.float32)[:, None]
    array = ck.quantize(*to_device(device, x), dtype, **rounding)
    codes, scales, _ = expected(x, dtype, {}, rounding)
    assert_same("codes", array.storage, codes)
    assert_same("scales", array.scales, scales)
    assert np.isfinite(scales.astype(np.float32)).all()
    assert (scales.astype(np.float32) >= 2.0**-126).all()


def test_scales_of_powers_of_two(device, rng):
    x = values(rng, (40, 128), "float32")
    array = ck.quantize(*to_device(device, x), ck.float8_e4m3, group_size=128, power_of_two=True)
    scales, exact = to_host(array.scales)[:, 0], np.abs(x).max(axis=-1) / np.float32(448)
    fractions, _ = np.frexp(scales)
    assert (fractions == 0.5).all()
    assert (scales[:-1] >= exact[:-1]).all()
    assert (scales[:-1] < 2 * exact[:-1]).all()


@pytest.mark.parametrize("shape", [(5, 256), (2, 3, 300), (8, 128), (1, 640)])
def test_scales_by_column(device, rng, shape):
    """The scales are a view of [groups, rows padded to a multiple of 4], which TMA can load."""
    x = values(rng, shape)
    poison_pool(device)
    array = ck.quantize(
        *to_device(device, x), ck.float8_e4m3, group_size=128, scale_layout="column"
    )
    _, scales, _ = expected(x, ck.float8_e4m3, {"group_size": 128}, {})
    assert_same("scales", array.scales, scales)
    rows, groups = x.size // shape[-1], scales.shape[-1]
    memory = array.scales
    while memory.base is not None:
        memory = memory.base
    assert memory.shape == (groups, -(-rows // 4) * 4)
    assert not to_host(memory)[:, rows:].any()
    want = reference.dequantize(
        to_host(array.storage), "float8_e4m3", shape[-1], scales, None, array.block_shape
    )
    assert_same("values", ck.dequantize(array), want)


def test_out_is_filled_and_returned(device, rng):
    first, second = (random(rng, (6, 256), "bfloat16") for _ in range(2))
    options = {"group_size": 128, "zero_points": True, "scale_dtype": np.float16}
    out = ck.quantize(*to_device(device, first), ck.int4, **options)
    assert ck.quantize(*to_device(device, second), ck.int4, **options, out=out) is out
    again = ck.quantize(*to_device(device, second), ck.int4, **options)
    assert_same("codes", out.storage, again.storage)
    assert_same("scales", out.scales, again.scales)
    assert_same("zero points", out.zero_points, again.zero_points)
    target = to_device(device, np.full((6, 256), np.nan, np.float16))[0]
    assert ck.dequantize(out, np.float16, out=target) is target
    assert_same("values", target, again.decode(np.float16))


@pytest.mark.parametrize("view", [lambda x: x[::2, 8:], lambda x: x.T, lambda x: x[:, 3:35]])
def test_any_layout_of_values(device, rng, view):
    x = values(rng, (48, 64))
    array = ck.quantize(view(to_device(device, x)[0]), ck.int8, group_size=16)
    codes, scales, _ = expected(np.ascontiguousarray(view(x)), ck.int8, {"group_size": 16}, {})
    assert_same("codes", array.storage, codes)
    assert_same("scales", array.scales, scales)


def test_quantize_and_encode_agree(device, rng):
    """The same scales give the same codes, because both ops round in the same way."""
    x = to_device(device, values(rng, (9, 96)))[0]
    array = ck.quantize(x, ck.int4, group_size=32, zero_points=True)
    again = ck.QuantizedArray.encode(
        x, ck.int4, scales=array.scales, zero_points=array.zero_points, axis=-1, group_size=32
    )
    assert_same("codes", again.storage, array.storage)


@pytest.mark.parametrize("dtype", FORMATS, ids=repr)
def test_codes_survive_a_round_trip(device, rng, dtype):
    """Quantising decoded values again preserves them, up to the rounding of the scales."""
    x = values(rng, (20, 128))
    array = ck.quantize(*to_device(device, x), dtype, group_size=32)
    again = ck.quantize(array.decode(), dtype, group_size=32)
    np.testing.assert_allclose(ck.to_numpy(again), ck.to_numpy(array), rtol=2e-6)


def test_empty_arrays(device):
    for shape in ((0, 64), (3, 0)):
        array = ck.quantize(*to_device(device, np.zeros(shape, np.float32)), ck.int4, group_size=32)
        assert ck.to_numpy(array).shape == shape


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_2_31_values():
    import cupy

    rows, cols = 70_000, 32_768
    x = cupy.zeros((rows, cols), np.float16)
    x[-1] = cupy.arange(cols) % 7
    x[-1, -128:] = 3
    for options in ({"group_size": 128}, {}, {"axis": None}, {"axis": 0}):
        array = ck.quantize(x, ck.int8, **options)
        values_back = ck.dequantize(array, np.float16)
        np.testing.assert_allclose(values_back[-1].get(), x[-1].get(), atol=0.03)
        assert not bool(values_back[:-1].any())
        del array, values_back


X = np.ones((4, 8), np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": X.astype(np.int32)}, ArrayDtypeError, "x must be float32, .* got int32"),
        ({"x": np.ones((), np.float32)}, ArrayShapeError, "x must have at least 1 axis"),
        ({"x": [1.0]}, ArrayError, "got list"),
        ({"dtype": "int8"}, ArrayDtypeError, "dtype must be float8_e4m3, .* got 'int8'"),
        ({"scale_dtype": np.float64}, ArrayDtypeError, "scale_dtype must be .* got 'float64'"),
        ({"clip": "best"}, ConfigError, "clip must be one of 'absmax', 'mse', got 'best'"),
        ({"clip": "mse", "dtype": ck.float8_e4m3}, ArrayDtypeError, "clip='mse' is for integer"),
        ({"zero_points": True, "dtype": ck.float8_e4m3}, ArrayDtypeError, "zero_points are for"),
        ({"power_of_two": True, "scale_dtype": np.float16}, ConfigError, "power_of_two needs"),
        ({"scale_layout": "rows"}, ConfigError, "scale_layout must be"),
        ({"scale_layout": "column", "zero_points": True}, ConfigError, "scale_layout='column' is"),
        ({"scale_layout": "column", "axis": None}, ConfigError, "scale_layout='column' is"),
        ({"dtype": ck.int4, "group_size": 3}, ConfigError, "must have an even length"),
        (
            {"x": np.ones((2, 4, 8), np.float32), "axis": (0, 2)},
            ConfigError,
            "axis must name the last",
        ),
        ({"out": X}, ArrayDtypeError, "out must be a QuantizedArray"),
        ({"out": ck.quantize(X, ck.int4)}, ArrayShapeError, "out must have"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    arguments = {"x": X, "dtype": ck.int8, **arguments}
    with pytest.raises(error, match=f"quantize: .*{message}"):
        ck.quantize(arguments.pop("x"), arguments.pop("dtype"), **arguments)


def plan(shape, block, itemsize=2, **options):
    rounding = Rounding("int8", "bfloat16", "float32", **options)
    num_sms = typical_device("sm_90").num_sms
    return plan_quantize(matrices_of(shape, block), rounding, itemsize, num_sms)


def test_plans_hold_blocks_in_registers_and_keep_loads_in_flight():
    for block in ((1, 32), (1, 128), (1, 1024), (1, 4096), (1, 11008), (1, 32768), (128, 128)):
        config = plan((4096, block[1]), block)
        assert config.kernel == "blocks"
        assert config.in_registers
        vectors = block[0] * block[1] // 8
        assert config.team * config.items >= vectors
        assert config.items * config.blocks_per_team >= min(3, vectors)
        assert isinstance(config.specs()[0], KernelSpec)
    assert not plan((4096, 1 << 20), (1, 1 << 20)).in_registers
    assert plan((8192, 8192), (8192, 8192)).kernel == "tensor"
    assert plan((64, 64), (64, 64)).kernel == "blocks"
    assert plan((8192, 8192), (8192, 1)).kernel == "columns"
    assert plan((8192, 8192), (8192, 8192), clip="mse").kernel == "blocks"
