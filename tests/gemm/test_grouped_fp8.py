"""Grouped products of FP8 codes with block scales: groups of any size, tilings, errors."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import cukit as ck
from cukit.core.device import KIB, TYPICAL_DEVICES
from cukit.errors import ArrayDtypeError, ArrayShapeError, ConfigError
from cukit.gemm import grouped_gemm_fp8
from cukit.gemm.grouped.grouped_fp8 import (
    TILINGS,
    GroupedFp8Launch,
    configure,
    plan_grouped_fp8,
)
from cukit.reference import grouped_gemm as reference
from tests.contract import another_order, assert_close, poisoned, to_device, to_host
from tests.gemm.test_grouped import GROUPS, Groups
from tests.quick_run import possible

LARGE = {"large": [1000, 2048, 0, 513, 128, 1, 300]}


def codes(rng, shape, axis, scales_shape):
    """A QuantizedArray of random codes and scales, on the host."""
    values = rng.standard_normal(shape, np.float32)
    scales = rng.uniform(0.5, 2, scales_shape).astype(np.float32)
    return ck.QuantizedArray.encode(
        values, ck.float8_e4m3, scales=scales, axis=axis, group_size=128
    )


def placed(device, array):
    """The same array on the device."""
    storage, scales = to_device(device, array.storage, array.scales)
    return replace(array, storage=storage, scales=scales)


def operands(rng, groups, n, k):
    steps = -(-k // 128)
    x = codes(rng, (*groups.lead, k), -1, (*groups.lead, steps))
    count = len(groups.counts)
    weights = codes(rng, (count, n, k), (1, 2), (count, -(-n // 128), steps))
    return x, weights


def expected(x, weights, groups):
    return reference.grouped_gemm_fp8(x, weights, **groups.where("cpu"), out_dtype=np.float64)


@pytest.mark.parametrize("counts", GROUPS | LARGE)
@pytest.mark.parametrize("fixed_capacity", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@possible(lambda device, counts: device == "gpu" or counts in GROUPS)
def test_matches_reference(device, rng, counts, fixed_capacity, dtype):
    """k is not a multiple of a scale block, n not of a tile."""
    n, k = (136, 208) if counts in GROUPS else (520, 912)
    groups = Groups(rng, (GROUPS | LARGE)[counts], fixed_capacity, 8, "float16")
    x, weights = operands(rng, groups, n, k)
    out = poisoned(device, (*groups.lead, n), dtype)
    bits = None
    for repeat in range(2):
        with another_order(device, repeat):
            y = grouped_gemm_fp8(
                placed(device, x), placed(device, weights), **groups.where(device), out=out
            )
        assert y is out
        assert bits in (None, to_host(y).tobytes())
        bits = to_host(y).tobytes()
    wide = expected(x, weights, groups)
    got = to_host(y)
    if device != "cpu":
        assert np.isnan(got[~groups.used].astype(np.float32)).all(), "outside all groups"
    used = groups.used
    assert_close("y", got[used], wide[used].astype(got.dtype), wide[used])


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_tiling(device, rng, tiling):
    """A grid of two blocks processes all tiles; the widest tiles span two scale blocks."""
    if device == "cpu":
        pytest.skip("the CPU has no such kernels")
    n, k = 328, 272
    groups = Groups(rng, [150, 0, 1, 77], False, 8, "float16")
    x, weights = operands(rng, groups, n, k)
    config = replace(configure(groups.lead[0], 4, n, "bfloat16", tiling, 132), num_blocks=2)
    out = poisoned(device, (*groups.lead, n), "bfloat16")
    own, matrices = placed(device, x), placed(device, weights)
    (ends,) = to_device(device, groups.offsets)
    launch = GroupedFp8Launch(config, groups.layout, n, k)
    launch(own.storage, matrices.storage, out, own.scales, matrices.scales, ends)
    wide = expected(x, weights, groups)[groups.used]
    assert_close("y", to_host(out)[groups.used], wide.astype(ml_dtypes.bfloat16), wide)


X = ck.QuantizedArray.encode(
    np.ones((4, 16), np.float32),
    ck.float8_e4m3,
    scales=np.ones((4, 1), np.float32),
    axis=1,
    group_size=128,
)
WEIGHTS = ck.QuantizedArray.encode(
    np.ones((2, 8, 16), np.float32),
    ck.float8_e4m3,
    scales=np.ones((2, 1, 1), np.float32),
    axis=(1, 2),
    group_size=128,
)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": np.ones((4, 16))}, ArrayDtypeError, "x must be a QuantizedArray"),
        ({"expert_offsets": None}, ConfigError, "either expert_offsets or expert_counts"),
        ({"weights": X}, ArrayShapeError, "weights has shape"),
        ({"out_dtype": np.float32}, ArrayDtypeError, "out_dtype must be bfloat16, float16"),
        (
            {"x": ck.QuantizedArray.encode(np.ones((4, 16), np.float32), ck.float8_e4m3)},
            ConfigError,
            r"scales of x must be for blocks of \(1, 128\), got None",
        ),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    call = {"x": X, "weights": WEIGHTS, "expert_offsets": np.array([0, 1, 4], np.int32)}
    with pytest.raises(error, match=f"grouped_gemm_fp8: .*{message}"):
        grouped_gemm_fp8(**call | arguments)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_tilings_fit_hopper(tiling):
    hopper = TYPICAL_DEVICES["sm_90"]
    config = configure(32768, 8, 7168, "bfloat16", tiling, hopper.num_sms)
    blocks = tiling.blocks_per_sm
    assert blocks * (config.spec().shared_bytes + 4 * KIB) <= hopper.shared_bytes_per_sm
    assert config.num_stages >= 3


@pytest.mark.parametrize(
    ("rows", "groups", "n", "k", "tile"),
    [
        (32768, 4, 6144, 7168, "128x192"),
        (32768, 8, 7168, 3072, "128x192"),
        (8000, 32, 6144, 7168, "128x192"),
        (128, 64, 4096, 7168, "64x128"),
    ],
)
def test_the_plan(rows, groups, n, k, tile):
    assert str(plan_grouped_fp8(rows, groups, n, k, "bfloat16", 132).tiling) == tile
