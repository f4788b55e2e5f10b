"""The product on TMA and wgmma: ragged shapes, tilings, the plan, errors."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cukit.core.device import KIB, TYPICAL_DEVICES
from cukit.errors import ArrayDtypeError, ArrayShapeError
from cukit.gemm import matmul_tma
from cukit.gemm.tma import (
    CLUSTER_TILING,
    TILINGS,
    MappedMatmul,
    MatmulTmaConfig,
    plan_matmul_tma,
)
from cukit.reference import gemm as reference
from tests.contract import (
    another_order,
    assert_close,
    check_against_reference,
    poisoned,
    random,
    to_device,
    to_host,
)

# (m, n, k): one tile, a corner of one, ragged edges on every axis, more steps than stages, no rows.
SHAPES = [(128, 128, 64), (3, 8, 8), (130, 136, 72), (64, 128, 448), (0, 8, 8)]
LARGE = [(1024, 1000, 520), (4096, 4096, 4096)]

ALL_TILINGS = (*TILINGS, CLUSTER_TILING)

transposed = partial(reference.matmul, transpose_b=True)


def name(tiling):
    return f"{tiling.tile_m}x{tiling.tile_n}-cluster{tiling.cluster}"


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matches_reference(device, rng, m, n, k, dtype):
    a, b = random(rng, (m, k), dtype), random(rng, (n, k), dtype, scale=k**-0.5)
    check_against_reference(matmul_tma, transposed, (a, b), device=device)


@pytest.mark.parametrize("tiling", ALL_TILINGS, ids=name)
@pytest.mark.parametrize(("m", "n", "k"), [(200, 600, 136), (520, 72, 328)])
def test_every_tiling(device, rng, tiling, m, n, k):
    """A grid of one block (or cluster) walks over all tiles, ragged on every axis, in groups of 2
    that do not divide them; a cluster's second block has no rows in the last."""
    if device == "cpu":
        pytest.skip("a choice of the kernel")
    a, b = random(rng, (m, k), "bfloat16"), random(rng, (n, k), "bfloat16", scale=k**-0.5)
    out = poisoned(device, (m, n), "bfloat16")
    launch = MappedMatmul(MatmulTmaConfig("bfloat16", tiling, tiling.cluster, 2), m, n, k)
    for repeat in range(2):
        with another_order(device, repeat):
            launch(*to_device(device, a, b), out)
    wide = transposed(a.astype(np.float64), b.astype(np.float64))
    assert_close("out", out, transposed(a, b), wide)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), LARGE)
def test_large(rng, m, n, k):
    a, b = random(rng, (m, k), "bfloat16"), random(rng, (n, k), "bfloat16", scale=k**-0.5)
    check_against_reference(matmul_tma, transposed, (a, b), device="gpu")


def test_out_is_filled_and_returned(device, rng):
    a, b = to_device(device, random(rng, (20, 64), "float16"), random(rng, (40, 64), "float16"))
    out = poisoned(device, (20, 40), "float16")
    assert matmul_tma(a, b, out=out) is out
    np.testing.assert_array_equal(to_host(out), to_host(matmul_tma(a, b)))


def test_errors_name_the_argument(device):
    (a,) = to_device(device, np.ones((4, 16), np.float16))
    with pytest.raises(ArrayShapeError, match=r"matmul_tma: b must have shape \(any, 16\)"):
        matmul_tma(a, a[:, :8].copy())
    with pytest.raises(ArrayDtypeError, match="b must have the dtype of a"):
        matmul_tma(a, a.astype(np.float32))


def test_strides_that_tensor_maps_cannot_have(device):
    if device == "cpu":
        pytest.skip("a rule of the kernel")
    (a,) = to_device(device, np.ones((4, 12), np.float16))
    with pytest.raises(ArrayShapeError, match="multiples of 8"):
        matmul_tma(a, a)


@pytest.mark.parametrize("tiling", ALL_TILINGS, ids=name)
def test_tilings_fit_hopper(tiling):
    assert tiling.shared_bytes + KIB <= TYPICAL_DEVICES["sm_90"].shared_bytes_per_block


@pytest.mark.parametrize(
    ("m", "n", "tile", "blocks"),
    [
        (8192, 8192, (128, 256), 132),
        (4096, 4096, (128, 256), 132),
        (128, 8192, (128, 64), 128),
        (1024, 3072, (128, 192), 128),
        (4096, 1152, (128, 192), 132),
        (1, 8, (128, 64), 1),
    ],
)
def test_the_plan(m, n, tile, blocks):
    config = plan_matmul_tma(m, n, "bfloat16", 132)
    assert (config.tiling.tile_m, config.tiling.tile_n) == tile
    assert config.num_blocks == blocks
    assert config.num_blocks % config.tiling.cluster == 0
    tiles_m, _ = config.tiling.tiles(m, n)
    assert 1 <= config.group <= tiles_m
