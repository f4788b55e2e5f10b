"""speculative_verify: against the reference, the target's distribution, invalid drafts."""

from __future__ import annotations

import numpy as np
import pytest

import cukit
from cukit.core.arrays import namespace
from cukit.errors import ArrayDtypeError, ArrayShapeError
from cukit.reference import sampling as reference
from cukit.sampling import sample, speculative_verify
from tests.contract import DTYPES, another_order, random, to_device, to_host
from tests.quick_run import possible
from tests.sampling.test_sample import chi_square_deviate, large_rows

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
    # About 70% of the drafts are the target's most likely token, so that some are accepted.
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


def streamed(device, placed, **options):
    """Results of the same requests in a batch or for sm_80: one thread block streams each row."""
    if device == "emulator":
        with cukit.backend("emulator", arch="sm_80"):
            return speculative_verify(*placed[:2], draft_probs=placed[2], **options)
    times = 20 if device == "gpu" else 1
    drafts, logits, probs = (
        part if part is None else namespace(part).tile(part, (times,) + (1,) * (part.ndim - 1))
        for part in placed
    )
    verified = speculative_verify(drafts, logits, draft_probs=probs, **options)
    return [part[: len(placed[0])] for part in verified]


@pytest.mark.parametrize("kind", ["normal", "flat"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 300, "top_p": 0.9},
        {"top_k": 1000, "min_p": 1e-3},
    ],
    ids=str,
)
@pytest.mark.parametrize("drawn", [True, False])
def test_drafts_of_large_rows(device, rng, kind, options, drawn):
    """Rows in the shared memory of a cluster; rows that a block reads once, twice or more often."""
    logits = np.repeat(large_rows(rng, kind, 40000)[:, None], 2, axis=1)
    best, second = logits[:, 0].argsort(axis=-1)[:, -1], logits[:, 0].argsort(axis=-1)[:, -2]
    drafts = np.array([[best[0]], [second[1]]], np.int32)
    probs = None
    if drawn:
        # The first draft is accepted; the second is almost certainly rejected.
        probs = np.exp(logits[:, :1].astype(np.float64))
        probs /= probs.sum(axis=-1, keepdims=True)
        probs[0, 0, best[0]] /= 2
        probs[1, 0, ::2] /= 2
        probs[1, 0, second[1]] = 1
        probs = probs.astype(np.float32)
    placed = to_device(device, drafts, logits, probs)
    for seed in (3,) if device == "emulator" else (3, 5, 8):
        got = speculative_verify(*placed[:2], draft_probs=placed[2], seed=seed, **options)
        other = streamed(device, placed, seed=seed, **options)
        wide = reference.speculative_verify(
            drafts, logits.astype(np.float64), draft_probs=probs, seed=seed, **options
        )
        for mine, theirs, exact in zip(got, other, wide, strict=True):
            np.testing.assert_array_equal(to_host(mine), exact)
            np.testing.assert_array_equal(to_host(theirs), exact)


@pytest.mark.parametrize("options", [{}, {"top_k": 9}, {"top_p": 0.9}], ids=str)
def test_a_rejected_draft_without_residual_probability(device, options):
    """If no target probability exceeds the draft's, the token is drawn from the target."""
    logits = np.full((2, 2, 600), -np.inf, np.float32)
    logits[..., 44] = 1
    drafts = np.array([[44], [43]], np.int32)
    probs = np.ones((2, 1, 600), np.float32)
    probs[0, 0, 44] = 1e9  # not a probability: rejected, although the target has no other token
    placed = to_device(device, drafts, logits, probs)
    for given in (placed[2], None):
        verified = speculative_verify(*placed[:2], draft_probs=given, seed=1, **options)
        accepted = to_host(verified.num_accepted).tolist()
        assert accepted == ([1, 0] if given is None else [0, 0])
        expected = np.where(np.arange(2) <= np.array(accepted)[:, None], 44, -1)
        np.testing.assert_array_equal(to_host(verified.tokens), expected)


def test_options_of_each_request(device, rng):
    """Each request equals a separate call with scalar options."""
    batch, num_drafts, vocab_size = 5, 2, 3000
    logits = random(rng, (batch, num_drafts + 1, vocab_size), "float32", scale=3)
    drafts = logits[:, :num_drafts].argmax(axis=-1).astype(np.int32)
    probs = probabilities(rng, (batch, num_drafts, vocab_size))
    probs[::2] = logits[::2, :num_drafts] == logits[::2, :num_drafts].max(axis=-1, keepdims=True)
    arrays = {
        "temperature": np.array([1, 0, 0.7, 3, 1], np.float32),
        "top_k": np.array([0, 5, 40, 700, 0], np.int32),
        "top_p": np.array([1, 0.5, 0.9, 0.3, 0.8], np.float32),
        "min_p": np.array([0, 0.1, 0, 0.05, 0.01], np.float32),
        "seed": rng.integers(-(1 << 62), 1 << 62, batch),
        "step": rng.integers(0, 1 << 62, batch),
    }
    placed = to_device(device, drafts, logits, probs, *arrays.values())
    each = dict(zip(arrays, placed[3:], strict=True))
    together = speculative_verify(*placed[:2], draft_probs=placed[2], **each)
    for request in range(batch):
        numbers = {name: values[request].item() for name, values in arrays.items()}
        numbers["top_k"] = numbers["top_k"] or None
        own = [part[request : request + 1] for part in placed[:3]]
        alone = speculative_verify(*own[:2], draft_probs=own[2], **numbers)
        for mine, single in zip(together, alone, strict=True):
            np.testing.assert_array_equal(to_host(mine)[request], to_host(single)[0])
    wide = reference.speculative_verify(
        drafts, logits.astype(np.float64), draft_probs=probs, **arrays
    )
    np.testing.assert_array_equal(to_host(together.tokens), wide.tokens)
    np.testing.assert_array_equal(to_host(together.num_accepted), wide.num_accepted)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("drawn", [True, False])
def test_a_request_alone_and_in_a_batch(rng, options, drawn):
    """Results are equal for all sizes of clusters and thread blocks."""
    logits = random(rng, (100, 3, 32000), "float32", scale=2)
    drafts = logits[:, :2].argmax(axis=-1).astype(np.int32)
    probs = probabilities(rng, (100, 2, 32000)) if drawn else None
    placed = to_device("gpu", drafts, logits, probs)
    together = speculative_verify(*placed[:2], draft_probs=placed[2], seed=7, **options)
    for request in (0, 7, 99):
        own = [part if part is None else part[request : request + 1] for part in placed]
        alone = speculative_verify(*own[:2], draft_probs=own[2], seed=7 + request, **options)
        for mine, single in zip(together, alone, strict=True):
            np.testing.assert_array_equal(to_host(mine)[request], to_host(single)[0])


def test_equals_sample_without_drafts(device, rng):
    logits = random(rng, (6, 1, 900), "float32")
    drafts, x = to_device(device, np.zeros((6, 0), np.int32), logits)
    verified = speculative_verify(drafts, x, top_p=0.9, seed=3, step=8)
    alone = sample(x[:, 0], top_p=0.9, seed=3, step=8)
    np.testing.assert_array_equal(to_host(verified.tokens)[:, 0], to_host(alone.tokens))
    assert not to_host(verified.num_accepted).any()


def test_a_perfect_draft_is_accepted_completely(device, rng):
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


def test_invalid_logits_end_a_draft(device, rng):
    logits = random(rng, (2, 3, 64), "float32")
    drafts = logits.argmax(axis=-1)[:, :2].astype(np.int32)
    logits[0, 1, 5] = np.nan
    verified = speculative_verify(*to_device(device, drafts, logits), temperature=0)
    np.testing.assert_array_equal(to_host(verified.num_accepted), [-1, 2])
    np.testing.assert_array_equal(to_host(verified.tokens)[0], [drafts[0, 0], -1, -1])


@pytest.mark.parametrize("drawn", [pytest.param(True, marks=pytest.mark.slow), False])
def test_first_tokens_follow_the_distribution_of_the_target(device, rng, drawn):
    """The first token has the distribution of the target for any distribution of drafts."""
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
    assert chi_square_deviate(np.concatenate(tokens), exact) < 5


def test_errors_name_the_argument():
    drafts, logits = np.zeros((2, 3), np.int32), np.zeros((2, 4, 9), np.float32)
    with pytest.raises(ArrayDtypeError, match="draft_tokens must be int32"):
        speculative_verify(drafts.astype(np.int64), logits)
    with pytest.raises(ArrayShapeError, match=r"logits must have shape \(2, 4, any\)"):
        speculative_verify(drafts, logits[:, :3].copy())
    with pytest.raises(ArrayShapeError, match=r"draft_probs must have shape \(2, 3, 9\)"):
        speculative_verify(drafts, logits, draft_probs=np.zeros((2, 3, 8), np.float32))
