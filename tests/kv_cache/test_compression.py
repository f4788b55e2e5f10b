"""compress_kv: kept keys, size, error, and attention over the result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cukit as ck
from cukit.core.arrays import bfloat16, float16
from cukit.errors import ArrayError, ConfigError
from cukit.kv_cache._key_scores import attention_received, pooled, top_positions
from cukit.kv_cache.group_codes import GroupCodes
from cukit.reference import attention as reference
from tests.quick_run import emulated

HEADS_Q, HEADS_KV = 4, 2
STRATEGIES: dict[str, dict[str, Any]] = {
    "int8": {},
    "float8": {},
    "kivi4": {"window": 20},
    "kivi2": {"window": 20},
    "sink_window": {"budget": 40},
    "heavy_hitters": {"budget": 40},
    "snapkv": {"budget": 40, "window": 8},
}
WORST = {"int8": 0.02, "float8": 0.06, "kivi4": 0.15, "kivi2": 0.7}
"""Bounds of `error`, which is relative to the outputs: these are small for random keys, as means of
many values."""


def tokens(device: str, seq_len: int = 150, seed: int = 0, head_dim: int = 64) -> list[Any]:
    """q, k and v of all tokens, [2, seq_len, heads, head_dim]."""
    generator = np.random.default_rng(seed)
    xp = pytest.importorskip("cupy") if device == "gpu" else np
    dtype = np.float32 if device == "cpu" else float16
    return [
        xp.asarray(generator.standard_normal((2, seq_len, heads, head_dim), np.float32), dtype)
        for heads in (HEADS_Q, HEADS_KV, HEADS_KV)
    ]


def host(array: Any) -> Any:
    """As a NumPy array; floats as float64."""
    array = array.get() if hasattr(array, "get") else np.asarray(array)
    return array.astype(np.float64) if array.dtype.kind not in "iub" else array


def probabilities(q: Any, k: Any) -> Any:
    """Causal probabilities of the last queries: [batch, heads_kv, group, queries, keys]."""
    q, k = host(q), host(k)
    batch, seq_q, _, head_dim = q.shape
    grouped = q.reshape(batch, seq_q, k.shape[2], -1, head_dim)
    scores = np.einsum("bqhgd,bkhd->bhgqk", grouped, k) / np.sqrt(head_dim)
    past = k.shape[1] - seq_q
    hidden = np.arange(k.shape[1]) > past + np.arange(seq_q)[:, None]
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
@emulated(lambda strategy: strategy == "snapkv")
def test_attention_over_the_kept_keys(strategy: str, device: str) -> None:
    """Compared with dense attention over the kept keys, masked by their original positions, for
    queries of the last tokens, of the next tokens, and of tokens in the middle."""
    q, k, v = tokens(device)
    small = ck.compress_kv(k, v, strategy, queries=q, **STRATEGIES[strategy])
    assert small.error is not None
    assert small.error < WORST.get(strategy, 4)
    assert small.seq_len == 150
    positions = host(small.positions)
    assert positions.dtype == np.int32
    assert (np.diff(positions) > 0).all()
    assert (positions[..., -1] == 149).all()
    kept_k, kept_v = map(host, small.dense())
    assert small.dense()[0].dtype == k.dtype
    for first, count in ((149, 1), (150, 3), (130, 20), (70, 9)):
        own = first + np.arange(count)
        rows = q[:, :count]
        mask = np.repeat(positions, HEADS_Q // HEADS_KV, axis=1)[:, :, None] <= own[:, None]
        want, want_lse = reference.flash_attention(
            host(rows), kept_k, kept_v, mask=mask, return_lse=True
        )
        out, lse = small.attend(rows, first_position=first, return_lse=True)
        bound = 1e-5 if device == "cpu" else 4e-3
        assert np.abs(host(out) - want).max() < bound
        np.testing.assert_allclose(host(lse), want_lse, atol=bound)
    if device != "cpu" and strategy not in ("int8", "float8"):
        return
    paged = ck.paged_attention(q[:, -1:], *small.paged())
    assert np.abs(host(paged) - host(small.attend(q[:, -1:]))).max() < 1e-2


def test_compression_ratios() -> None:
    """Compression ratios of 16-bit keys and values with head_dim 64."""
    q, k, v = (array.astype(float16) for array in tokens("cpu", 256))
    ratios = {
        name: ck.compress_kv(k, v, name, queries=queries, budget=40, window=0).ratio
        for name, queries in (
            ("int8", None), ("float8", None), ("kivi4", None), ("kivi2", None),
            ("sink_window", None), ("snapkv", q[:, -1:]),
        )
    }  # fmt: skip
    assert ratios["int8"] == ratios["float8"] == pytest.approx(16 / (8 + 32 / 64))
    assert ratios["kivi4"] == pytest.approx(16 / (4 + 32 / 32))
    assert ratios["kivi2"] == pytest.approx(16 / (2 + 32 / 32))
    assert ratios["sink_window"] == ratios["snapkv"] == 256 / 40


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("dtype", [np.float32, float16, bfloat16], ids=str)
def test_decoded_values_are_within_half_a_step(bits: int, dtype: Any) -> None:
    """Ranges far from zero, a channel of equal values, both axes."""
    generator = np.random.default_rng(1)
    x = (generator.standard_normal((2, 64, 3, 32)) + generator.uniform(-9, 9, 32)).astype(dtype)
    x[..., 5] = 3
    for axis in (1, 3):
        stored = GroupCodes.encode(x, bits, axis=axis, group_size=16)
        assert stored.codes.nbytes == x.size * bits // 8
        values = stored.decode(np.float64)
        steps = np.repeat(stored.steps.astype(np.float64), 16, axis=axis)
        least = np.repeat(stored.least.astype(np.float64), 16, axis=axis)
        # 16-bit factors are rounded, so the codes' range may be slightly too short at either end.
        slack = 1e-6 if dtype == np.float32 else 0.01
        assert (np.abs(values - x) <= 0.5 * steps + slack * (2**bits * steps + abs(least))).all()
    assert (stored.decode()[..., 5] != 0).all()


@pytest.mark.parametrize(("seq_q", "head_dim"), [(150, 64), (1, 64), (33, 128)])
@emulated(lambda seq_q: seq_q == 33)
def test_attention_received_equals_the_sum_of_columns(
    device: str, seq_q: int, head_dim: int
) -> None:
    q, k, _ = tokens(device, head_dim=head_dim)
    received = attention_received(q[:, -seq_q:], k)
    want = probabilities(q[:, -seq_q:], k).sum((2, 3))
    assert received.shape == (2, HEADS_KV, 150)
    np.testing.assert_allclose(host(received), want, rtol=5e-3, atol=2e-4)


def test_large_sums_of_attention_fit_float16() -> None:
    """One key that receives the whole attention of 80,000 rows."""
    q = np.ones((1, 20000, 4, 8), float16)
    k = np.zeros((1, 20000, 1, 8), float16)
    with pytest.MonkeyPatch.context() as patch:
        taken: dict[str, Any] = {}

        def backward(grad_out: Any, *_: Any, **__: Any) -> Any:
            taken["weight"] = float(grad_out[0, 0, 0, 0])
            return None, None, np.full((1, 20000, 1, 8), 80000 * taken["weight"], float16)

        patch.setattr("cukit.kv_cache._key_scores.flash_attention_backward", backward)
        patch.setattr("cukit.kv_cache._key_scores.flash_attention", lambda *_, **__: (None, None))
        np.testing.assert_allclose(attention_received(q, k), 80000, rtol=1e-3)
    assert taken["weight"] == 0.25


def test_the_keys_of_a_budget() -> None:
    """Each strategy with a budget, compared with a plain implementation of its definition."""
    q, k, v = tokens("cpu", seed=3)
    weights = probabilities(q, k)
    few = ck.compress_kv(k, v, "sink_window", budget=10, sinks=3).positions
    assert (few == [0, 1, 2, *range(143, 150)]).all()

    heavy = ck.compress_kv(k, v, "heavy_hitters", queries=q, budget=30, window=10).positions
    received = weights.sum((2, 3))[..., :140]
    for b, h in np.ndindex(2, HEADS_KV):
        best = np.sort(np.argsort(-received[b, h])[:20])
        assert heavy[b, h].tolist() == [*best.tolist(), *range(140, 150)]

    snap = ck.compress_kv(k, v, "snapkv", queries=q, budget=30, window=10, pool_size=5).positions
    observed = weights[..., -10:, :140].sum((2, 3))
    padded = np.pad(observed, ((0, 0), (0, 0), (2, 2)), constant_values=-1)
    maxima = np.lib.stride_tricks.sliding_window_view(padded, 5, axis=-1).max(-1)
    for b, h in np.ndindex(2, HEADS_KV):
        best = np.sort(np.argsort(-maxima[b, h], kind="stable")[:20])
        assert snap[b, h].tolist() == [*best.tolist(), *range(140, 150)]


def test_a_key_with_all_the_attention_is_kept() -> None:
    q, k, v = tokens("cpu", seed=4)
    q[...] = k[:, 60:61].repeat(HEADS_Q // HEADS_KV, axis=2)
    errors = {
        name: ck.compress_kv(k, v, name, queries=q, budget=24)
        for name in ("sink_window", "heavy_hitters", "snapkv")
    }
    assert (errors["heavy_hitters"].positions == 60).any(-1).all()
    assert (errors["snapkv"].positions == 60).any(-1).all()
    assert errors["sink_window"].error is not None
    for name in ("heavy_hitters", "snapkv"):
        assert errors[name].error < errors["sink_window"].error  # type: ignore[operator]


def test_kept_keys_keep_the_rotation_of_their_positions() -> None:
    q, k, v = tokens("cpu", seed=5)
    angles = np.outer(np.arange(200), 10_000.0 ** (-np.arange(0, 64, 2) / 64)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    _, rotated = ck.rope(q, k, cos, sin)
    small = ck.compress_kv(rotated, v, "heavy_hitters", queries=q, budget=20)
    for head in range(HEADS_KV):
        positions = small.positions[:, head].copy()
        plain = np.take_along_axis(k[:, :, head : head + 1], positions[..., None, None], axis=1)
        again, _ = ck.rope(plain, plain, cos, sin, positions)
        np.testing.assert_allclose(small.k[:, :, head : head + 1], again, atol=1e-6)


@emulated(lambda: False)
def test_new_tokens_are_attended_to_by_merging_states(device: str) -> None:
    """Attention of new tokens over a compressed prompt and themselves."""
    q, k, v = tokens(device, seed=6)
    prompt, new = slice(0, 140), slice(140, 150)
    small = ck.compress_kv(k[:, prompt], v[:, prompt], "snapkv", queries=q[:, prompt], budget=32)
    states = [
        *small.attend(q[:, new], first_position=140, return_lse=True),
        *ck.flash_attention(q[:, new], k[:, new], v[:, new], causal=True, return_lse=True),
    ]
    out, _ = ck.merge_attention_states(*states)
    both = [
        np.concatenate([host(old), host(array[:, new])], axis=1)
        for old, array in zip(small.dense(), (k, v), strict=True)
    ]
    want = reference.flash_attention(host(q[:, new]), *both, causal=True)
    assert np.abs(host(out) - want).max() < (1e-5 if device == "cpu" else 4e-3)


def test_a_large_budget_keeps_every_key() -> None:
    q, k, v = tokens("cpu", 20)
    for name in ("sink_window", "heavy_hitters", "snapkv"):
        small = ck.compress_kv(k, v, name, queries=q, budget=99)
        assert small.num_kept == 20
        assert small.ratio == 1
        assert small.error < 1e-6  # type: ignore[operator]
    kivi = ck.compress_kv(k, v, "kivi2", queries=q)
    assert kivi.ratio == 1
    assert kivi.error == 0


def test_pooling_and_top_positions() -> None:
    scores = np.array([[[0.0, 5.0, 1.0, 1.0, 0.0, 2.0]]])
    assert pooled(scores, 3).tolist() == [[[5, 5, 5, 1, 2, 2]]]
    assert pooled(scores, 1).tolist() == scores.tolist()
    assert top_positions(scores, 8, 4).tolist() == [[[1, 5, 6, 7]]]
    assert top_positions(scores, 6, 3).tolist() == [[[1, 2, 5]]]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"strategy": "int3"}, ConfigError, "strategy must be one of 'int8', 'float8'"),
        ({"strategy": "snapkv", "budget": None}, ConfigError, "snapkv requires a budget"),
        ({"strategy": "snapkv", "queries": None}, ConfigError, "snapkv requires queries"),
        ({"strategy": "sink_window", "budget": 0}, ConfigError, "budget"),
        ({"window": -1}, ConfigError, "window"),
        ({"group_size": 0}, ConfigError, "group_size"),
        ({"strategy": "kivi2", "group_size": 48, "window": 0}, ArrayError, "must divide axis 3"),
        ({"v": np.zeros((1, 99, 2, 64), np.float32)}, ArrayError, "v must have shape"),
        ({"v": np.zeros((1, 100, 2, 64), np.float16)}, ArrayError, "v"),
        ({"k": np.zeros((1, 100, 128), np.float32)}, ArrayError, "k"),
        ({"queries": np.zeros((1, 101, 2, 64), np.float32)}, ArrayError, "have 1 to 100 tokens"),
        ({"queries": np.zeros((1, 3, 3, 64), np.float32)}, ArrayError, "multiple of k's 2 heads"),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    zeros = np.zeros((1, 100, 2, 64), np.float32)
    arguments = {"k": zeros, "v": zeros, "strategy": "int8", "queries": zeros, "budget": 10}
    ck.compress_kv(**arguments)
    with pytest.raises(error, match=message):
        ck.compress_kv(**(arguments | change))
