"""matmul_fp8: per-tensor, per-row and block scales, error bounds, special values."""

from __future__ import annotations

import numpy as np
import pytest

import cukit
from cukit.errors import ArrayDtypeError, ConfigError
from cukit.gemm import matmul_fp8
from cukit.gemm.quantized._matmul_8bit_launch import Matmul8BitSm90
from cukit.gemm.quantized._matmul_8bit_plan import (
    Product8Bit,
    Tiling8Bit,
    configure,
    plan_matmul_8bit_sm90,
)
from cukit.reference import gemm_8bit as reference
from tests.contract import another_order, poisoned, to_device, to_host
from tests.gemm.quantized_operands import absolute_product, float8_operand, place

KINDS = {
    "none": (None, None),
    "tensor": ("tensor", "tensor"),
    "row": ("row", "row"),
    "blocks": ("columns", "blocks"),
}

# Hopper's tensor cores keep 14 bits of the largest addend; a k step is four wgmmas of 32.
SUM_ERROR = 2.0**-10


def operands(rng, m, n, k, kind):
    left, right = KINDS[kind]
    return float8_operand(rng, m, k, scales=left), float8_operand(rng, n, k, scales=right)


def check(out, a, b, sum_error=SUM_ERROR, bias=0.0):
    """Each element is within its error bound; the Dice similarity to float64 is above 0.999."""
    exact = reference.matmul_fp8(a, b, out_dtype=np.float64) + bias
    result = to_host(out).astype(np.float64)
    rounding = float(np.finfo(np.float32).eps if out.dtype == np.float32 else 2.0**-8)
    bound = sum_error * absolute_product(a, b) + rounding * np.abs(exact) + 1e-30
    worst = np.unravel_index((np.abs(result - exact) / bound).argmax(), exact.shape)
    assert abs(result[worst] - exact[worst]) <= bound[worst], (worst, result[worst], exact[worst])
    if exact.any():
        similarity = 2 * (result * exact).sum() / ((result**2).sum() + (exact**2).sum())
        assert 1 - similarity < 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n", "k"), [(65, 41, 200), (130, 264, 1040)])
def test_matches_reference(device, rng, m, n, k, kind):
    a, b = operands(rng, m, n, k, kind)
    out = poisoned(device, (m, n), "bfloat16")
    assert matmul_fp8(*place(device, a, b), out=out) is out
    check(out, a, b)


def test_bias_and_float32(device, rng):
    a, b = operands(rng, 33, 72, 256, "blocks")
    bias = rng.standard_normal(72).astype(np.float32)
    given = to_device(device, bias)[0]
    out = matmul_fp8(*place(device, a, b), bias=given, out_dtype=np.float32)
    assert out.dtype == np.float32
    check(out, a, b, bias=bias)


def test_row_major_scales_are_copied(device, rng):
    a, b = operands(rng, 33, 72, 300, "blocks")
    rows = cukit.QuantizedArray(
        a.storage, a.dtype, a.shape, np.ascontiguousarray(a.scales), None, 1, 128
    )
    outs = [to_host(matmul_fp8(*place(device, left, b))) for left in (a, rows)]
    np.testing.assert_array_equal(outs[0].view(np.uint16), outs[1].view(np.uint16))


def test_fast_accumulation(device, rng):
    """Terms of one sign, the worst case for tensor cores: every product is truncated at the 14th
    bit of the running sum, with a mean error of half that bit."""
    k = 1024
    a, b = operands(rng, 64, 128, k, "row")
    a.storage[...] &= 0x7F
    b.storage[...] &= 0x7F
    placed = place(device, a, b)
    check(matmul_fp8(*placed), a, b)
    check(matmul_fp8(*placed, fast_accumulation=True), a, b, sum_error=k * 2.0**-14)


@pytest.mark.parametrize("arch", ["sm_89"])
@pytest.mark.parametrize("kind", ["row", "blocks"])
def test_other_architectures(rng, arch, kind):
    a, b = operands(rng, 70, 41, 333, kind)
    with cukit.backend("emulator", arch=arch):
        check(matmul_fp8(a, b), a, b)


WIDE = [Tiling8Bit(256, 128), Tiling8Bit(128, 192), Tiling8Bit(128, 176)]
TILINGS = [
    Tiling8Bit(64, 48, splits=2),
    Tiling8Bit(128, 112),
    WIDE[-1],
    *(pytest.param(tiling, marks=pytest.mark.slow) for tiling in (*WIDE[:-1], Tiling8Bit(64, 128))),
]


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("kind", ["blocks", pytest.param("row", marks=pytest.mark.slow)])
def test_every_kind_of_tiling(device, rng, tiling, kind):
    """The grid is planned for one SM, so without split-k a block processes several tiles. k has 35
    steps; tiles of some tilings start inside a scale block."""
    if device == "cpu":
        pytest.skip("the CPU has no tilings")
    m, n, k = 200, 328, 35 * 128 - 16
    a, b = operands(rng, m, n, k, kind)
    out = poisoned(device, (m, n), "bfloat16")
    product = Product8Bit("Float8E4M3", "bfloat16", promoted=True, blocks=kind == "blocks")
    launch = Matmul8BitSm90(configure(product, tiling, m, n, 1), m, n, k, 1, 1)
    left, right = place(device, a, b)
    results = []
    for repeat in range(2):
        with another_order(device, repeat):
            launch(left.storage, right.storage, out, left.scales, right.scales)
        results.append(to_host(out).tobytes())
    assert results[0] == results[1]
    check(out, a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["row", "blocks"])
def test_every_number_of_rows(rng, kind):
    """All row counts from 1 to 129, with aligned and unaligned k."""
    for k in (256, 1037):
        for m in range(1, 130):
            a, b = operands(rng, m, 520, k, kind)
            check(matmul_fp8(*place("gpu", a, b)), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tensor", "blocks"])
@pytest.mark.parametrize(("m", "n", "k"), [(1000, 2112, 7168), (4096, 1024, 520)])
def test_large(rng, kind, m, n, k):
    a, b = operands(rng, m, n, k, kind)
    check(matmul_fp8(*place("gpu", a, b)), a, b)


def test_special_values(device, rng):
    """NaN codes and scales make all results that use them NaN; zero scales and rows give 0."""
    a, b = operands(rng, 8, 144, 256, "blocks")
    a.storage[1, 7] = 0x7F  # NaN
    a.scales[2, 1] = np.nan
    a.scales[3] = 0.0
    a.storage[4] = 0
    b.scales[1, 0] = np.inf  # of columns 128 and up
    out = to_host(matmul_fp8(*place(device, a, b), out_dtype=np.float32))
    assert np.isnan(out[1:3]).all()
    assert (out[3:5, :128] == 0).all()
    assert np.isfinite(out[[0, 5, 6, 7], :128]).all()
    assert not np.isfinite(out[:, 128:]).any()


def test_results_beyond_the_range_are_infinite(device):
    codes = np.full((2, 256), 0x7E, np.uint8)  # 448
    a = cukit.QuantizedArray(codes, cukit.float8_e4m3, codes.shape)
    (placed,) = place(device, a)
    assert np.isposinf(to_host(matmul_fp8(placed, placed, out_dtype=np.float16))).all()
    assert (to_host(matmul_fp8(placed, placed, out_dtype=np.float32)) == 256 * 448**2).all()


RNG = np.random.default_rng(0)
A, B = operands(RNG, 3, 200, 384, "blocks")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"a": A.storage}, ArrayDtypeError, "a must be a QuantizedArray of float8_e4m3"),
        ({"b": float8_operand(RNG, 4, 384, scales="row")}, ConfigError, "blocks of .1, 128. of a"),
        ({"fast_accumulation": True}, ConfigError, "fast_accumulation needs scales per tensor"),
        ({"bias": np.ones(200, np.float32)}, ArrayDtypeError, "bias must be bfloat16"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=f"matmul_fp8: .*{message}"):
        matmul_fp8(**{"a": A, "b": B, **arguments})


@pytest.mark.parametrize("m", [64, 128, 4096])
@pytest.mark.parametrize(
    ("n", "k"), [(2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168)]
)
def test_the_plan(m, n, k):
    """Enough stages to hide a load, and most SMs busy."""
    product = Product8Bit("Float8E4M3", "bfloat16", promoted=True, blocks=True)
    config = plan_matmul_8bit_sm90(product, m, n, k, 132)
    assert config.num_stages >= 3
    assert config.num_blocks >= 0.65 * 132
    if m == 4096:  # the fastest measured tilings
        assert str(config.tiling) == ("128x176" if n == 2112 else "256x128")


@pytest.mark.parametrize("size", [4096, 8192])
@pytest.mark.parametrize(("promoted", "tile"), [(False, "128x256"), (True, "256x128")])
def test_the_plan_of_squares(size, promoted, tile):
    product = Product8Bit("Float8E4M3", "bfloat16", promoted)
    assert str(plan_matmul_8bit_sm90(product, size, size, size, 132).tiling) == tile
