"""The backward kernels of class sm90: many tiles, GQA, layouts, and which calls they support."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from cukit.attention import flash_attention, flash_attention_backward
from cukit.attention.flash import _flash_plan_sm90, flash_backward
from cukit.attention.flash._flash_plan_sm90 import covers, plan_flash_attention_backward_sm90
from cukit.attention.flash._flash_tilings import (
    LONG_KEY_TILING,
    LONG_KEY_WIDTH,
    WARPGROUP_KEY_TILINGS,
    WARPGROUP_QUERY_TILINGS,
)
from cukit.attention.flash._problem import AttentionProblem
from cukit.core.device import KIB, typical_device
from tests.attention.checks import check_backward, inputs_of
from tests.contract import poison_pool, to_device, to_host

H200 = typical_device("sm_90")
PROBLEM = AttentionProblem(4, 4096, 4096, 32, 8, 128, "bfloat16", True)
WIDTHS = list(WARPGROUP_KEY_TILINGS)
STATIC_BYTES = 3 * KIB  # barriers, stages of lse and delta


@pytest.fixture
def long_tiles(monkeypatch) -> Iterator[None]:
    """Long query tiles for all lengths; clears the cached plans before and after."""
    monkeypatch.setattr(_flash_plan_sm90, "_LONG_QUERY_TILE_MIN_QUERIES", 0)
    flash_backward._prepare_backward.forget()
    yield
    flash_backward._prepare_backward.forget()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", WIDTHS)
def test_many_tiles_both_ways(device, rng, head_dim, causal):
    """Pipelines that wrap around, dS exchanged repeatedly, query tiles in cyclic order."""
    check_backward(device, *inputs_of(rng, (270, 150), (1, 1), head_dim), {"causal": causal})


@pytest.mark.parametrize("deterministic", [False, True])
def test_long_tiles_of_queries_with_a_causal_mask(device, rng, long_tiles, deterministic):
    check_backward(
        device, *inputs_of(rng, (271, 151), (2, 1), 128), {"causal": True}, deterministic
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", WIDTHS)
def test_blocks_take_turns(device, rng, head_dim, causal):
    """The blocks of different key tiles add to dQ in a fixed order, for two heads."""
    check_backward(
        device,
        *inputs_of(rng, (150, 270), (2, 1), head_dim),
        {"causal": causal},
        deterministic=True,
    )


@pytest.mark.emulator
@pytest.mark.parametrize("head_dim", WIDTHS)
def test_late_completion(late_completion_emulator, rng, head_dim):
    inputs = inputs_of(rng, (200, 150), (1, 1), head_dim)
    check_backward(
        late_completion_emulator, *inputs, {"causal": True}, deterministic=head_dim == 128
    )


@pytest.mark.parametrize("head_dim", WIDTHS)
def test_queries_without_keys_get_zeros(device, rng, head_dim):
    """No block adds to the dQ tiles of these queries, and the tiles are not zero-filled before."""
    q, k, v, grad_out = inputs_of(rng, (400, 100), (1, 1), head_dim)
    placed = to_device(device, grad_out, q, k, v)
    out, lse = flash_attention(*placed[1:], causal=True, return_lse=True)
    for deterministic in (False, True):
        poison_pool(device)
        grad_q, *_ = flash_attention_backward(
            *placed, out, lse, causal=True, deterministic=deterministic
        )
        assert not to_host(grad_q)[:, :300].astype(np.float32).any()


@pytest.mark.parametrize("head_dim", [64, 256])
def test_query_heads_are_split_where_key_heads_are_few(device, rng, head_dim):
    """Four blocks share a KV head and write separate partial sums."""
    problem = AttentionProblem(1, 70, 140, 4, 1, head_dim, "float16", True)
    assert plan_flash_attention_backward_sm90(problem, False, H200).splits == 4
    check_backward(
        device, *inputs_of(rng, (70, 140), (4, 1), head_dim, dtype="float16"), {"causal": True}
    )


@pytest.mark.parametrize("head_dim", [40, 200])
def test_strided_inputs_are_read_in_place(device, rng, head_dim):
    """[batch, heads, seq, head_dim] viewed as [batch, seq, heads, head_dim], and fused k and v."""
    arrays = inputs_of(rng, (70, 130), (2, 2), head_dim)
    q, k, v, grad_out = to_device(device, *arrays)
    out, lse = flash_attention(q, k, v, return_lse=True)
    swapped = (x.swapaxes(1, 2) for x in arrays)
    *strided, strided_grad = (
        x.swapaxes(1, 2) for x in to_device(device, *map(np.ascontiguousarray, swapped))
    )
    (fused,) = to_device(device, np.concatenate(arrays[1:3], axis=2))
    expected = flash_attention_backward(grad_out, q, k, v, out, lse)
    for given, grad in ((strided, strided_grad), ((q, fused[:, :, :2], fused[:, :, 2:]), grad_out)):
        grads = flash_attention_backward(grad, *given, out, lse)
        for got, wanted in zip(grads[1:], expected[1:], strict=True):
            assert to_host(got).tobytes() == to_host(wanted).tobytes()
        np.testing.assert_allclose(
            to_host(grads[0]).astype(np.float32), to_host(expected[0]).astype(np.float32), atol=1e-2
        )


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", WIDTHS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_are_the_same_bits_each_time(rng, head_dim, causal, deterministic):
    """grad_k and grad_v always, grad_q only if deterministic."""
    q, k, v, grad_out = to_device("gpu", *inputs_of(rng, (1777, 1600), (8, 2), head_dim, batch=2))
    out, lse = flash_attention(q, k, v, causal=causal, return_lse=True)
    first = None
    for _ in range(20):
        poison_pool("gpu")
        grads = flash_attention_backward(
            grad_out, q, k, v, out, lse, causal=causal, deterministic=deterministic
        )
        bits = [to_host(grad).tobytes() for grad in grads[not deterministic :]]
        first = first or bits
        assert bits == first


def test_what_the_class_covers():
    assert covers(PROBLEM, H200)
    assert covers(replace(PROBLEM, sinks=True), H200)
    assert covers(replace(PROBLEM, window=(8, None)), H200)
    assert covers(replace(PROBLEM, softcap=True, alibi=True, bias="float32", varlen=True), H200)
    assert covers(replace(PROBLEM, value_dim=64), H200)
    assert not covers(replace(PROBLEM, seq_len_q=0), H200)
    assert not covers(PROBLEM, typical_device("sm_100"))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_plan_says_whether_it_is_deterministic(deterministic):
    config = plan_flash_attention_backward_sm90(PROBLEM, deterministic, H200)
    assert config.deterministic == config.keys.ordered == deterministic
    assert config.accumulates_grad_q
    wide = plan_flash_attention_backward_sm90(replace(PROBLEM, head_dim=192), deterministic, H200)
    assert wide.deterministic == deterministic
    assert not wide.keys.ordered
    assert not wide.accumulates_grad_q


def test_long_sequences_get_longer_query_tiles():
    def tile_m(**changes):
        problem = replace(PROBLEM, **changes)
        return plan_flash_attention_backward_sm90(problem, False, H200).keys.tile_m

    assert tile_m() == tile_m(seq_len_q=16384, mask=True) == 64
    assert tile_m(causal=False) == tile_m(seq_len_q=16384) == 80


@pytest.mark.parametrize("width", WIDTHS)
def test_a_block_fits_an_sm(width):
    tilings = [WARPGROUP_KEY_TILINGS[width], WARPGROUP_KEY_TILINGS[width].softcapped()]
    tilings += [LONG_KEY_TILING] if width == LONG_KEY_WIDTH else []
    tilings += [WARPGROUP_QUERY_TILINGS[width]] if width in WARPGROUP_QUERY_TILINGS else []
    for tiling in tilings:
        assert tiling.shared_bytes(width, width) + STATIC_BYTES <= H200.shared_bytes_per_block
    tiling = WARPGROUP_KEY_TILINGS[width]
    config = plan_flash_attention_backward_sm90(replace(PROBLEM, head_dim=width - 8), False, H200)
    assert config.width == width
    assert config.scratch_rows(0)[1] % tiling.tile_m == 0
