"""quantized_linear: formats of weights, tilings, pieces of tiles, packing, the plan, errors."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest

import cukit as ck
from cukit.core.arrays import bfloat16
from cukit.core.device import TYPICAL_DEVICES, current_device, typical_device
from cukit.errors import ArrayDtypeError, ArrayError, ArrayLayoutError, ArrayShapeError, ConfigError
from cukit.gemm import pack_weight, quantized_linear
from cukit.gemm.quantized._weight_only_plan import (
    configure,
    expanded_tiling,
    few_tiling,
    hopper_tiling,
    plan_weight_only,
    sm80_tiling,
)
from cukit.gemm.quantized.weight_only import ExpandedLaunch, WeightOnlyLaunch
from cukit.gemm.quantized.weight_only_layout import WeightDescription
from cukit.reference import weight_only as reference
from tests.contract import (
    another_order,
    assert_close,
    check_against_reference,
    dtype_of,
    poisoned,
    random,
    to_device,
    to_host,
)

# dtype, group_size, zero points, dtype of the scales
FORMATS = {
    "int4 g128": (ck.int4, 128, False, "float16"),
    "int4 g128 zero points": (ck.int4, 128, True, "float16"),
    "int4 g32 zero points": (ck.int4, 32, True, "bfloat16"),
    "int4 g64 zero points": (ck.int4, 64, True, "float32"),
    "int4 g256": (ck.int4, 256, False, "bfloat16"),
    "int4 rows": (ck.int4, None, False, "float32"),
    "int4 rows zero points": (ck.int4, None, True, "float16"),
    "int8 rows": (ck.int8, None, False, "bfloat16"),
    "int8 g128": (ck.int8, 128, False, "float16"),
}
FLOAT8_FORMATS = ["int4 g128", "int4 g32 zero points", "int4 g64 zero points"]


def quantized(rng, n, k, form):
    """A weight of random codes; the scales of row 0 are zero, so the row decodes to zeros."""
    dtype, group_size, zero_points, scale_dtype = FORMATS[form]
    groups = 1 if group_size is None else -(-k // group_size)
    scales = rng.uniform(0.5, 1.5, (n, groups)).astype(dtype_of(scale_dtype))
    zeros = rng.integers(-8, 8, (n, groups)).astype(np.int8) if zero_points else None
    low, high = (-8, 8) if dtype == ck.int4 else (-128, 128)
    codes = ck.QuantizedArray.encode(rng.integers(low, high, (n, k)).astype(np.float32), dtype)
    scales *= (0.1 if dtype == ck.int4 else 0.01) * k**-0.5
    scales[0] = 0
    return ck.QuantizedArray(codes.storage, dtype, (n, k), scales, zeros, 1, group_size)


def float8(rng, m, k):
    scales = rng.uniform(0.01, 0.02, (m, 1)).astype(np.float32)
    return ck.QuantizedArray.encode(
        random(rng, (m, k), "float32"), ck.float8_e4m3, scales=scales, axis=1
    )


def check(device, x, weight, bias):
    packed = pack_weight(weight.to_device("gpu") if device == "gpu" else weight)
    check_against_reference(
        lambda x, bias: quantized_linear(x, packed, bias),
        lambda x, bias: reference.quantized_linear(x, weight, bias),
        (x, bias),
        device=device,
    )


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("m", "dtype"), [(3, "bfloat16"), (21, "float16")])
def test_matches_reference(device, rng, form, m, dtype):
    """Ragged on every axis: rows of a second block, columns of a second step."""
    n, k = 70, 196
    weight = quantized(rng, n, k, form)
    check(device, random(rng, (m, k), dtype), weight, random(rng, (n,), dtype))


@pytest.mark.parametrize("form", ["int4 g128", "int8 rows"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (129, 37)])
def test_odd_extents(device, rng, form, n, k):
    weight = quantized(rng, n, k, form)
    check(device, random(rng, (2, 3, k), "float16"), weight, None)


@pytest.mark.parametrize("form", FLOAT8_FORMATS)
def test_float8(device, rng, form):
    m, n, k = 70, 136, 208
    weight, x = quantized(rng, n, k, form), float8(rng, m, k)
    exact = x.decode().astype(np.float64) @ weight.decode().astype(np.float64).T
    if device == "gpu":
        weight, x = weight.to_device("gpu"), x.to_device("gpu")
    packed = pack_weight(weight, x_dtype=ck.float8_e4m3)
    out = quantized_linear(x, packed, out_dtype=np.float16)
    assert_close("out", out, exact.astype(np.float16), exact)
    assert quantized_linear(x, weight).dtype == bfloat16


def test_float8_with_an_expanded_weight(device, rng, monkeypatch):
    """The whole call with the plan of many tokens, without scales of x and with a bias."""
    m, n, k = 130, 296, 400

    def plan(tokens, weight, dtype, device):
        return configure(tokens, weight, dtype, device, expanded_tiling(weight, device))

    if device == "emulator" or (device == "gpu" and current_device().arch == HOPPER.arch):
        monkeypatch.setattr("cukit.gemm.quantized.weight_only.plan_weight_only", plan)
    weight, bias = quantized(rng, n, k, "int4 g128 zero points"), random(rng, (n,), "float16")
    x = ck.QuantizedArray.encode(random(rng, (m, k), "float32"), ck.float8_e4m3)
    exact = x.decode().astype(np.float64) @ weight.decode().astype(np.float64).T
    exact += bias.astype(np.float64)
    if device == "gpu":
        weight, x = weight.to_device("gpu"), x.to_device("gpu")
    (placed,) = to_device(device, bias)
    out = quantized_linear(x, weight, placed, out_dtype=np.float16)
    assert_close("out", out, exact.astype(np.float16), exact)


@pytest.mark.parametrize("scales", [None, "tensor"])
def test_float8_without_scales_for_each_row(device, rng, scales):
    m, n, k = 5, 136, 208
    weight, values = quantized(rng, n, k, "int4 g128"), random(rng, (m, k), "float32")
    factors = None if scales is None else np.full((1, 1), 0.015, np.float32)
    x = ck.QuantizedArray.encode(values, ck.float8_e4m3, scales=factors)
    exact = x.decode().astype(np.float64) @ weight.decode().astype(np.float64).T
    if device == "gpu":
        weight, x = weight.to_device("gpu"), x.to_device("gpu")
    out = quantized_linear(x, weight, out_dtype=np.float16)
    assert_close("out", out, exact.astype(np.float16), exact)


def test_scales_of_float8_must_be_contiguous(device, rng):
    if device == "cpu":
        pytest.skip("a requirement of the kernels")
    x, (scales,) = float8(rng, 3, 128), to_device(device, np.ones((6, 1), np.float32))
    (storage,) = to_device(device, x.storage)
    x = ck.QuantizedArray(storage, x.dtype, x.shape, scales[::2], axis=1)
    weight = plain().to_device("gpu") if device == "gpu" else plain()
    with pytest.raises(ArrayLayoutError, match="the scales of x must be C-contiguous"):
        quantized_linear(x, weight)


HOPPER = typical_device("sm_90")

# format, tokens of x, tiling. In a grid of four blocks, each block processes whole tiles, then its
# share of the k steps of the remaining tiles.
TILINGS = {
    "16 tokens, four consumers": ("int4 g128", 37, partial(hopper_tiling, 16, 4)),
    "64 tokens": ("int4 g64 zero points", 150, partial(hopper_tiling, 64, 2)),
    "96 tokens, scaled codes": (
        "int4 g32 zero points",
        230,
        partial(hopper_tiling, 96, 2, fold=True),
    ),
    "128 tokens, int8": ("int8 rows", 300, partial(hopper_tiling, 128, 2)),
    "64 tokens, float8": ("float8 g64", 110, partial(hopper_tiling, 64, 2)),
    "192 tokens, float8": ("float8", 330, partial(hopper_tiling, 192, 2)),
    "mma.sync": ("int4 g128 zero points", 70, partial(sm80_tiling, 32)),
    "mma.sync, small groups": ("int4 g32 zero points", 70, partial(sm80_tiling, 32)),
}
# The blocks of a cluster divide the k steps of a tile.
SPLITS = {
    "16 tokens": ("int4 g128", 9, partial(hopper_tiling, 16, 2, splits=2)),
    "144 tokens, scaled codes": (
        "int4 g64 zero points",
        140,
        partial(hopper_tiling, 144, 2, fold=True, splits=2),
    ),
    "128 tokens, float8": ("float8", 200, partial(hopper_tiling, 128, 2, splits=2)),
}
# The weight is expanded to float8 first.
EXPANDED = {
    "128 tokens": ("float8", 330, expanded_tiling),
    "64 tokens": ("float8", 200, partial(expanded_tiling, tokens=64)),
    "without zero points": ("float8 plain", 200, expanded_tiling),
}
FLOAT8_OF = {
    "float8 plain": "int4 g128",
    "float8": "int4 g128 zero points",
    "float8 g64": "int4 g64 zero points",
}


@pytest.mark.parametrize("name", TILINGS)
def test_pieces_of_tiles(device, rng, name):
    """Few blocks and stages: each block processes whole tiles, then pieces of tiles along k."""
    check_tiling(device, rng, *TILINGS[name], in_pieces=True)


@pytest.mark.parametrize("name", SPLITS)
def test_split_tiles(device, rng, name):
    check_tiling(device, rng, *SPLITS[name], in_pieces=False)


@pytest.mark.parametrize("name", EXPANDED)
def test_expanded_weight(device, rng, name):
    check_tiling(device, rng, *EXPANDED[name], in_pieces=False)


def test_expanded_weights_in_turn(device, rng):
    """The workspace still holds another weight's codes, which a copy must not read."""
    if device == "cpu" or (device == "gpu" and current_device().arch != HOPPER.arch):
        pytest.skip("the CPU has no such kernels")
    m, n, k, turns = (2048, 1000, 4096, 40) if device == "gpu" else (130, 200, 272, 3)
    weights, x = [quantized(rng, n, k, "int4 g128 zero points") for _ in "ab"], float8(rng, m, k)
    values = x.decode().astype(np.float64)
    exact = [values @ weight.decode().astype(np.float64).T for weight in weights]
    if device == "gpu":
        weights, x = [weight.to_device("gpu") for weight in weights], x.to_device("gpu")
    packed = [pack_weight(weight, x_dtype=ck.float8_e4m3) for weight in weights]
    description = packed[0].description
    used = current_device() if device == "gpu" else dataclasses.replace(HOPPER, num_sms=2)
    config = configure(m, description, "float16", used, expanded_tiling(description, HOPPER))
    launch, first = ExpandedLaunch(config, m, 1), {}
    for turn in range(turns):
        each = turn % 2
        out = poisoned(device, (m, n), "float16")
        with another_order(device, turn):
            launch(x.storage, x.scales, *packed[each].arrays, None, out)
        if turn == each:
            assert_close("out", out, exact[each].astype(np.float16), exact[each])
        assert to_host(out).tobytes() == first.setdefault(each, to_host(out).tobytes())


def check_tiling(device, rng, form, m, tiling_for, *, in_pieces):
    """Runs a ragged product twice, in different thread orders, into poisoned memory."""
    if device == "cpu" or (device == "gpu" and current_device().arch != HOPPER.arch):
        pytest.skip("the CPU has no such kernels")
    n, k = 328, 720
    if form in FLOAT8_OF:
        weight, x = quantized(rng, n, k, FLOAT8_OF[form]), float8(rng, m, k)
        values, x_dtype = x.decode(), ck.float8_e4m3
    else:
        weight, x = quantized(rng, n, k, form), random(rng, (m, k), "float16")
        values, x_dtype = x, None
    exact = values.astype(np.float64) @ weight.decode().astype(np.float64).T
    if device == "gpu":
        weight, x = weight.to_device("gpu"), (x if x_dtype is None else x.to_device("gpu"))
    packed = pack_weight(weight, x_dtype=x_dtype)
    x, token_scales = (x, None) if x_dtype is None else (x.storage, x.scales)
    (x,) = to_device(device, x)
    tiling = tiling_for(packed.description, HOPPER, stages=3)
    few = dataclasses.replace(HOPPER, num_sms=4 // tiling.blocks_per_sm)
    config = configure(m, packed.description, "float16", few, tiling, share=in_pieces)
    assert not in_pieces or (config.whole_tiles >= config.num_blocks and config.shared_tiles)
    launch = ExpandedLaunch if tiling.kernel == "expanded" else WeightOnlyLaunch
    launch = launch(config, m, int(token_scales is not None))
    first = None
    for repeat in range(2):
        out = poisoned(device, (m, n), "float16")
        with another_order(device, repeat):
            launch(x, token_scales, *packed.arrays, None, out)
        assert_close("out", out, exact.astype(np.float16), exact)
        assert first is None or to_host(out).tobytes() == first.tobytes()
        first = to_host(out)


@pytest.mark.parametrize("form", ["int4 g128", "int4 g64 zero points", "int8 rows"])
@pytest.mark.parametrize(("strips", "warps"), [(2, 4), (1, 8)])
def test_few_tokens(device, rng, form, strips, warps):
    """The first warp has two or three k steps, of which the last is partial; rows are in two pairs
    of packed blocks."""
    if device == "cpu":
        pytest.skip("the CPU has no such kernels")
    m, n, k = 5, 150, 1100
    weight, x = quantized(rng, n, k, form), random(rng, (m, k), "bfloat16")
    bias = random(rng, (n,), "bfloat16")
    packed = pack_weight(weight.to_device("gpu") if device == "gpu" else weight)
    tiling = few_tiling(strips, warps)
    config = configure(m, packed.description, "bfloat16", HOPPER, tiling)
    launch = WeightOnlyLaunch(config, m)
    out = poisoned(device, (m, n), "bfloat16")
    launch(*to_device(device, x, None), *packed.arrays, *to_device(device, bias), out)
    exact = x.astype(np.float64) @ weight.decode().astype(np.float64).T + bias.astype(np.float64)
    assert_close("out", out, exact.astype(bfloat16), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["int4 g128", "int4 g64 zero points", "int8 rows"])
def test_every_number_of_tokens(rng, form):
    weight = quantized(rng, 264, 520, form)
    packed = pack_weight(weight.to_device("gpu"))
    values = weight.decode().astype(np.float64)
    for m in range(1, 130):
        x = random(rng, (m, 520), "float16")
        out = to_host(quantized_linear(to_device("gpu", x)[0], packed)).astype(np.float64)
        exact = x.astype(np.float64) @ values.T
        assert np.abs(out - exact).mean() < 1e-3 * np.abs(exact).mean(), f"{m} tokens"


@pytest.mark.gpu
@pytest.mark.slow
def test_more_codes_than_fit_in_32_bits(rng):
    """More than 2^31 codes, and more than 2^31 results."""
    import cupy

    n, k, m = 65_664, 32_768, 33_000
    storage = cupy.arange(n * k // 2, dtype=cupy.uint32).view(cupy.uint8)[: n * k // 2]
    storage = storage.reshape(n, k // 2)
    scales = cupy.full((n, k // 128), 2**-10, cupy.float16)
    weight = ck.QuantizedArray(storage, ck.int4, (n, k), scales, axis=1, group_size=128)
    packed = pack_weight(weight)
    x = cupy.zeros((m, k), cupy.float16)
    rows = np.array([0, 1, m // 2, m - 1])
    x[rows] = to_device("gpu", random(rng, (4, k), "float16", k**-0.5))[0]
    out = quantized_linear(x, packed)
    columns = np.array([0, 1, n // 2, n - 1])
    exact = to_host(x[rows]).astype(np.float64)
    for column in columns:
        values = to_host(weight[int(column) : int(column) + 1].decode()).astype(np.float64)
        wide = exact @ values.T
        np.testing.assert_allclose(to_host(out[rows, column]), wide[:, 0], rtol=2e-3, atol=1e-3)
    assert not to_host(out[2:100]).any()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(130, 300), (5, 64)])
def test_packing_is_lossless(rng, form, n, k):
    weight = quantized(rng, n, k, form)
    back = pack_weight(weight).unpack()
    np.testing.assert_array_equal(back.storage, weight.storage)
    np.testing.assert_array_equal(back.decode(), weight.decode())
    if weight.dtype == ck.int4:
        back = pack_weight(weight, x_dtype=ck.float8_e4m3).unpack()
        np.testing.assert_array_equal(back.decode(), weight.decode())


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
def test_packing_on_the_gpu_is_the_same(rng, form):
    weight = quantized(rng, 130, 300, form)
    ours, theirs = pack_weight(weight), pack_weight(weight.to_device("gpu"))
    np.testing.assert_array_equal(to_host(theirs.blocks), ours.blocks)


def test_nonfinite_values_stay_in_their_rows(device, rng):
    weight = quantized(rng, 40, 136, "int4 g128")
    x = random(rng, (4, 136), "float16")
    x[1, 5], x[2, 130] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        exact = reference.quantized_linear(x.astype(np.float64), weight)
    if device == "gpu":
        weight = weight.to_device("gpu")
    out = to_host(quantized_linear(to_device(device, x)[0], weight)).astype(np.float64)
    assert np.isnan(out[1]).all()
    assert not np.isfinite(out[2]).any()
    np.testing.assert_allclose(out[[0, 3]], exact[[0, 3]], rtol=2e-3, atol=2e-3)


def test_a_row_of_zeros(device, rng):
    """Row 0 of the weight has scales of zero, so its results are the bias."""
    weight = quantized(rng, 16, 128, "int4 g128")
    x, bias = random(rng, (2, 128), "bfloat16"), random(rng, (16,), "bfloat16")
    if device == "gpu":
        weight = weight.to_device("gpu")
    out = poisoned(device, (2, 16), "bfloat16")
    x, placed = to_device(device, x, bias)
    assert quantized_linear(x, weight, placed, out=out) is out
    np.testing.assert_array_equal(to_host(out)[:, 0], np.repeat(bias[0], 2))


def plain(k=128, **fields):
    """An int4 weight [4, k] of zeros in groups of 32."""
    arguments = {"scales": np.ones((4, -(-k // 32)), np.float16), "axis": 1, "group_size": 32}
    return ck.QuantizedArray(np.zeros((4, k // 2), np.uint8), ck.int4, (4, k), **arguments | fields)


@pytest.mark.parametrize(
    ("weight", "options", "error", "message"),
    [
        (np.ones(3), {}, ArrayError, "must be a QuantizedArray, got ndarray"),
        (
            ck.QuantizedArray.encode(np.ones((2, 8), np.float32), ck.float8_e4m3),
            {},
            ArrayDtypeError,
            "must be int4 or int8, got float8_e4m3",
        ),
        (
            plain(scales=None, axis=None, group_size=None),
            {},
            ConfigError,
            "scales per row or per group",
        ),
        (
            plain(scales=np.ones((4, 2), np.float16), group_size=96),
            {},
            ConfigError,
            "group_size must be one of .* got 96",
        ),
        (
            plain(zero_points=np.full((4, 4), 9, np.int8)),
            {},
            ConfigError,
            "integers from -8 to 7, got 9",
        ),
        (plain(), {"x_dtype": ck.int8}, ConfigError, "x_dtype must be None or"),
    ],
)
def test_weights_that_cannot_be_packed(weight, options, error, message):
    with pytest.raises(error, match=f"pack_weight: .*{message}"):
        pack_weight(weight, **options)


X = np.ones((2, 128), np.float16)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": X[:, :120]}, ArrayShapeError, r"x must have shape \(..., 128\)"),
        ({"x": X.astype(np.int32)}, ArrayDtypeError, "x must be float32"),
        ({"weight": X}, ArrayError, "weight must be a PackedWeight"),
        ({"bias": np.ones(3, np.float16)}, ArrayShapeError, "bias must have shape"),
        ({"bias": np.ones(4, np.float32)}, ArrayDtypeError, "bias must be float16"),
        ({"out": np.ones((2, 5), np.float16)}, ArrayShapeError, "out must have shape"),
        ({"out": X.ravel()[:8].reshape(2, 4)}, ArrayLayoutError, "out overlaps x in memory"),
        ({"out_dtype": np.float32}, ArrayDtypeError, "must have the dtype of x"),
        ({"out_dtype": "no"}, ArrayDtypeError, "out_dtype must be float32"),
        (
            {"weight": pack_weight(plain(), x_dtype=ck.float8_e4m3)},
            ArrayDtypeError,
            "packed for x of float8_e4m3, got float16",
        ),
        (
            {"x": ck.QuantizedArray.encode(X.astype(np.float32), ck.int8)},
            ArrayDtypeError,
            "must be float8_e4m3, got int8",
        ),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=f"quantized_linear: .*{message}"):
        quantized_linear(**{"x": X, "weight": pack_weight(plain()), **arguments})


SQUARE = WeightDescription(ck.int4, (8192, 8192), 128, bfloat16, False)
WEIGHTS = [
    WeightDescription(ck.int4, (28672, 8192), 128, bfloat16, False),
    WeightDescription(ck.int4, (4096, 4096), 32, np.dtype(np.float32), True),
    WeightDescription(ck.int8, (8192, 28672), None, bfloat16, False),
]


@pytest.mark.parametrize("arch", TYPICAL_DEVICES)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_plans_fit_the_device(arch, weight):
    device = TYPICAL_DEVICES[arch]
    for tokens in (1, 17, 64, 65, 129, 1000, 8192):
        config = plan_weight_only(tokens, weight, "bfloat16", device)
        assert config.tiling.num_stages >= 2 or config.tiling.kernel == "few"
        assert config.tiling.shared_bytes(weight) <= device.shared_bytes_per_block
        tiles = config.whole_tiles + config.shared_tiles
        assert tiles * config.tiling.rows * config.tiling.tokens >= weight.shape[0] * tokens
        if config.shared_tiles:
            assert config.whole_tiles % config.num_blocks == 0
            assert config.shared_tiles * weight.steps >= config.num_blocks


def test_many_float8_tokens_expand_the_weight():
    """As measured at 8192 x 8192, where expanding is faster at 2048 tokens and slower at 1024."""
    weight = SQUARE._replace(float8=True, has_zero_points=True)

    def kernel(tokens, **changes):
        return plan_weight_only(
            tokens, weight._replace(**changes), "bfloat16", HOPPER
        ).tiling.kernel

    assert [kernel(tokens) for tokens in (256, 512, 1024)] == ["sm90"] * 3
    assert [kernel(tokens) for tokens in (2048, 4096, 8192)] == ["expanded"] * 3
    for other in ({"group_size": 64}, {"shape": (8188, 8192)}):
        assert kernel(4096, **other) == "sm90"
    config = plan_weight_only(4096, weight, "bfloat16", HOPPER)
    assert config.tiling.num_stages == 4
    assert config.expanded_bytes == 8192 * 8192 * 33 // 32


def test_few_tokens_keep_all_multiprocessors_busy():
    """Two blocks per tile if the tiles occupy at most half of the SMs, otherwise stream-K."""
    for tokens in (16, 64, 128):
        config = plan_weight_only(tokens, SQUARE, "bfloat16", HOPPER)
        assert config.tiling.splits == 2
        assert config.num_blocks == 128
    config = plan_weight_only(16, WEIGHTS[0], "bfloat16", HOPPER)
    assert config.num_blocks == HOPPER.num_sms
    assert config.shared_tiles
