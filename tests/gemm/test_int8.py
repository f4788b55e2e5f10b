"""matmul_int8: exact accumulation, scales and zero points, tilings, plans, errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import cukit
from cukit.core.device import KIB, TYPICAL_DEVICES
from cukit.core.narrow_dtype import int8
from cukit.core.quantized_array import QuantizedArray
from cukit.errors import ArrayDtypeError, ArrayShapeError, ConfigError
from cukit.gemm import matmul_int8
from cukit.gemm.quantized._matmul_8bit_launch import Matmul8BitSm90
from cukit.gemm.quantized._matmul_8bit_plan import (
    Product8Bit,
    Tiling8Bit,
    candidates,
    configure,
    plan_matmul_8bit_sm80,
    plan_matmul_8bit_sm90,
)
from cukit.reference import gemm_8bit as reference
from tests.contract import BFLOAT16, another_order, assert_close, poisoned, to_device, to_host
from tests.gemm.quantized_operands import int8_operand, place

# (m, n, k): one element; extents that no tile divides; several tiles, partial at the edges.
SHAPES = [(1, 1, 1), (65, 41, 200), (130, 136, 1040)]


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_sums_are_exact(device, rng, m, n, k):
    a, b = (int8_operand(rng, rows, k, scales=None) for rows in (m, n))
    a.storage[0] = b.storage[0] = -128
    out = matmul_int8(*place(device, a, b))
    exact = a.storage.astype(np.int64) @ b.storage.astype(np.int64).T
    assert out.dtype == np.int32
    np.testing.assert_array_equal(to_host(out), exact)


@pytest.mark.parametrize(("m", "n", "k"), SHAPES[1:])
@pytest.mark.parametrize("scales", ["row", "tensor"])
@pytest.mark.parametrize(("dtype", "zero_points"), [("bfloat16", True), ("float32", False)])
def test_matches_reference(device, rng, m, n, k, scales, dtype, zero_points):
    a = int8_operand(rng, m, k, scales=scales, zero_points=zero_points)
    b = int8_operand(rng, n, k, scales="row")
    kind = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    bias = (rng.standard_normal(n) * 100).astype(kind)
    out = poisoned(device, (m, n), dtype)
    result = matmul_int8(*place(device, a, b), bias=to_device(device, bias)[0], out=out)
    assert result is out
    wide = reference.matmul_int8(a, b, bias=bias, out_dtype=np.float64)
    assert_close("out", out, wide.astype(kind), wide)


def test_column_sums_may_be_given(device, rng):
    a, b = int8_operand(rng, 5, 64, zero_points=True), int8_operand(rng, 24, 64)
    sums = b.storage.sum(axis=1, dtype=np.int32)
    placed = place(device, a, b)
    given = matmul_int8(*placed, column_sums=to_device(device, sums)[0])
    np.testing.assert_array_equal(to_host(given), to_host(matmul_int8(*placed)))


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_other_architectures(rng, arch):
    a, b = int8_operand(rng, 70, 333, zero_points=True), int8_operand(rng, 41, 333)
    with cukit.backend("emulator", arch=arch):
        out = matmul_int8(a, b, out_dtype=np.float32)
    wide = reference.matmul_int8(a, b, out_dtype=np.float64)
    assert_close("out", out, wide.astype(np.float32), wide)


@pytest.mark.parametrize(
    "tiling",
    [
        Tiling8Bit(128, 256),
        Tiling8Bit(256, 128),
        Tiling8Bit(128, 112),
        Tiling8Bit(64, 64, splits=4),
        Tiling8Bit(128, 64, splits=2),
    ],
    ids=str,
)
def test_every_kind_of_tiling(device, rng, tiling):
    """Planned for one SM: without split-k, blocks process several tiles. Ragged on every axis."""
    if device == "cpu":
        pytest.skip("the CPU has no tilings")
    m, n, k = 200, 328, 700
    a, b = int8_operand(rng, m, k, zero_points=True), int8_operand(rng, n, k)
    out = poisoned(device, (m, n), "bfloat16")
    config = configure(Product8Bit("Int8", "bfloat16"), tiling, m, n, 1)
    sums = b.storage.sum(axis=1, dtype=np.int32)
    left, right = place(device, a, b)
    arguments = (left.scales, right.scales, left.zero_points, *to_device(device, sums))
    launch = Matmul8BitSm90(config, m, n, k, 1, 1)
    for repeat in range(2):
        with another_order(device, repeat):
            launch(left.storage, right.storage, out, *arguments)
    wide = reference.matmul_int8(a, b, out_dtype=np.float64)
    assert_close("out", out, wide.astype(BFLOAT16), wide)


@pytest.mark.gpu
def test_every_number_of_rows(rng):
    """All row counts from 1 to 129, with aligned and unaligned k."""
    for k in (256, 1037):
        b = int8_operand(rng, 520, k)
        whole = int8_operand(rng, 129, k)
        wide = reference.matmul_int8(whole, b, out_dtype=np.float64)
        left, right = place("gpu", whole, b)
        for m in range(1, 130):
            out = matmul_int8(left[:m], right)
            assert_close(f"{m} rows", out, wide[:m].astype(BFLOAT16), wide[:m])


@pytest.mark.gpu
@pytest.mark.slow
def test_more_elements_than_fit_in_32_bits(rng):
    m, n, k = 66000, 33000, 16
    a, b = (int8_operand(rng, rows, k, scales=None) for rows in (m, n))
    out = matmul_int8(*place("gpu", a, b))
    for row in (0, m // 2, m - 1):
        exact = a.storage[row].astype(np.int64) @ b.storage.astype(np.int64).T
        np.testing.assert_array_equal(to_host(out[row]), exact)


def test_empty_results(device, rng):
    a, b = place(device, int8_operand(rng, 0, 16), int8_operand(rng, 8, 16))
    assert matmul_int8(a, b).shape == (0, 8)


def test_scales_of_zero_and_nan(device, rng):
    """A scale of 0 gives 0; a NaN scale makes only its own row NaN."""
    a, b = int8_operand(rng, 6, 32), int8_operand(rng, 16, 32)
    a.scales[1] = 0.0
    a.scales[3] = np.nan
    out = to_host(matmul_int8(*place(device, a, b), out_dtype=np.float32))
    assert (out[1] == 0).all()
    assert np.isnan(out[3]).all()
    assert np.isfinite(np.delete(out, 3, axis=0)).all()


A, B = (int8_operand(np.random.default_rng(0), rows, 16) for rows in (3, 4))
PLAIN = QuantizedArray(np.zeros((4, 16), np.int8), int8, (4, 16))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"a": A.storage}, ArrayDtypeError, "a must be a QuantizedArray of int8, got ndarray"),
        ({"b": int8_operand(np.random.default_rng(0), 4, 8)}, ArrayShapeError, "extents 16 and 8"),
        ({"b": PLAIN}, ConfigError, "both operands must have scales, or neither"),
        (
            {"a": PLAIN, "b": PLAIN, "out_dtype": np.float32},
            ArrayDtypeError,
            "out_dtype without scales must be int32",
        ),
        ({"out_dtype": np.float64}, ArrayDtypeError, "out_dtype must be bfloat16, float16"),
        ({"bias": np.ones(4, np.float32)}, ArrayDtypeError, "bias must be bfloat16"),
        ({"out": np.ones((4, 3), np.float32)}, ArrayShapeError, "out must have shape"),
        (
            {"b": replace(B, scales=np.ones((4, 2), np.float32), axis=1, group_size=8)},
            ConfigError,
            "b must have one scale per row",
        ),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=f"matmul_int8: .*{message}"):
        matmul_int8(**{"a": A, "b": B, **arguments})


@pytest.mark.parametrize("m", [1, 64, 128, 512, 8192])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (16384, 4096), (8192, 8192), (40, 72)])
def test_plans_fit_hopper(m, n, k):
    config = plan_matmul_8bit_sm90(Product8Bit("Int8", "bfloat16"), m, n, k, 132)
    blocks = config.tiling.blocks_per_sm
    hopper = TYPICAL_DEVICES["sm_90"]
    assert config.num_stages >= 3
    assert config.shared_bytes + KIB <= hopper.shared_bytes_per_block
    assert blocks * (config.shared_bytes + 2 * KIB) <= hopper.shared_bytes_per_sm
    assert 1 <= config.tiling.splits <= -(-k // 128)
    assert config.num_blocks % config.tiling.splits == 0


@pytest.mark.parametrize("num_sms", [66, 78, 132])
@pytest.mark.parametrize(("m", "n"), [(16, 4096), (128, 2112), (1, 40)])
def test_split_tilings_run_all_clusters_at_once(num_sms, m, n):
    product = Product8Bit("Int8", "bfloat16")
    splits = [each for each in candidates(product, m, n, 4096, num_sms) if each.splits > 1]
    assert splits
    for tiling in splits:
        tiles_m, tiles_n = tiling.tiles(m, n)
        assert tiles_m * tiles_n * tiling.splits <= num_sms * tiling.blocks_per_sm, tiling


def test_the_plan_of_large_products():
    config = plan_matmul_8bit_sm90(Product8Bit("Int8", "bfloat16"), 8192, 8192, 8192, 132)
    assert config.tiling.tile_m * config.tiling.tile_n >= 128 * 192
    assert config.num_blocks == 132
    ampere = plan_matmul_8bit_sm80(Product8Bit("Int8", "bfloat16"), 8192, 8192, 108)
    assert (ampere.tile_m, ampere.tile_n) == (128, 128)
