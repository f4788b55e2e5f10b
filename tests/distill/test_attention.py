"""distillation_attention, relation_kl and AttentionTerm: parts, gradients, errors."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

import cukit
from cukit.attention import attention_kl, flash_attention
from cukit.attention.divergence.attention_with_kl import attention_with_kl
from cukit.distill import (
    AttentionTerm,
    distillation_attention,
    distillation_attention_backward,
    relation_kl,
)
from cukit.errors import ArrayShapeError, ConfigError
from cukit.models import StateGradients
from cukit.reference import attention
from cukit.reference import attention_kl as kl
from tests.contract import another_order, assert_close, poison_pool, random, to_device, to_host
from tests.models.small import SMALL, small_model, small_tokens

TEACHER = {"hidden_size": 24, "num_layers": 3, "num_heads_q": 2}


def models_of(rng, dtype="float64", width=8, seq=7):
    """q_t, k_t, v_t with two query heads and one KV head; q_s, k_s, v_s with four and two."""
    return tuple(
        random(rng, (2, seq, heads, columns), dtype)
        for heads, columns in ((2, 16), (1, 16), (1, 16), (4, width), (2, width), (2, width))
    )


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_equals_attention_and_its_divergence(rng, temperature):
    q_t, k_t, v_t, q_s, k_s, v_s = models_of(rng)
    options = {"causal": True, "temperature": temperature, "head_map": (1, 0, 0, 1)}
    result = distillation_attention(q_t, k_t, v_t, q_s, k_s, v_s, **options)
    np.testing.assert_array_equal(result.out, flash_attention(q_s, k_s, v_s, causal=True))
    np.testing.assert_array_equal(result.out_t, flash_attention(q_t, k_t, v_t, causal=True))
    loss, lse_t, lse_s = attention_kl(q_t, k_t, q_s, k_s, **options, return_lse=True)
    np.testing.assert_allclose(result.loss, loss, rtol=1e-12)
    np.testing.assert_allclose(result.lse_t, lse_t, rtol=1e-12)
    np.testing.assert_allclose(result.lse_s, lse_s, rtol=1e-12)
    without = distillation_attention(q_t, k_t, None, q_s, k_s, v_s, **options)
    assert without.out_t is None
    np.testing.assert_allclose(without.loss, loss, rtol=1e-12)


def test_gradients_are_the_derivatives(rng):
    arrays = models_of(rng)
    q_t, k_t, v_t, *student = arrays
    options = {"causal": True, "temperature": 1.5, "scale_by_temperature_squared": True}
    grad_out = rng.standard_normal(student[0].shape)

    def value(*moved):
        result = distillation_attention(q_t, k_t, v_t, *moved, **options)
        return float((result.out * grad_out).sum() + 0.7 * result.loss)

    result = distillation_attention(*arrays, **options)
    gradients = distillation_attention_backward(
        grad_out, q_t, k_t, *student, result, grad_loss=0.7, **options
    )
    step = 1e-6
    directions = [rng.standard_normal(x.shape) for x in student]
    ends = [
        value(*(x + sign * step * d for x, d in zip(student, directions, strict=True)))
        for sign in (1, -1)
    ]
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True))
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=1e-6)


def test_both_kernels_match(device, rng):
    arrays = models_of(rng, "bfloat16", width=64, seq=70)
    q_t, k_t, _, q_s, k_s, v_s = (x.astype(np.float64) for x in arrays)
    masks = {"causal": True}
    out, lse = attention.flash_attention(q_s, k_s, v_s, return_lse=True, **masks)
    loss, *both = kl.attention_kl(q_t, k_t, q_s, k_s, return_lse=True, **masks)
    placed = to_device(device, *arrays)
    result = distillation_attention(*placed, **masks)
    assert float(result.loss) == pytest.approx(float(loss), rel=2e-5)
    grad_out = random(rng, arrays[3].shape, "bfloat16")
    expected = list(
        attention.flash_attention_backward(
            grad_out.astype(np.float64), q_s, k_s, v_s, out, lse, **masks
        )
    )
    more = kl.attention_kl_backward(q_t, k_t, q_s, k_s, *both, grad_loss=50.0, **masks)
    expected[:2] = [a + b for a, b in zip(expected, more, strict=False)]
    gradients = distillation_attention_backward(
        *to_device(device, grad_out), *placed[:2], *placed[3:], result, grad_loss=50.0, **masks
    )
    for got, wanted in zip(gradients, expected, strict=True):
        error = abs(to_host(got).astype(np.float64) - wanted).max()
        assert error < 2e-2 * abs(wanted).max()


MASKS = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window_size": (40, 9)},
}
DIMS = {
    "128": ((128, 128, 128), "bfloat16"),
    "64": ((64, 64, 64), "float16"),
    "unequal": ((64, 128, 40), "bfloat16"),
}
"""head_dims of the teacher, of the student's keys and of its values; dtype."""


@contextmanager
def one_passes():
    """Records the results of attention_with_kl in distillation_attention."""
    passes = []

    def recorded(*args):
        passes.append(attention_with_kl(*args))
        return passes[-1]

    module = sys.modules[distillation_attention.__module__]
    with patch.object(module, "attention_with_kl", recorded):
        yield passes


def check_one_pass(device, arrays, **options):
    """Compares output, rows and both lse with float64, the teacher's lse given or not."""
    q_t, k_t, q_s, k_s, v_s = (x.astype(np.float64) for x in arrays)
    masks = {
        name: value
        for name, value in options.items()
        if name not in ("head_map", "row_weights", "scale_t", "scale_s")
    }
    out, lse = attention.flash_attention(
        q_s, k_s, v_s, return_lse=True, scale=options.get("scale_s"), **masks
    )
    rows, lse_t, lse_s = kl.attention_kl(
        q_t, k_t, q_s, k_s, reduction="none", return_lse=True, **options
    )
    low = attention.flash_attention(*arrays[2:], scale=options.get("scale_s"), **masks)
    on_device = to_device(device, *arrays)
    given = {
        name: to_device(device, value)[0] if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    known = None
    for _ in range(2):
        poison_pool(device)
        q, k, *student = on_device
        with one_passes() as passes:
            result = distillation_attention(
                q, k, None, *student, lse_t=known, reduction="none", **given
            )
        assert (passes[0] is None) == (device == "cpu"), "planned as one pass"
        assert_close("out", result.out, low, out, 1e-2)
        for name, value, expected in (
            ("lse", result.lse, lse),
            ("lse_s", result.lse_s, lse_s),
            ("lse_t", result.lse_t, lse_t),
        ):
            assert_close(name, value, expected, expected, 1e-5)
        assert_close("rows", result.loss, rows, rows, 1.2e-5)
        assert (to_host(result.loss) >= 0).all()
        known = result.lse_t


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS)
def test_one_pass(device, rng, dims, mask):
    lengths = (300, 400) if device == "gpu" else (150, 210)
    widths, dtype = DIMS[dims]
    arrays = student_and_teacher(rng, widths, lengths, dtype)
    check_one_pass(device, arrays, scale_t=0.2, scale_s=0.1, **MASKS[mask])


@pytest.mark.parametrize("lengths", [(1, 1), (70, 300), (300, 70)])
def test_one_pass_of_few_rows_and_fully_masked_rows(device, rng, lengths):
    arrays = student_and_teacher(rng, (128, 128, 128), lengths, "bfloat16")
    check_one_pass(device, arrays, causal=True, head_map=(1, 0))


def test_one_pass_of_strided_arrays(device, rng):
    """Slices of fused projections, batches, four query heads for one key head, row weights."""
    teacher = random(rng, (2, 90, 6, 64), "bfloat16")
    student = random(rng, (2, 90, 6, 64), "bfloat16")
    arrays = [
        teacher[:, :, :4], teacher[:, :, 4:], student[:, :, :4], student[:, :, 4:5],
        student[:, :, 5:],
    ]  # fmt: skip
    weights = rng.random((2, 90)).astype(np.float32)
    weights[0, :5] = 0
    check_one_pass(device, arrays, row_weights=weights, window_size=(None, 3))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_pass_reduces_and_scales(device, rng, reduction):
    arrays = student_and_teacher(rng, (64, 64, 64), (70, 90), "bfloat16")
    q_t, k_t, *student = to_device(device, *arrays)
    options = {"reduction": reduction, "scale_by_temperature_squared": True}
    if reduction == "mean":
        options["normalizer"] = 7.0
    got = distillation_attention(q_t, k_t, None, *student, **options)
    exact = kl.attention_kl(*(x.astype(np.float64) for x in arrays[:4]), **options)
    assert float(got.loss) == pytest.approx(float(exact), rel=2e-5)


def test_one_pass_needs_a_temperature_of_one_and_narrow_heads(rng):
    arrays = student_and_teacher(rng, (64, 64, 64), (5, 6), "float32")
    wide = student_and_teacher(rng, (64, 136, 64), (5, 6), "bfloat16")
    narrow = student_and_teacher(rng, (64, 64, 64), (5, 6), "bfloat16")

    def passes_of(q_t, k_t, *student, **options):
        with one_passes() as passes:
            distillation_attention(q_t, k_t, None, *student, **options)
        return [each is not None for each in passes]

    assert passes_of(*arrays) == [False], "the CPU has no such kernel"
    with cukit.backend("emulator", arch="sm_90"):
        assert passes_of(*wide) == [False]
        assert passes_of(*narrow) == [True]
        assert passes_of(*narrow, temperature=2.0) == passes_of(*narrow, precise=True) == []
        with pytest.raises(ArrayShapeError, match="distillation_attention: lse_t"):
            passes_of(*narrow, lse_t=np.zeros((1, 2, 4), np.float32))
    with cukit.backend("emulator", arch="sm_80"):
        assert passes_of(*narrow) == [False]


def test_one_pass_over_sequences(device, rng):
    ends, ends_kv = (
        np.array(x, np.int32) for x in ([0, 0, 37, 101, 101, 290], [0, 9, 90, 100, 100, 330])
    )
    arrays = student_and_teacher(rng, (64, 64, 64), (290, 330), "bfloat16")
    check_one_pass(
        device,
        [x[0] for x in arrays],
        causal=True,
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends_kv,
        max_seqlen_q=190,
        max_seqlen_kv=230,
    )


def student_and_teacher(rng, dims, lengths, dtype):
    """q_t, k_t with two heads each; q_s, k_s, v_s with two query heads and one KV head."""
    (dim_t, dim_s, dim_v), (seq_q, seq_kv) = dims, lengths
    return [
        random(rng, (1, seq, heads, columns), dtype)
        for seq, heads, columns in (
            (seq_q, 2, dim_t), (seq_kv, 2, dim_t),
            (seq_q, 2, dim_s), (seq_kv, 1, dim_s), (seq_kv, 1, dim_v),
        )
    ]  # fmt: skip


def test_one_pass_is_bitwise_reproducible(device, rng):
    arrays = to_device(device, *student_and_teacher(rng, (64, 64, 64), (150, 290), "bfloat16"))
    q_t, k_t, *student = arrays
    found = []
    for repeat in range({"gpu": 5, "emulator": 2, "cpu": 1}[device]):
        poison_pool(device)
        with another_order(device, repeat):
            result = distillation_attention(q_t, k_t, None, *student, causal=True)
        found.append([to_host(x).tobytes() for x in result if x is not None])
        assert found[repeat] == found[0]


@pytest.mark.parametrize("relation_heads", [None, 1, 4])
def test_relations_equal_the_attention_of_an_array_to_itself(rng, relation_heads):
    x_t, x_s = rng.standard_normal((2, 6, 2, 12)), rng.standard_normal((2, 6, 2, 8))

    def loss_of(x):
        return float(relation_kl(x_t, x, relation_heads=relation_heads, temperature=1.3))

    def relations(x):
        heads = relation_heads or x.shape[2]
        x = x.reshape(2, 6, heads, -1)
        scores = np.einsum("bqhd,bkhd->bhqk", x, x) / np.sqrt(x.shape[-1]) / 1.3
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True)

    p, q = relations(x_t), relations(x_s)
    expected = (p * np.log(p / q)).sum(axis=-1).mean()
    assert loss_of(x_s) == pytest.approx(expected, rel=1e-10)
    loss, gradient = relation_kl(
        x_t, x_s, relation_heads=relation_heads, temperature=1.3, return_grad=True
    )
    assert float(loss) == loss_of(x_s)
    assert gradient.shape == x_s.shape
    direction, step = rng.standard_normal(x_s.shape), 1e-6
    slope = (loss_of(x_s + step * direction) - loss_of(x_s - step * direction)) / (2 * step)
    assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-6)


def test_relations_need_equal_head_counts(rng):
    x = rng.standard_normal((1, 4, 2, 8))
    with pytest.raises(ArrayShapeError, match="without relation_heads"):
        relation_kl(x, rng.standard_normal((1, 4, 4, 8)))
    with pytest.raises(ArrayShapeError, match="relation_heads must divide the 16 columns of x_t"):
        relation_kl(x, x, relation_heads=3)
    with pytest.raises(ArrayShapeError, match="x_s must be"):
        relation_kl(x, x[0])


@pytest.mark.parametrize(
    "what",
    [
        {},
        {"temperature": 2.0},
        {"relations": "qkv", "relation_heads": 2, "attention": False},
        {"relations": ("v",), "relation_heads": 1},
    ],
)
def test_a_term_returns_the_derivatives_of_its_loss(rng, what):
    student, teacher = small_model(), small_model(seed=1, **TEACHER)
    tokens = small_tokens(rng)
    states = student.forward(tokens, keep=True), teacher.forward(tokens, keep=True)
    term = AttentionTerm({1: 2, 2: 3}, student.config, teacher.config, **what)
    valid = np.ones(tokens.size)
    valid[3] = 0

    def loss_of():
        options = {"weight": 0.5, "normalizer": 13.0}
        into = StateGradients()
        return float(term(*states, valid, into, None, **options)), into

    _, into = loss_of()
    step, slope, directions = 1e-6, 0.0, []
    for name in "qkv":
        for layer, gradient in getattr(into, name).items():
            direction = rng.standard_normal(gradient.shape)
            directions.append((states[0].layers[layer], name, direction))
            slope += float((gradient * direction).sum())
    assert directions
    values = []
    for sign in (1, -2):
        for layer, name, direction in directions:
            moved = getattr(layer, name) + sign * step * direction
            setattr(layer, name, moved)
        for layer in states[0].layers:
            _, layer.lse = flash_attention(layer.q, layer.k, layer.v, causal=True, return_lse=True)
        values.append(loss_of()[0])
    assert (values[0] - values[1]) / (2 * step) * 0.5 == pytest.approx(slope, rel=1e-5)


def test_invalid_terms_are_rejected():
    teacher = replace(SMALL, **TEACHER)
    for layers in ({}, {0: 1}, {5: 1}, {1: 9}):
        with pytest.raises(ConfigError, match="layer_map"):
            AttentionTerm(layers, SMALL, teacher)
    with pytest.raises(ConfigError, match="relations"):
        AttentionTerm({1: 1}, SMALL, teacher, relations="x")
    with pytest.raises(ConfigError, match="neither"):
        AttentionTerm({1: 1}, SMALL, teacher, attention=False)
