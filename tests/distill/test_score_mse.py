"""attention_score_mse: compared with a loss of the full score matrices; gradients, errors."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.distill import attention_score_mse
from cukit.distill.losses import score_mse
from cukit.errors import ArrayShapeError, ConfigError
from tests.contract import to_device, to_host

CPU_AND_GPU = pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
LENGTHS = [(9, 9), (5, 12), (12, 5), (1, 1)]


def models_of(rng, lengths, dtype="float64"):
    (seq_q, seq_kv), shapes = lengths, ((2, 8), (1, 8), (4, 6), (2, 6))
    return tuple(
        rng.standard_normal((2, length, *shape)).astype(dtype)
        for length, shape in zip((seq_q, seq_kv, seq_q, seq_kv), shapes, strict=True)
    )


def expected_loss(q_t, k_t, q_s, k_s, heads, causal, weights):
    """The loss, computed from both score matrices."""

    def scores(q, k):
        k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
        return np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])

    error = (scores(q_t, k_t)[:, list(heads)] - scores(q_s, k_s)) ** 2
    seq_q, seq_kv = error.shape[-2:]
    seen = np.ones((seq_q, seq_kv), bool)
    if causal:
        seen = np.tril(seen, seq_kv - seq_q)
    rows = (error * seen).sum(axis=-1) / np.maximum(seen.sum(axis=-1), 1)
    return (rows * weights[:, None]).sum() / (weights.sum() * error.shape[1])


@pytest.mark.parametrize("chunk", [2, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
@CPU_AND_GPU
def test_values_and_gradients(device, rng, monkeypatch, lengths, causal, chunk):
    monkeypatch.setattr(score_mse, "_CHUNK", chunk)
    arrays, weights = models_of(rng, lengths), rng.random((2, lengths[0]))
    heads = (1, 0, 0, 1)
    options = {"causal": causal, "head_map": heads}
    placed, (weights_on,) = to_device(device, *arrays), to_device(device, weights)
    loss, *gradients = attention_score_mse(
        *placed, row_weights=weights_on, return_grad=True, grad_loss=0.5, **options
    )
    assert float(loss) == pytest.approx(expected_loss(*arrays, heads, causal, weights), rel=1e-10)
    directions, step = [rng.standard_normal(x.shape) for x in arrays[2:]], 1e-5
    ends = [
        expected_loss(
            *arrays[:2],
            *(x + sign * step * d for x, d in zip(arrays[2:], directions, strict=True)),
            heads, causal, weights,
        )
        for sign in (1, -1)
    ]  # fmt: skip
    slope = sum(float((to_host(g) * d).sum()) for g, d in zip(gradients, directions, strict=True))
    assert (ends[0] - ends[1]) / (2 * step) * 0.5 == pytest.approx(slope, rel=1e-6, abs=1e-9)


@CPU_AND_GPU
def test_float32_and_16_bit_dtypes(device, rng):
    arrays = models_of(rng, (300, 310), "float32")
    exact = expected_loss(*(x.astype(float) for x in arrays), (0, 0, 1, 1), True, np.ones((2, 300)))
    got = attention_score_mse(*to_device(device, *arrays), causal=True)
    assert got.dtype == np.float32
    assert float(got) == pytest.approx(exact, rel=1e-5)
    rounded = tuple(x.astype(np.float16) for x in arrays)
    exact = expected_loss(
        *(x.astype(float) for x in rounded), (0, 0, 1, 1), False, np.ones((2, 300))
    )
    loss, grad_q, grad_k = attention_score_mse(*to_device(device, *rounded), return_grad=True)
    assert float(loss) == pytest.approx(exact, rel=1e-5)
    assert grad_q.dtype == grad_k.dtype == np.float16
    assert (grad_q.shape, grad_k.shape) == (rounded[2].shape, rounded[3].shape)


def test_errors_name_the_argument(rng):
    q_t, k_t, q_s, k_s = models_of(rng, (5, 7))
    with pytest.raises(ArrayShapeError, match="attention_score_mse: k_t"):
        attention_score_mse(q_t, k_t[:, :3], q_s, k_s)
    with pytest.raises(ConfigError, match="head_map"):
        attention_score_mse(q_t, k_t, q_s, k_s, head_map=(9, 0, 0, 0))
