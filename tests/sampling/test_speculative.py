"""speculative_verify: against the reference, the target's distribution, odd drafts."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.errors import ArrayDtypeError, ArrayShapeError
from cukit.reference import sampling as reference
from cukit.sampling import sample, speculative_verify
from tests.contract import DTYPES, another_order, random, to_device, to_host
from tests.quick_run import possible
from tests.sampling.test_sample import deviation

SHAPES = [(4, 0, 50), (5, 3, 300), (2, 2, 5000)]
LARGE = [(16, 4, 128256), (40, 2, 32001)]
OPTIONS = [{}, {"top_k": 20, "top_p": 0.95}, {"temperature": 0}, {"top_p": 0.8, "min_p": 0.01}]


def probabilities(rng, shape):
    logits = rng.standard_normal(shape) * 2
    weights = np.exp(logits)
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES + LARGE, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@possible(lambda device, shape: device == "gpu" or shape in SHAPES)
def test_matches_reference(device, rng, shape, options, drawn, dtype):
    batch, num_drafts, vocab_size = shape
    logits = random(rng, (batch, num_drafts + 1, vocab_size), dtype, scale=2)
    # Every other draft is the target's favourite: some are accepted.
    drafts = rng.integers(0, vocab_size, (batch, num_drafts)).astype(np.int32)
    likely = logits[:, :num_drafts].astype(np.float32).argmax(axis=-1)
    drafts = np.where(rng.random(drafts.shape) < 0.7, likely, drafts).astype(np.int32)
    probs = probabilities(rng, (batch, num_drafts, vocab_size)) if drawn else None
    placed = to_device(device, drafts, logits, probs)
    bits = None
    for repeat in range(2):
        with another_order(device, repeat):
            got = speculative_verify(*placed[:2], draft_probs=placed[2], seed=8, step=5, **options)
        now = [to_host(part).tobytes() for part in got]
        assert bits in (None, now)
        bits = now
    wide = reference.speculative_verify(
        drafts, logits.astype(np.float64), draft_probs=probs, seed=8, step=5, **options
    )
    np.testing.assert_array_equal(to_host(got.num_accepted), wide.num_accepted)
    np.testing.assert_array_equal(to_host(got.tokens), wide.tokens)


def test_without_drafts_it_is_sample(device, rng):
    logits = random(rng, (6, 1, 900), "float32")
    drafts, x = to_device(device, np.zeros((6, 0), np.int32), logits)
    verified = speculative_verify(drafts, x, top_p=0.9, seed=3, step=8)
    alone = sample(x[:, 0], top_p=0.9, seed=3, step=8)
    np.testing.assert_array_equal(to_host(verified.tokens)[:, 0], to_host(alone.tokens))
    assert not to_host(verified.num_accepted).any()


def test_a_perfect_draft_is_accepted_whole(device, rng):
    logits = random(rng, (8, 4, 400), "float32")
    exact = np.exp(logits.astype(np.float64))
    exact /= exact.sum(axis=-1, keepdims=True)
    drafts = rng.integers(0, 400, (8, 3)).astype(np.int32)
    arrays = to_device(device, drafts, logits, (exact[:, :3] * (1 - 1e-6)).astype(np.float32))
    verified = speculative_verify(arrays[0], arrays[1], draft_probs=arrays[2], seed=1)
    assert (to_host(verified.num_accepted) == 3).all()
    np.testing.assert_array_equal(to_host(verified.tokens)[:, :3], drafts)


def test_tokens_outside_the_vocabulary_end_a_draft(device, rng):
    logits = random(rng, (3, 3, 64), "float32")
    best = logits.argmax(axis=-1)
    drafts = best[:, :2].astype(np.int32)
    drafts[0, 0], drafts[1, 1], drafts[2, 1] = -1, 64, best[2, 1]
    placed = to_device(device, drafts, logits)
    verified = speculative_verify(*placed, temperature=0)
    np.testing.assert_array_equal(to_host(verified.num_accepted), [0, 1, 2])
    expected = best.copy()
    expected[0, 1:], expected[1, 2:] = -1, -1
    np.testing.assert_array_equal(to_host(verified.tokens), expected)


def test_refused_logits_end_a_draft(device, rng):
    logits = random(rng, (2, 3, 64), "float32")
    drafts = logits.argmax(axis=-1)[:, :2].astype(np.int32)
    logits[0, 1, 5] = np.nan
    verified = speculative_verify(*to_device(device, drafts, logits), temperature=0)
    np.testing.assert_array_equal(to_host(verified.num_accepted), [-1, 2])
    np.testing.assert_array_equal(to_host(verified.tokens)[0], [drafts[0, 0], -1, -1])


@pytest.mark.parametrize("drawn", [pytest.param(True, marks=pytest.mark.slow), False])
def test_texts_have_the_target_s_distribution(device, rng, drawn):
    """The first token, whatever the draft."""
    draws = {"cpu": 10**6, "gpu": 10**6, "emulator": 2000}[device]
    logits = random(rng, (1, 2, 12), "float32", scale=1.5)
    exact = np.exp(logits[0, 0].astype(np.float64))
    exact /= exact.sum()
    probs = probabilities(rng, (1, 1, 12))
    tokens = []
    for begin in range(0, draws, 100_000):
        count = min(100_000, draws - begin)
        drafts = np.full((count, 1), 5)
        if drawn:
            drafts = rng.choice(12, (count, 1), p=probs[0, 0] / probs.sum(dtype=np.float64))
        placed = to_device(
            device,
            drafts.astype(np.int32),
            np.repeat(logits, count, axis=0),
            np.repeat(probs, count, axis=0) if drawn else None,
        )
        verified = speculative_verify(*placed[:2], draft_probs=placed[2], seed=begin)
        tokens.append(to_host(verified.tokens)[:, 0])
    assert deviation(np.concatenate(tokens), exact) < 5


def test_errors_name_the_argument():
    drafts, logits = np.zeros((2, 3), np.int32), np.zeros((2, 4, 9), np.float32)
    with pytest.raises(ArrayDtypeError, match="draft_tokens must be int32"):
        speculative_verify(drafts.astype(np.int64), logits)
    with pytest.raises(ArrayShapeError, match=r"logits must have shape \(2, 4, any\)"):
        speculative_verify(drafts, logits[:, :3].copy())
    with pytest.raises(ArrayShapeError, match=r"draft_probs must have shape \(2, 3, 9\)"):
        speculative_verify(drafts, logits, draft_probs=np.zeros((2, 3, 8), np.float32))
