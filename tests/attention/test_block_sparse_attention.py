"""Attention with block masks: values, tile lists, options within the blocks, errors."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.attention import block_sparse_attention, flash_attention
from cukit.attention.flash._arguments import PARAMETERS
from cukit.attention.flash._flash_plan_sm90 import plan_flash_attention_sm90
from cukit.attention.flash._problem import AttentionProblem
from cukit.core.device import typical_device
from cukit.core.kernel import load_kernel
from cukit.core.parameters import parameter_structs
from cukit.errors import ArrayDtypeError, ArrayShapeError, ConfigError
from cukit.reference import block_sparse_attention as reference
from tests.contract import assert_close, poison_pool, poisoned, random, to_device, to_host

LSE_ATOL = 1e-5
OUT_ATOL = 2e-2  # for outputs of magnitude 1 in bfloat16, with rounded probabilities


def inputs_of(rng, lengths, heads, head_dim, size, density, mask_heads=1, batch=1):
    (seq_q, seq_kv), (heads_q, heads_kv) = lengths, heads
    q = random(rng, (batch, seq_q, heads_q, head_dim), "bfloat16")
    k, v = (random(rng, (batch, seq_kv, heads_kv, head_dim), "bfloat16") for _ in range(2))
    blocks = [-(-length // each) for length, each in zip(lengths, size, strict=True)]
    return q, k, v, rng.random((mask_heads, *blocks)) < density


def check(device, inputs, size, **options):
    q, k, v, mask = inputs
    out = poisoned(device, q.shape, "bfloat16")
    poison_pool(device)
    result, lse = block_sparse_attention(
        *to_device(device, q, k, v, mask),
        block_size=size,
        return_lse=True,
        out=out,
        **{name: _placed(device, value) for name, value in options.items()},
    )
    assert result is out
    wide = (x.astype(np.float64) for x in (q, k, v))
    exact, exact_lse = reference.block_sparse_attention(
        *wide, mask, block_size=size, return_lse=True, **options
    )
    low, low_lse = reference.block_sparse_attention(
        q, k, v, mask, block_size=size, return_lse=True, **options
    )
    assert_close("out", out, low, exact)
    assert_close("lse", lse, low_lse, exact_lse, LSE_ATOL)


def _placed(device, value):
    return to_device(device, value)[0] if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_blocks_of_128(device, rng, head_dim):
    """Tiles are unmasked or fully masked (except at head_dim 256), different for each head."""
    size = (128, 128)
    check(device, inputs_of(rng, (300, 520), (2, 1), head_dim, size, 0.4, mask_heads=2), size)


@pytest.mark.parametrize("size", [(64, 64), (40, 24), (130, 300)])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_that_do_not_fill_tiles(device, rng, size, causal):
    check(device, inputs_of(rng, (200, 310), (2, 2), 64, size, 0.5), size, causal=causal)


@pytest.mark.emulator
def test_late_completion(late_completion_emulator, rng):
    size = (128, 64)
    check(
        late_completion_emulator,
        inputs_of(rng, (300, 520), (2, 1), 128, size, 0.4),
        size,
        causal=True,
    )


@pytest.mark.emulator
def test_ampere_expands_the_mask(emulated_ampere, rng):
    """Kernels of class sm80 support per-score masks only."""
    size = (64, 40)
    check(emulated_ampere, inputs_of(rng, (150, 200), (2, 1), 64, size, 0.5), size)


def test_options_inside_the_blocks(device, rng):
    size = (64, 64)
    options = {
        "window_size": (50, 20),
        "softcap": 3.0,
        "sinks": np.array([0.5, 8.0], np.float32),
        "scale": 0.2,
    }
    check(device, inputs_of(rng, (150, 300), (2, 1), 64, size, 0.6), size, **options)


def test_a_mask_without_blocks(device, rng):
    q, k, v, mask = inputs_of(rng, (150, 200), (2, 1), 64, (64, 64), 0.0)
    out, lse = block_sparse_attention(
        *to_device(device, q, k, v, mask), block_size=64, return_lse=True
    )
    assert (to_host(out) == 0).all()
    assert np.isneginf(to_host(lse)).all()


def test_a_mask_of_all_blocks_equals_no_mask(device, rng):
    q, k, v, mask = inputs_of(rng, (150, 200), (2, 1), 64, (64, 64), 2.0)
    placed = to_device(device, q, k, v, mask[0])
    out = to_host(block_sparse_attention(*placed, block_size=64, causal=True))
    expected = to_host(flash_attention(*placed[:3], causal=True))
    np.testing.assert_allclose(
        out.astype(np.float32), expected.astype(np.float32), atol=OUT_ATOL, rtol=OUT_ATOL
    )


@pytest.mark.gpu
def test_many_tiles(rng):
    size = (128, 128)
    check("gpu", inputs_of(rng, (3000, 4100), (8, 2), 128, size, 0.2, 8, batch=2), size)


@pytest.mark.gpu
def test_reruns_are_bitwise_equal(rng):
    placed = to_device("gpu", *inputs_of(rng, (1600, 1777), (40, 8), 128, (128, 128), 0.3, batch=2))
    first: list[bytes] = []
    for _ in range(20):
        poison_pool("gpu")
        out, lse = block_sparse_attention(*placed, return_lse=True)
        bits = [to_host(x).tobytes() for x in (out, lse)]
        first = first or bits
        assert bits == first


def test_tile_lists_contain_every_visible_tile_once(device, rng):
    if device == "cpu":
        pytest.skip("a kernel writes the lists")
    problem = AttentionProblem(1, 500, 700, 3, 1, 128, "bfloat16", True)
    size = (64, 32)
    config = plan_flash_attention_sm90(problem, typical_device("sm_90"), size)
    tile_m, tile_n = config.tiling.tile_m, config.tiling.tile_n
    mask = rng.random((3, 8, 22)) < 0.1
    visible = reference.expand_blocks(mask, size, 500, 700)[0]
    visible &= np.arange(700) <= np.arange(500)[:, None] + 200
    plan = to_device(device, np.full(config.plan_size(500, 700, 3), -1, np.int32))[0]
    num_blocks = 7
    extents = (np.int32(3), np.int32(500), np.int32(700))
    scalars = (*extents, np.int32(num_blocks), _no_score_options())
    kernel = load_kernel(config.plan_spec())
    kernel((config.plan_blocks(500, 3),), (to_device(device, mask)[0], plan, *scalars))
    plan = to_host(plan)
    assert plan[0] == num_blocks
    lists = plan[1:].reshape(3, -(-500 // tile_m), 1 + -(-700 // tile_n))
    for head, tile in np.ndindex(lists.shape[:2]):
        rows = visible[head, tile * tile_m : (tile + 1) * tile_m]
        parts = [rows[:, first : first + tile_n] for first in range(0, 700, tile_n)]
        count, *entries = lists[head, tile]
        expected = [2 * i + (not part.all()) for i, part in enumerate(parts) if part.any()]
        if not expected:
            assert (count, entries[0]) == (1, 1), "one tile, fully masked"
            continue
        # A tile that the causal mask excludes completely may be listed, as a partially masked one.
        listed = entries[:count]
        assert [each // 2 for each in listed] == sorted({each // 2 for each in listed})
        assert set(expected) <= set(listed)
        assert all(each % 2 for each in set(listed) - set(expected))


def _no_score_options():
    return np.zeros(1, parameter_structs(PARAMETERS)["ScoreSettings"].dtype)


@pytest.mark.parametrize("shape", [(1, 2, 4), (3, 2, 3), (1, 1, 2, 3)])
def test_masks_of_the_wrong_shape_are_rejected(device, shape):
    q, kv = to_device(
        device, np.zeros((1, 150, 2, 64), np.float16), np.zeros((1, 250, 1, 64), np.float16)
    )
    accepted, mask = to_device(device, np.ones((2, 3), bool), np.ones(shape, bool))
    block_sparse_attention(q, kv, kv, accepted, block_size=(100, 100))
    with pytest.raises(ArrayShapeError, match=r"block_mask must be \(2, 3\)"):
        block_sparse_attention(q, kv, kv, mask, block_size=(100, 100))


def test_other_invalid_arguments_are_rejected(device):
    (q,) = to_device(device, np.zeros((1, 150, 2, 64), np.float16))
    (mask,) = to_device(device, np.ones((2, 2), np.int32))
    with pytest.raises(ArrayShapeError, match=r"^block_sparse_attention: q must have 4 axes"):
        block_sparse_attention(q[0], q, q, mask.astype(bool))
    with pytest.raises(ArrayDtypeError, match="block_mask"):
        block_sparse_attention(q, q, q, mask)
    for size in (0, (128,), (64, -1), (64, 2.5)):
        with pytest.raises(ConfigError, match="block_size"):
            block_sparse_attention(q, q, q, mask.astype(bool), block_size=size)
