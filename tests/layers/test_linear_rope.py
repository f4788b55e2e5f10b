"""linear_rope: as one fused kernel, as a product followed by rope, errors."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import cukit
from cukit.errors import ArrayShapeError, ConfigError
from cukit.gemm.dense._linear_plan import Product, configure, plan_sm90
from cukit.gemm.dense.fused_rope import TILINGS, FusedLinearRope, prefers_fused
from cukit.layers.linear_rope import linear_rope
from cukit.reference import gemm as reference
from cukit.reference.rope import rope
from tests.contract import (
    another_order,
    assert_close,
    check_against_reference,
    poisoned,
    random,
    to_device,
    to_host,
)


def tables(rng, positions, head_dim):
    angles = rng.uniform(0, 6, (positions, head_dim // 2))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@pytest.mark.parametrize(
    ("rows", "positions", "heads", "rotated", "head_dim", "k"),
    [
        (260, 130, 6, 4, 64, 72),
        (130, 130, 3, 2, 128, 136),
        (6, 3, 5, 5, 64, 64),
        (10, 5, 3, 2, 32, 40),
        (4, 4, 3, 0, 16, 8),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matches_the_reference(device, rng, rows, positions, heads, rotated, head_dim, k, dtype):
    x, w = random(rng, (rows, k), dtype), random(rng, (heads * head_dim, k), dtype, scale=k**-0.5)
    check_against_reference(
        partial(linear_rope, rotated_heads=rotated),
        partial(reference.linear_rope, rotated_heads=rotated),
        (x, w, *tables(rng, positions, head_dim)),
        device=device,
    )


@pytest.mark.emulator
def test_without_the_fused_kernel(rng):
    x, w = random(rng, (260, 72), "bfloat16"), random(rng, (384, 72), "bfloat16", scale=0.1)
    inputs = x, w, *tables(rng, 130, 64)
    with cukit.backend("emulator", arch="sm_80"):
        got = linear_rope(*inputs, 4)
    wide = reference.linear_rope(*(each.astype(np.float64) for each in inputs), 4)
    assert_close("y", got, reference.linear_rope(*inputs, 4), wide)


@pytest.mark.emulator
def test_tables_at_any_address(rng):
    x, w = random(rng, (128, 64), "bfloat16"), random(rng, (256, 64), "bfloat16", scale=0.1)
    cos, sin = tables(rng, 64, 64)
    shifted = np.empty(cos.size + 1, np.float32)[1:].reshape(cos.shape)
    shifted[:] = cos
    assert shifted.ctypes.data % 8
    with cukit.backend("emulator", arch="sm_90"):
        got = linear_rope(x, w, shifted, sin, 2)
    inputs = x, w, cos, sin
    wide = reference.linear_rope(*(each.astype(np.float64) for each in inputs), 2)
    assert_close("y", got, reference.linear_rope(*inputs, 2), wide)


@pytest.mark.parametrize("num_sms", [1, 3])
@pytest.mark.parametrize("head_dim", TILINGS)
def test_the_fused_kernel(device, rng, head_dim, num_sms):
    if device == "cpu":
        pytest.skip("the CPU has no such kernels")
    check_fused(device, rng, head_dim, num_sms)


def check_fused(device, rng, head_dim, num_sms):
    """Thread blocks of several tiles; tiles with and without rotated heads; a ragged last tile."""
    rows, positions, heads, rotated, k = 300, 150, 7, 5, 136
    x, w = random(rng, (rows, k), "bfloat16"), random(rng, (heads * head_dim, k), "bfloat16")
    cos, sin = tables(rng, positions, head_dim)
    product = Product(rows, heads * head_dim, k, "bfloat16")
    config = configure(product, TILINGS[head_dim], num_sms)
    y = poisoned(device, (rows, heads * head_dim), "bfloat16")
    placed_x, placed_w, *placed = to_device(device, x, w, cos, sin)
    for repeat in range(2):
        with another_order(device, repeat):
            FusedLinearRope(config, positions, head_dim, rotated)(placed_x, placed_w, y, *placed)
        wide = (each.astype(np.float64) for each in (x, w, cos, sin))
        assert_close(
            "y", to_host(y), reference.linear_rope(x, w, cos, sin, rotated),
            reference.linear_rope(*wide, rotated),
        )  # fmt: skip


def test_the_reference_equals_a_product_and_rope(rng):
    x, w = rng.standard_normal((2, 5, 12)), rng.standard_normal((6 * 8, 12))
    cos, sin = tables(rng, 5, 8)
    y = (x @ w.T).reshape(2, 5, 6, 8)
    q, k = rope(y[:, :, :3], y[:, :, 3:5], cos, sin)
    want = np.concatenate([q, k, y[:, :, 5:]], axis=2).reshape(2, 5, 48)
    np.testing.assert_allclose(linear_rope(x, w, cos, sin, 5), want, atol=1e-6)


def test_every_tiling_fits() -> None:
    for head_dim, tiling in TILINGS.items():
        assert tiling.tile_n % head_dim == 0
        assert tiling.num_stages(Product(0, 0, 0, "bfloat16")) >= 3


@pytest.mark.parametrize(
    ("rows", "heads", "rotated", "head_dim", "k", "fused"),
    [(65536, 36, 24, 64, 768, True), (8192, 48, 40, 128, 4096, False), (260, 6, 4, 64, 72, True)],
)
def test_the_fused_kernel_is_used_where_it_is_faster(rows, heads, rotated, head_dim, k, fused):
    """On an H200, the first case takes 346 us fused and about 400 us separately. The second takes
    625 us fused and about 570 us separately: the cos and sin tables of wide heads leave registers
    only for a narrower tile."""
    product = Product(rows, heads * head_dim, k, "bfloat16")
    plan = plan_sm90(product, 132)
    assert prefers_fused(product, plan, TILINGS[head_dim], rotated * head_dim) == fused


def test_empty_products(device, rng):
    cos, sin = to_device(device, *tables(rng, 3, 8))
    for rows, k, width in ((3, 0, 32), (3, 16, 0), (0, 16, 32)):
        x, w = (random(rng, shape, "float16") for shape in ((rows, k), (width, k)))
        y = to_host(linear_rope(*to_device(device, x, w), cos, sin, min(1, width)))
        np.testing.assert_array_equal(y, np.zeros((rows, width), np.float16), strict=True)


def test_errors_name_the_argument(rng):
    x, w = np.ones((6, 8), np.float32), np.ones((32, 8), np.float32)
    cos, sin = tables(rng, 4, 16)
    with pytest.raises(ArrayShapeError, match=r"cos must be \[positions, head_dim / 2\]"):
        linear_rope(x, w, cos, sin, 1)
    with pytest.raises(ArrayShapeError, match="sin must have shape"):
        linear_rope(x, w, cos[:3], sin, 1)
    with pytest.raises(ConfigError, match=r"rotated_heads must be .* at most 2, got 3"):
        linear_rope(x, w, cos[:3].copy(), sin[:3].copy(), 3)
