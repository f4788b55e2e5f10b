"""indexer_kl and its backward: values, selections, sequences, chunks, special rows, errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cukit.attention import attention_kl, indexer_kl, indexer_kl_backward
from cukit.attention.divergence import _indexer_plan
from cukit.errors import ArrayDtypeError, ArrayError, ArrayShapeError, ConfigError
from cukit.reference import indexer_kl as reference
from cukit.reference.attention import flash_attention
from tests.attention.checks import on_device, widened
from tests.contract import another_order, assert_close, poison_pool, random, to_device, to_host
from tests.quick_run import emulated

ATOL = 1e-5
"""Tolerance of a row: float32 sums over heads and keys."""

HEADS = [(2, 2, 2), (4, 1, 3), (6, 2, 1)]
"""Query and KV heads of attention, heads of the indexer."""
DIMS = [(64, 64), (128, 128), (192, 128), (96, 40), (64, 256)]
"""head_dim of attention and indexer."""
LENGTHS = [(1, 1), (70, 135), (135, 70), (150, 280)]


def log_sum_exps(q, k, causal=False, scale=None):
    """The log-sum-exps of attention in float64, [batch, heads, seq_q]."""
    q, k = (x.astype(np.float64) for x in (q, k))
    _, lse = flash_attention(q, k, k, causal=causal, scale=scale, return_lse=True)
    return lse


def inputs_of(rng, heads, dims, lengths, dtype="bfloat16", batch=1, causal=False, scale=None):
    """q_t, k_t, lse_t, q_s, k_s, weights."""
    (heads_t, keys_t, heads_s), (seq_q, seq_kv) = heads, lengths
    q_t = random(rng, (batch, seq_q, heads_t, dims[0]), dtype)
    k_t = random(rng, (batch, seq_kv, keys_t, dims[0]), dtype)
    q_s = random(rng, (batch, seq_q, heads_s, dims[1]), dtype)
    k_s = random(rng, (batch, seq_kv, dims[1]), dtype)
    exact = np.float64 if dtype == "float64" else np.float32
    weights = (rng.standard_normal((batch, seq_q, heads_s)) / math.sqrt(dims[1])).astype(exact)
    lse = log_sum_exps(q_t, k_t, causal, scale).astype(exact)
    return q_t, k_t, lse, q_s, k_s, weights


def selection(rng, lengths, top_k, batch=1):
    """Unordered keys, some of them duplicates, some outside the sequence."""
    return rng.integers(-2, lengths[1] + 2, (batch, lengths[0], top_k)).astype(np.int32)


def check(device, arrays, **options):
    """Compares rows, statistics and gradients with float64; a second call gives the same bits."""
    exact = tuple(map(widened, arrays))
    wide = {name: widened(value) for name, value in options.items()}
    rows = reference.indexer_kl(*exact, **wide, reduction="none", return_statistics=True)
    low = reference.indexer_kl(*arrays, **options, reduction="none", return_statistics=True)
    expected = reference.indexer_kl_backward(*exact, *rows[1:], **wide)
    plain = reference.indexer_kl_backward(*arrays, *low[1:], **options)
    placed, given = to_device(device, *arrays), on_device(device, options)
    first = None
    for repeat in range({"gpu": 3, "emulator": 2, "cpu": 1}[device]):
        poison_pool(device)
        with another_order(device, repeat):
            found = indexer_kl(*placed, **given, reduction="none", return_statistics=True)
            gradients = indexer_kl_backward(*placed, *found[1:], **given)
        bits = [to_host(x).tobytes() for x in (*found, *gradients)]
        first = first or bits
        assert bits == first
    for name, got, plainly, wanted in zip(("kl", "lse", "mass"), found, low, rows, strict=True):
        assert_close(name, got, plainly, wanted, ATOL)
    assert (to_host(found[0]) >= 0).all()
    for name, got, plainly, wanted, like in zip(
        ("grad_q", "grad_k", "grad_weights"), gradients, plain, expected, arrays[3:], strict=True
    ):
        assert got.dtype == like.dtype
        # Relative to the largest element: the gradient of a mean over many rows is small.
        size = max(abs(wanted).max(initial=0.0), 1e-3 / rows[0].size)
        assert_close(
            name,
            to_host(got).astype(np.float64) / size,
            to_host(plainly).astype(np.float64) / size,
            wanted / size,
            1e-2 if arrays[0].dtype.itemsize == 2 else 1e-4,
        )


@pytest.mark.parametrize("top_k", [None, 1, 40])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("heads", HEADS)
@emulated(lambda lengths, heads: (LENGTHS.index(lengths) + HEADS.index(heads)) % 4 == 1)
def test_heads_and_lengths(device_and_class, rng, heads, lengths, causal, top_k):
    batch = 2 if device_and_class == "gpu" else 1
    options: dict[str, Any] = {"causal": causal}
    if top_k is not None:
        options["topk_indices"] = selection(rng, lengths, top_k, batch)
    check(
        device_and_class,
        inputs_of(rng, heads, (64, 64), lengths, batch=batch, causal=causal),
        **options,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dims", DIMS)
@emulated(lambda dims, dtype: (dtype == "float16") == (dims == (96, 40)))
def test_head_dims(device_and_class, rng, dims, dtype):
    """In the emulator, kernels of class sm80."""
    lengths = (150, 215) if device_and_class == "gpu" else (40, 70)
    check(
        device_and_class, inputs_of(rng, (2, 1, 2), dims, lengths, dtype, causal=True), causal=True
    )


@pytest.mark.parametrize("dims", DIMS)
@emulated(lambda dims: dims in ((128, 128), (96, 40), (64, 256)))
def test_warpgroups(device, rng, dims):
    """The kernels for Hopper, in the emulator too."""
    lengths = (150, 280) if device == "gpu" else (70, 140)
    check(device, inputs_of(rng, (2, 1, 2), dims, lengths, causal=True), causal=True)


@pytest.mark.parametrize("selected", [False, True])
def test_chunks_of_queries(device, rng, monkeypatch, selected):
    """Scratch memory of one query tile: the key gradient is accumulated over several launches."""
    monkeypatch.setattr(_indexer_plan, "_SCRATCH_BYTES", 1)
    lengths, batch = ((300, 300), 2) if device == "gpu" else ((140, 130), 2)
    options: dict[str, Any] = {"causal": True}
    if selected:
        options["topk_indices"] = selection(rng, lengths, 30, batch)
    # A different scale, so that cached plans of other tests are not used.
    options |= {"scale_t": 0.11, "scale_s": 0.5 + 0.25 * selected}
    arrays = inputs_of(rng, (2, 2, 2), (64, 64), lengths, batch=batch, causal=True, scale=0.11)
    check(device, arrays, **options)


@pytest.mark.parametrize("top_k", [None, 20])
def test_sequences_of_any_lengths(device, rng, top_k):
    """Sequences of zero, one and many rows; queries without keys."""
    ends = np.array([0, 0, 37, 101, 101, 160], np.int32)
    ends_kv = np.array([0, 9, 90, 100, 100, 230], np.int32)
    options: dict[str, Any] = {
        "cu_seqlens_q": ends, "cu_seqlens_kv": ends_kv, "max_seqlen_q": 70, "max_seqlen_kv": 140,
        "causal": True,
    }  # fmt: skip
    q_t, q_s = (random(rng, (160, heads, 64), "bfloat16") for heads in (4, 3))
    k_t, k_s = random(rng, (230, 2, 64), "bfloat16"), random(rng, (230, 64), "bfloat16")
    wide = (x.astype(np.float64) for x in (q_t, k_t, k_t))
    _, lse = flash_attention(*wide, **options, return_lse=True)
    weights = rng.standard_normal((160, 3)).astype(np.float32) / 8
    options["row_weights"] = rng.random(160).astype(np.float32)
    if top_k is not None:
        options["topk_indices"] = rng.integers(-2, 90, (160, top_k)).astype(np.int32)
    check(device, (q_t, k_t, lse.astype(np.float32), q_s, k_s, weights), **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_reductions(device, rng, reduction, weighted):
    arrays = inputs_of(rng, (2, 1, 2), (64, 64), (33, 70), batch=2)
    row_weights = rng.random((2, 33)).astype(np.float32) if weighted else None
    options = {"row_weights": row_weights, "reduction": reduction}
    exact = tuple(map(widened, arrays))
    loss, lse, mass = reference.indexer_kl(*exact, **options, return_statistics=True)
    placed, given = to_device(device, *arrays), on_device(device, options)
    got, own_lse, own_mass = indexer_kl(*placed, **given, return_statistics=True)
    np.testing.assert_allclose(to_host(got), loss, rtol=3e-5, atol=1e-5)
    by_row = rng.standard_normal((2, 33)).astype(np.float32)
    upstream = {"mean": -1.5, "sum": np.array(0.25, np.float32), "none": by_row}[reduction]
    expected = reference.indexer_kl_backward(*exact, lse, mass, **options, grad_loss=upstream)
    given["grad_loss"] = upstream if isinstance(upstream, float) else to_device(device, upstream)[0]
    for got, wanted in zip(
        indexer_kl_backward(*placed, own_lse, own_mass, **given), expected, strict=True
    ):
        error = abs(to_host(got).astype(np.float64) - wanted).max()
        assert error <= 1e-2 * abs(wanted).max()


def test_one_head_with_positive_scores_equals_attention_kl(device, rng):
    """Positive scores of one head: the result is that of attention_kl."""
    q_t, k_t, lse, q_s, k_s, _ = inputs_of(rng, (1, 1, 1), (64, 64), (40, 70))
    q_s, k_s = abs(q_s), abs(k_s)
    weights = np.ones((1, 40, 1), np.float32)
    placed = to_device(device, q_t, k_t, lse, q_s, k_s, weights)
    got = indexer_kl(*placed, scale_s=0.05, reduction="none")
    expected = attention_kl(
        placed[0], placed[1], placed[3], placed[4][:, :, None], scale_s=0.05, reduction="none"
    )
    np.testing.assert_allclose(to_host(got), to_host(expected)[:, 0], atol=2e-5)


def test_selecting_every_key_equals_no_selection(device, rng):
    arrays = inputs_of(rng, (2, 2, 2), (64, 64), (40, 70), causal=True)
    every = np.broadcast_to(np.arange(70, dtype=np.int32)[::-1], (1, 40, 70))
    placed, (every,) = to_device(device, *arrays), to_device(device, np.ascontiguousarray(every))
    options = {"causal": True, "reduction": "none", "return_statistics": True}
    whole = indexer_kl(*placed, **options)
    for got, wanted in zip(indexer_kl(*placed, topk_indices=every, **options), whole, strict=True):
        np.testing.assert_allclose(to_host(got), to_host(wanted), rtol=1e-6)
    np.testing.assert_allclose(to_host(whole[2]), 1, rtol=1e-5)


def test_rows_without_keys_contribute_nothing(device, rng):
    arrays = inputs_of(rng, (2, 2, 2), (64, 64), (90, 20), causal=True)
    placed = to_device(device, *arrays)
    options = {"causal": True}
    rows, lse, mass = indexer_kl(*placed, **options, reduction="none", return_statistics=True)
    assert (to_host(rows)[:, :70] == 0).all()
    assert (to_host(mass)[:, :70] == 0).all()
    assert np.isneginf(to_host(lse)[:, :70]).all()
    grad_q, _, grad_weights = indexer_kl_backward(*placed, lse, mass, **options)
    for gradient in (grad_q, grad_weights):
        assert (to_host(gradient)[:, :70].astype(np.float32) == 0).all()


def test_no_queries_or_no_keys(device, rng):
    for lengths in ((0, 5), (5, 0)):
        arrays = inputs_of(rng, (2, 2, 2), (64, 64), lengths)
        placed = to_device(device, *arrays)
        loss, lse, mass = indexer_kl(*placed, return_statistics=True)
        assert float(loss) == 0
        for gradient in indexer_kl_backward(*placed, lse, mass):
            assert not to_host(gradient).astype(np.float32).any()


def test_rows_of_weight_zero_may_be_nan(device, rng):
    arrays = inputs_of(rng, (2, 2, 2), (64, 64), (40, 50))
    row_weights = np.ones((1, 40), np.float32)
    row_weights[0, 5] = 0
    arrays[5][0, 5] = np.nan
    placed, (given,) = to_device(device, *arrays), to_device(device, row_weights)
    loss, lse, mass = indexer_kl(*placed, row_weights=given, return_statistics=True)
    assert np.isfinite(float(loss))
    gradients = indexer_kl_backward(*placed, lse, mass, row_weights=given)
    for gradient in gradients:
        assert np.isfinite(to_host(gradient).astype(np.float32)).all()
    assert not to_host(gradients[0])[0, 5].astype(np.float32).any()


@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_the_gradient_is_the_derivative(rng, causal, top_k):
    arrays = inputs_of(rng, (4, 2, 3), (8, 8), (5, 9), "float64", batch=2, causal=causal)
    options: dict[str, Any] = {
        "causal": causal, "scale_s": 0.7, "row_weights": rng.random((2, 5)),
    }  # fmt: skip
    if top_k is not None:
        options["topk_indices"] = selection(rng, (5, 9), top_k, 2)
    _, *statistics = indexer_kl(*arrays, **options, return_statistics=True)
    gradients = indexer_kl_backward(*arrays, *statistics, **options)
    directions = [rng.standard_normal(x.shape) for x in arrays[3:]]
    step = 1e-6

    def at(sign):
        moved = (x + sign * step * d for x, d in zip(arrays[3:], directions, strict=True))
        return float(indexer_kl(*arrays[:3], *moved, **options))

    slope = (at(1) - at(-1)) / (2 * step)
    inner = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
    assert slope == pytest.approx(inner, rel=1e-6)


def test_equals_the_divergence_of_materialised_probabilities(rng):
    q_t, k_t, lse, q_s, k_s, weights = inputs_of(rng, (2, 2, 3), (8, 8), (5, 7), "float64")
    scores = np.einsum("bqhd,bkhd->bhqk", q_t, k_t) / math.sqrt(8)
    p = np.exp(scores)
    p = (p / p.sum(axis=-1, keepdims=True)).mean(axis=1)
    products = np.maximum(np.einsum("bqhd,bkd->bhqk", q_s, k_s), 0)
    index = np.einsum("bhqk,bqh->bqk", products, weights)
    q = np.exp(index)
    q /= q.sum(axis=-1, keepdims=True)
    rows = (p * np.log(p / q)).sum(axis=-1)
    arrays = (q_t, k_t, lse, q_s, k_s, weights)
    np.testing.assert_allclose(indexer_kl(*arrays, reduction="none"), rows)
    np.testing.assert_allclose(indexer_kl(*arrays), rows.mean())


def test_errors_name_the_argument(rng):
    arrays = inputs_of(rng, (4, 2, 3), (16, 8), (5, 7), "float32")
    q_t, k_t, lse, q_s, k_s, weights = arrays
    with pytest.raises(ArrayShapeError, match="q_t"):
        indexer_kl(q_t[:, :4], k_t, lse, q_s, k_s, weights)
    with pytest.raises(ArrayShapeError, match="k_s"):
        indexer_kl(q_t, k_t, lse, q_s, k_s[:, :, None], weights)
    with pytest.raises(ArrayShapeError, match="lse_t"):
        indexer_kl(q_t, k_t, lse[:, :2], q_s, k_s, weights)
    with pytest.raises(ArrayShapeError, match="weights"):
        indexer_kl(q_t, k_t, lse, q_s, k_s, weights[..., :2])
    with pytest.raises(ArrayDtypeError, match="topk_indices"):
        indexer_kl(*arrays, topk_indices=np.zeros((1, 5, 2), np.int64))
    with pytest.raises(ArrayShapeError, match="topk_indices"):
        indexer_kl(*arrays, topk_indices=np.zeros((1, 4, 2), np.int32))
    with pytest.raises(ConfigError, match="scale_s"):
        indexer_kl(*arrays, scale_s=0)
    with pytest.raises(ConfigError, match="reduction"):
        indexer_kl(*arrays, reduction="batchmean")
    with pytest.raises(ArrayError, match="row_weights must be at least 0"):
        indexer_kl(*arrays, row_weights=np.full((1, 5), -1, np.float32))
    with pytest.raises(ArrayError, match="mass_t"):
        indexer_kl_backward(*arrays, np.zeros((1, 5), np.float32), None)
