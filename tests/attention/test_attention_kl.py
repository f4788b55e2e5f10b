"""attention_kl and its backward: values, known log-sum-exps, special rows, options, errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cukit.attention import attention_kl, attention_kl_backward, flash_attention
from cukit.errors import ArrayError, ArrayShapeError, ConfigError
from cukit.reference import attention_kl as reference
from tests.attention.checks import on_device, widened
from tests.contract import another_order, assert_close, poison_pool, random, to_device, to_host
from tests.quick_run import emulated

KL_ATOL = 3e-6
"""Tolerance of a row: log-sum-exps and sums of a few hundred terms in float32."""

HEADS = [((4, 4), (4, 4)), ((4, 2), (4, 1)), ((8, 8), (4, 2)), ((2, 1), (6, 2)), ((6, 3), (6, 2))]
"""(query heads, key heads) of teacher and student."""
DIMS = [(64, 64), (128, 128), (128, 64), (64, 40), (72, 128), (96, 80), (256, 128)]
"""head_dim of teacher and student."""
LENGTHS = [(1, 1), (70, 135), (135, 70), (130, 257)]
MASKS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window_size": (20, 9)},
    "causal window": {"causal": True, "window_size": (40, None)},
}


def inputs_of(rng, heads, dims, lengths, dtype="bfloat16", batch=1, closeness=None):
    """q_t, k_t, q_s, k_s. closeness: the student is the teacher plus noise of this size."""
    ((heads_t, keys_t), (heads_s, keys_s)), (seq_q, seq_kv) = heads, lengths
    q_t = random(rng, (batch, seq_q, heads_t, dims[0]), dtype)
    k_t = random(rng, (batch, seq_kv, keys_t, dims[0]), dtype)
    if closeness is not None:
        moved = q_t.astype(np.float32) * (1 + closeness * rng.standard_normal(q_t.shape))
        q_s = moved.astype(q_t.dtype)
        return q_t, k_t, q_s, k_t.copy()
    q_s = random(rng, (batch, seq_q, heads_s, dims[1]), dtype)
    k_s = random(rng, (batch, seq_kv, keys_s, dims[1]), dtype)
    return q_t, k_t, q_s, k_s


def wide(*arrays):
    return tuple(array.astype(np.float64) for array in arrays)


def check(device, arrays, ways=("none", "both", "teacher", "student", "precise"), **options):
    """Compares rows, lse and gradients with float64.

    ways: which log-sum-exps of the models are given to attention_kl, or `precise`.
    """
    exact = wide(*arrays)
    exact_options = {name: widened(value) for name, value in options.items()}
    rows, lse_t, lse_s = reference.attention_kl(
        *exact, **exact_options, reduction="none", return_lse=True
    )
    placed, given = to_device(device, *arrays), on_device(device, options)
    poison_pool(device)
    got, top_t, top_s = attention_kl(*placed, **given, reduction="none", return_lse=True)
    for name, value, expected in (("lse_t", top_t, lse_t), ("lse_s", top_s, lse_s)):
        assert_close(name, value, expected, expected, 1e-5)
    known = {
        "none": {},
        "both": {"lse_t": top_t, "lse_s": top_s},
        "teacher": {"lse_t": top_t},
        "student": {"lse_s": top_s},
        "precise": {"precise": True},
    }
    atol = KL_ATOL * (4 if device == "gpu" else 1)
    for way in ways:
        poison_pool(device)
        got = attention_kl(*placed, **given, **known[way], reduction="none")
        assert_close(f"kl ({way})", got, rows, rows, atol)
        assert (to_host(got) >= 0).all()
    expected = reference.attention_kl_backward(*exact, lse_t, lse_s, **exact_options)
    low = reference.attention_kl_backward(
        *arrays, lse_t.astype(np.float32), lse_s.astype(np.float32), **options
    )
    # A single key has no gradient; float32 leaves a residue of 1 - 1.
    scale = [max(abs(x).max(), 1e-3 / rows.size) for x in expected]
    for deterministic in (False, True):
        poison_pool(device)
        gradients = attention_kl_backward(
            *placed, top_t, top_s, **given, deterministic=deterministic
        )
        for name, gradient, plain, wanted, size in zip(
            ("grad_q", "grad_k"), gradients, low, expected, scale, strict=True
        ):
            assert gradient.dtype == arrays[2].dtype
            # Relative to the largest element: the gradient of a mean over many rows is small.
            assert_close(
                f"{name} (deterministic={deterministic})",
                to_host(gradient).astype(np.float64) / size,
                to_host(plain).astype(np.float64) / size,
                wanted / size,
                1e-2 if arrays[2].dtype.itemsize == 2 else 1e-4,
            )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("heads", HEADS)
@emulated(lambda lengths, heads, mask: (LENGTHS.index(lengths) + HEADS.index(heads)) % 4 == 1)
def test_heads_and_lengths(device_and_class, rng, heads, lengths, mask):
    batch = 2 if device_and_class == "gpu" else 1
    check(device_and_class, inputs_of(rng, heads, (64, 64), lengths, batch=batch), **MASKS[mask])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dims", DIMS)
@emulated(lambda dims, dtype, causal: dtype == "bfloat16" and causal)
def test_head_dims(device_and_class, rng, dims, dtype, causal):
    lengths = (150, 215) if device_and_class == "gpu" else (40, 70)
    heads = ((2, 1), (2, 2))
    ways = ("none", "both", "precise") if device_and_class == "gpu" else ("both",)
    check(device_and_class, inputs_of(rng, heads, dims, lengths, dtype), ways, causal=causal)


@pytest.mark.parametrize("mask", ["all", "causal", "window"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (128, 64), (72, 128), (256, 192)])
@emulated(lambda dims, mask: mask == "all" or dims == (64, 64))
def test_class_sm90(device, rng, dims, mask):
    """The planned class: persistent blocks process several tiles and use every pipeline stage."""
    lengths = (700, 400) if device == "gpu" else (330, 150)
    ways = ("none", "both", "precise") if device == "gpu" else ("both",)
    check(device, inputs_of(rng, ((4, 1), (2, 2)), dims, lengths), ways, **MASKS[mask])


def test_sequences_of_class_sm90(device, rng):
    check_sequences(device, rng)


@pytest.mark.parametrize("head_map", [(0, 1), (1, 3), (3, 0), (2, 2)])
@pytest.mark.parametrize("keys_t", [4, 2, 1])
@emulated(lambda keys_t, head_map: keys_t == 2 and head_map in ((1, 3), (3, 0)))
def test_head_maps(device_and_class, rng, head_map, keys_t):
    arrays = inputs_of(rng, ((4, keys_t), (2, 1)), (64, 64), (70, 90))
    check(device_and_class, arrays, ("none", "both"), head_map=head_map)


@emulated(lambda squared: squared)
@pytest.mark.parametrize("squared", [False, True])
def test_temperature_scales_and_weights(device_and_class, rng, squared):
    arrays = inputs_of(rng, ((2, 2), (2, 2)), (64, 64), (70, 90), batch=2)
    weights = rng.random((2, 70)).astype(np.float32)
    weights[0, 10:20] = 0
    options = {
        "temperature": 2.5,
        "scale_by_temperature_squared": squared,
        "scale_t": 0.2,
        "scale_s": 0.1,
        "row_weights": weights,
        "causal": True,
    }
    check(device_and_class, arrays, ("none", "both"), **options)


def test_sequences_of_any_lengths(device_and_class, rng):
    check_sequences(device_and_class, rng)


def check_sequences(device, rng):
    """Sequences of zero, one and many rows; queries without keys."""
    ends = np.array([0, 0, 37, 101, 101, 160], np.int32)
    ends_kv = np.array([0, 9, 90, 100, 100, 230], np.int32)
    heads_s, heads_t = 4, 2
    q_t, q_s = (random(rng, (160, heads, 64), "bfloat16") for heads in (heads_t, heads_s))
    k_t, k_s = (random(rng, (230, heads, 64), "bfloat16") for heads in (1, 2))
    options = {
        "cu_seqlens_q": ends,
        "cu_seqlens_kv": ends_kv,
        "max_seqlen_q": 70,
        "max_seqlen_kv": 140,
        "causal": True,
        "row_weights": rng.random(160).astype(np.float32),
    }
    check(device, (q_t, k_t, q_s, k_s), ("none", "both"), **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_reductions(device_and_class, rng, reduction, weighted):
    arrays = inputs_of(rng, ((2, 1), (2, 2)), (64, 64), (33, 70), batch=2)
    weights = rng.random((2, 33)).astype(np.float32) if weighted else None
    loss, lse_t, lse_s = reference.attention_kl(
        *wide(*arrays), row_weights=weights, reduction=reduction, return_lse=True
    )
    placed, (weights_on,) = (
        to_device(device_and_class, *arrays),
        to_device(device_and_class, weights),
    )
    got, top_t, top_s = attention_kl(
        *placed, row_weights=weights_on, reduction=reduction, return_lse=True
    )
    np.testing.assert_allclose(to_host(got), loss, rtol=2e-5, atol=1e-5)
    by_row = rng.random((2, 2, 33)).astype(np.float32)
    upstream = {"mean": -1.5, "sum": np.float32(0.25), "none": by_row}[reduction]
    expected = reference.attention_kl_backward(
        *wide(*arrays), lse_t, lse_s, row_weights=weights, reduction=reduction, grad_loss=upstream
    )
    if reduction != "none":
        upstream = to_device(device_and_class, np.asarray(upstream, np.float32))[0]
    else:
        (upstream,) = to_device(device_and_class, upstream)
    gradients = attention_kl_backward(
        *placed, top_t, top_s, row_weights=weights_on, reduction=reduction, grad_loss=upstream
    )
    for got, wanted in zip(gradients, expected, strict=True):
        error = abs(to_host(got).astype(np.float64) - wanted).max()
        assert error <= 1e-2 * abs(wanted).max()


def test_micro_batches_with_a_normalizer_sum_to_the_batch(device_and_class, rng):
    arrays = inputs_of(rng, ((2, 2), (2, 2)), (64, 64), (40, 50), batch=4)
    weights = (rng.random((4, 40)) < 0.7).astype(np.float32)
    placed, (weights_on,) = (
        to_device(device_and_class, *arrays),
        to_device(device_and_class, weights),
    )
    whole = float(attention_kl(*placed, row_weights=weights_on))
    count = to_device(device_and_class, np.array(weights.sum(), np.float32))[0]
    parts = sum(
        float(
            attention_kl(*(x[part] for x in placed), row_weights=weights_on[part], normalizer=count)
        )
        for part in (slice(0, 1), slice(1, 4))
    )
    assert parts == pytest.approx(whole, rel=1e-5)


def test_equal_models_have_no_divergence(device_and_class, rng):
    arrays = inputs_of(rng, ((2, 2), (2, 2)), (64, 64), (70, 90))
    placed = to_device(device_and_class, *arrays[:2])
    loss, lse_t, lse_s = attention_kl(*placed, *placed, return_lse=True)
    assert 0 <= float(loss) < 1e-6
    assert float(attention_kl(*placed, *placed, precise=True)) < 1e-12
    for gradient in attention_kl_backward(*placed, *placed, lse_t, lse_s):
        assert abs(to_host(gradient).astype(np.float64)).max() < 1e-7


@pytest.mark.parametrize("noise", [1e-2, 4e-3])
def test_precise_is_accurate_for_a_small_divergence(device_and_class, rng, noise):
    arrays = inputs_of(rng, ((2, 2), (2, 2)), (64, 64), (40, 200), closeness=noise)
    exact = float(reference.attention_kl(*wide(*arrays)))
    assert exact < 1e-3
    got = float(attention_kl(*to_device(device_and_class, *arrays), precise=True))
    assert got == pytest.approx(exact, rel=1e-3 if device_and_class != "cpu" else 1e-2)


def test_rows_without_keys_contribute_nothing(device_and_class, rng):
    arrays = inputs_of(rng, ((2, 2), (2, 2)), (64, 64), (90, 20))
    placed = to_device(device_and_class, *arrays)
    rows, lse_t, lse_s = attention_kl(*placed, causal=True, reduction="none", return_lse=True)
    assert (to_host(rows)[..., :70] == 0).all()
    assert np.isneginf(to_host(lse_t)[..., :70]).all()
    assert np.isneginf(to_host(lse_s)[..., :70]).all()
    again = attention_kl(*placed, causal=True, reduction="none", lse_t=lse_t, lse_s=lse_s)
    np.testing.assert_allclose(to_host(again), to_host(rows), atol=1e-5)
    grad_q, _ = attention_kl_backward(*placed, lse_t, lse_s, causal=True)
    assert (to_host(grad_q)[:, :70].astype(np.float32) == 0).all()


def test_accepts_the_lse_of_flash_attention(device_and_class, rng):
    q_t, k_t, q_s, k_s = inputs_of(rng, ((4, 2), (4, 1)), (64, 64), (70, 90))
    placed = to_device(device_and_class, q_t, k_t, q_s, k_s)
    _, lse_t = flash_attention(placed[0], placed[1], placed[1], causal=True, return_lse=True)
    _, lse_s = flash_attention(placed[2], placed[3], placed[3], causal=True, return_lse=True)
    exact = float(reference.attention_kl(*wide(q_t, k_t, q_s, k_s), causal=True))
    got = float(attention_kl(*placed, causal=True, lse_t=lse_t, lse_s=lse_s))
    assert got == pytest.approx(exact, rel=2e-5)


def test_rows_of_weight_zero_may_have_extreme_scores(device_and_class, rng):
    q_t, k_t, q_s, k_s = inputs_of(rng, ((2, 2), (2, 2)), (64, 64), (40, 50))
    weights = np.ones((1, 40), np.float32)
    weights[0, 5] = 0
    q_s[0, 5] = 300
    placed, (weights_on,) = (
        to_device(device_and_class, q_t, k_t, q_s, k_s),
        to_device(device_and_class, weights),
    )
    loss, lse_t, lse_s = attention_kl(*placed, row_weights=weights_on, return_lse=True)
    exact = float(reference.attention_kl(*wide(q_t, k_t, q_s, k_s), row_weights=weights))
    assert float(loss) == pytest.approx(exact, rel=2e-5)
    grad_q, grad_k = attention_kl_backward(*placed, lse_t, lse_s, row_weights=weights_on)
    assert (to_host(grad_q)[0, 5].astype(np.float32) == 0).all()
    assert np.isfinite(to_host(grad_k).astype(np.float32)).all()


def test_reruns_are_bitwise_equal(device, rng):
    placed = to_device(device, *inputs_of(rng, ((2, 2), (4, 2)), (64, 64), (70, 135)))
    found = []
    for repeat in range({"gpu": 5, "emulator": 2, "cpu": 1}[device]):
        poison_pool(device)
        with another_order(device, repeat):
            loss, lse_t, lse_s = attention_kl(*placed, causal=True, return_lse=True)
            both = attention_kl_backward(*placed, lse_t, lse_s, causal=True, deterministic=True)
        found.append([to_host(x).tobytes() for x in (loss, lse_t, lse_s, *both)])
        assert found[repeat] == found[0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(8, 8), (8, 16)])
def test_the_gradient_is_the_derivative(rng, dims, causal):
    arrays = inputs_of(rng, ((4, 2), (2, 1)), dims, (5, 9), "float64", batch=2)
    options = {
        "causal": causal,
        "temperature": 1.7,
        "scale_by_temperature_squared": True,
        "row_weights": rng.random((2, 5)),
    }
    _, lse_t, lse_s = attention_kl(*arrays, **options, return_lse=True)
    gradients = attention_kl_backward(*arrays, lse_t, lse_s, **options)
    directions = [rng.standard_normal(x.shape) for x in arrays[2:]]
    step = 1e-6

    def at(sign):
        moved = (x + sign * step * d for x, d in zip(arrays[2:], directions, strict=True))
        return float(attention_kl(*arrays[:2], *moved, **options))

    slope = (at(1) - at(-1)) / (2 * step)
    assert slope == pytest.approx(
        sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True)), rel=1e-6
    )


def test_equals_the_divergence_of_materialised_probabilities(rng):
    q_t, k_t, q_s, k_s = inputs_of(rng, ((2, 2), (2, 2)), (8, 8), (5, 7), "float64")

    def softmax(q, k):
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(8)
        weights = np.exp(scores)
        return weights / weights.sum(axis=-1, keepdims=True)

    p, q = softmax(q_t, k_t), softmax(q_s, k_s)
    rows = (p * np.log(p / q)).sum(axis=-1)
    np.testing.assert_allclose(attention_kl(q_t, k_t, q_s, k_s, reduction="none"), rows)
    np.testing.assert_allclose(attention_kl(q_t, k_t, q_s, k_s), rows.mean())


def test_errors_name_the_argument(rng):
    q_t, k_t, q_s, k_s = inputs_of(rng, ((2, 2), (4, 2)), (16, 8), (5, 7), "float32")
    with pytest.raises(ArrayShapeError, match="q_t"):
        attention_kl(q_t[:, :4], k_t, q_s, k_s)
    with pytest.raises(ArrayShapeError, match="k_s"):
        attention_kl(q_t, k_t, q_s, k_s[..., :4])
    with pytest.raises(ConfigError, match=r"head_map .* 4 heads"):
        attention_kl(q_t, k_t, q_s, k_s, head_map=(0, 1, 2, 0))
    with pytest.raises(ConfigError, match="temperature"):
        attention_kl(q_t, k_t, q_s, k_s, temperature=0)
    with pytest.raises(ConfigError, match="reduction"):
        attention_kl(q_t, k_t, q_s, k_s, reduction="batchmean")
    with pytest.raises(ConfigError, match="normalizer"):
        attention_kl(q_t, k_t, q_s, k_s, reduction="sum", normalizer=3)
    with pytest.raises(ArrayError, match="row_weights must be at least 0"):
        attention_kl(q_t, k_t, q_s, k_s, row_weights=np.full((1, 5), -1, np.float32))
    with pytest.raises(ArrayShapeError, match="lse_t"):
        attention_kl(q_t, k_t, q_s, k_s, lse_t=np.zeros((1, 2, 5), np.float32))
    ends = np.array([0, 5], np.int32)
    with pytest.raises(ConfigError, match="max_seqlen_kv"):
        attention_kl(q_t[0], k_t[0], q_s[0], k_s[0], cu_seqlens_q=ends)
