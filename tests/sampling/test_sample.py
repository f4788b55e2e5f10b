"""sample: each option against the reference, ties, invalid rows, distributions, plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cukit
from cukit.core.arrays import namespace
from cukit.core.device import TYPICAL_DEVICES
from cukit.errors import ArrayDtypeError, ArrayShapeError, ConfigError
from cukit.reference import sampling as reference
from cukit.sampling import sample, speculative_verify
from cukit.sampling._plan import plan_sample
from tests.contract import DTYPES, another_order, dtype_of, random, to_device, to_host
from tests.quick_run import possible

OPTIONS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_k": 40, "top_p": 0.9, "logprobs": 3},
    {"top_p": 0.9, "logprobs": 0},
    {"min_p": 0.02, "temperature": 1.5},
    {"top_k": 700, "top_p": 0.8, "min_p": 0.001},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.02, "top_k": 30, "logprobs": 30},
]
# Thread blocks in which most threads are idle, full thread blocks, odd vocabularies, clusters.
SHAPES = [(5, 33), (4, 1000), (2, 9000)]
LARGE = [
    (3, 1),
    (2, 6001),
    (1, 128256),
    (64, 128256),
    (300, 50257),
    (7, 151936),
    (200, 32000),
    (2, 1 << 20),
]


def results_of(device, placed, **options):
    """Results of a run; a second run must be bitwise equal."""
    runs = []
    for repeat in range(2):
        with another_order(device, repeat):
            runs.append(sample(placed, **options))
    for first, again in zip(*runs, strict=True):
        assert (first is None) == (again is None)
        if first is not None:
            assert to_host(first).tobytes() == to_host(again).tobytes()
    return runs[0]


def assert_same(got, wide, logprob_error=2e-5):
    for name, mine, exact in zip(got._fields, got, wide, strict=True):
        assert (mine is None) == (exact is None), name
        if mine is None:
            continue
        mine, exact = to_host(mine), to_host(exact)
        if mine.dtype.kind == "i":
            np.testing.assert_array_equal(mine, exact, err_msg=name)
        else:
            np.testing.assert_allclose(mine, exact, rtol=2e-6, atol=logprob_error, err_msg=name)


@pytest.mark.parametrize("shape", SHAPES + LARGE, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@possible(lambda device, shape: device == "gpu" or shape in SHAPES)
def test_matches_reference(device, rng, shape, options, dtype):
    logits = random(rng, shape, dtype, scale=3)
    options = dict(options, seed=int(rng.integers(1 << 60)), step=int(rng.integers(1 << 40)))
    if options.get("logprobs"):
        options["logprobs"] = min(options["logprobs"], shape[1])
    got = results_of(device, *to_device(device, logits), **options)
    wide = reference.sample(logits.astype(np.float64), **options)
    if dtype != "float32" and shape[1] > 10000:  # hundreds of ties
        got, wide = got._replace(top_tokens=None), wide._replace(top_tokens=None)
    assert_same(got, wide)


def test_options_of_each_request(device, rng):
    """Each row equals a separate call with scalar options."""
    batch, vocab_size = 6, 3000
    logits = random(rng, (batch, vocab_size), "float32", scale=3)
    history = rng.integers(-1, vocab_size, (batch, 40)).astype(np.int32)
    arrays: dict[str, Any] = {
        "temperature": np.array([1, 0, 0.7, 3, 1, 0.5], np.float32),
        "top_k": np.array([0, 5, 40, 1000, 1, 3000], np.int32),
        "top_p": np.array([1, 0.5, 0.9, 0.3, 1, 0], np.float32),
        "min_p": np.array([0, 0.1, 0, 0.05, 1, 0.2], np.float32),
        "repetition_penalty": np.array([1, 1.2, 2, 0.5, 1, 1.1], np.float32),
        "presence_penalty": np.array([0, 0.5, -1, 2, 0, 1], np.float32),
        "frequency_penalty": np.array([0, 0.1, 0.3, -0.2, 0, 1], np.float32),
        "seed": rng.integers(-(1 << 62), 1 << 62, batch),
        "step": rng.integers(0, 1 << 62, batch),
    }
    lengths = np.array([0, 40, 10, 20, 50, 5], np.int32)
    names = list(arrays)
    placed = dict(zip(names, to_device(device, *arrays.values()), strict=True))
    x, text, prompts = to_device(device, logits, history, lengths)
    together = results_of(device, x, history=text, prompt_lengths=prompts, logprobs=2, **placed)
    for row in range(batch):
        numbers = {name: values[row].item() for name, values in arrays.items()}
        numbers["top_k"] = numbers["top_k"] or None
        alone = sample(
            x[row : row + 1],
            history=text[row : row + 1],
            prompt_lengths=prompts[row : row + 1],
            logprobs=2,
            **numbers,
        )
        for mine, single in zip(together, alone, strict=True):
            assert to_host(mine)[row].tobytes() == to_host(single)[0].tobytes(), row
    wide = reference.sample(
        logits.astype(np.float64), history=history, prompt_lengths=lengths, logprobs=2, **arrays
    )
    assert_same(together, wide)


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 0.5), ("top_k", 5), ("top_p", 0.5), ("min_p", 0.1)]
)
def test_one_option_of_each_request(device, rng, name, value):
    """An array of equal values gives the same tokens as the scalar."""
    (x,) = to_device(device, random(rng, (3, 100), "float32"))
    (each,) = to_device(device, np.full(3, value, np.int32 if name == "top_k" else np.float32))
    mine = to_host(sample(x, seed=7, **{name: each}).tokens)
    assert mine.tolist() == to_host(sample(x, seed=7, **{name: value}).tokens).tolist()


def test_ties_go_to_the_lowest_token(device):
    logits = np.full((2, 4097), -1, np.float32)
    logits[0, 7:2500:3] = 2  # 831 of them
    logits[1, [3, 5, 900]] = 0.0, -0.0, 0.0
    (x,) = to_device(device, logits)
    cases = ((1, 7), (2, 10), (830, 7 + 829 * 3), (600, 7 + 599 * 3))
    seeds = range(8 if device == "emulator" else 25)
    for top_k, last in cases[:2] if device == "emulator" else cases:
        tokens = [int(to_host(sample(x, top_k=top_k, seed=s).tokens)[0]) for s in seeds]
        assert set(tokens) <= set(range(7, last + 1, 3))
        assert top_k > 2 or len(set(tokens)) == top_k
    listed = sample(x, top_k=1, logprobs=4)
    np.testing.assert_array_equal(to_host(listed.top_tokens), [[7, 10, 13, 16], [3, 5, 900, 0]])
    np.testing.assert_array_equal(to_host(sample(x, temperature=0).tokens), [7, 3])
    np.testing.assert_array_equal(to_host(sample(x, top_p=0).tokens), [7, 3])


@pytest.mark.parametrize("options", [{"top_k": 20}, {"top_k": 600}, {"top_p": 0.25}], ids=str)
def test_rows_of_equal_logits(device, options):
    """More candidates than a list holds: radix select continues with digits of the token ids."""
    vocab_size = 4000
    logits = np.full((12, vocab_size), 0.625, np.float32)
    (x,) = to_device(device, logits)
    tokens = to_host(results_of(device, x, seed=3, **options).tokens)
    np.testing.assert_array_equal(tokens, reference.sample(logits, seed=3, **options).tokens)
    kept = options.get("top_k") or int(vocab_size * options["top_p"])
    assert tokens.max() < kept
    assert tokens.max() > kept / 2


def test_the_largest_vocabulary_with_equal_logits(device):
    """All tokens are in one bin, with the largest possible sum of weights."""
    logits = np.full((1, 1 << 20), 0.625, np.float32)
    (x,) = to_device(device, logits)
    tokens = to_host(sample(x, seed=3, top_p=0.25).tokens)
    np.testing.assert_array_equal(tokens, reference.sample(logits, seed=3, top_p=0.25).tokens)


def streamed(device, placed, **options):
    """Results of the same rows in a batch or for sm_80, where one thread block streams each row."""
    if device == "emulator":
        with cukit.backend("emulator", arch="sm_80"):
            return sample(placed, **options)
    rows = len(placed)
    batch = namespace(placed).tile(placed, (20, 1)) if device == "gpu" else placed
    return [each if each is None else each[:rows] for each in sample(batch, **options)]


def large_rows(rng, kind, vocab_size):
    """Rows of several rounds with few, many or adjacent candidates, or more than the list holds."""
    z = rng.standard_normal((2, vocab_size))
    ramp = np.linspace(-8, 8, vocab_size)
    if kind == "normal":
        z *= 3
    elif kind == "peaked":
        z[:, rng.integers(0, vocab_size, 3)] += 16
    elif kind == "low ids":
        z -= np.linspace(0, 30, vocab_size) ** 0.8
    elif kind in ("rising", "falling"):
        z = np.stack([ramp, ramp + 1])[:, :: 1 if kind == "rising" else -1]
    elif kind == "masked":
        z[:, rng.random(vocab_size) < 0.97] = -np.inf
    return z.astype(np.float32)


@pytest.mark.parametrize("kind", ["normal", "flat", "peaked", "low ids", "rising", "masked"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logprobs": 3},
        {"top_p": 0.9},
        {"top_p": 0.99, "min_p": 1e-3, "logprobs": 0},
        {"min_p": 0.1},
        {"top_k": 1000, "top_p": 0.8},
        {"top_k": 300, "logprobs": 2},
    ],
    ids=str,
)
def test_candidates_of_large_rows(device, rng, kind, options):
    """Rows in the shared memory of a cluster; rows that a block reads once, twice or more often."""
    if device == "emulator" and (kind == "masked") != ("logprobs" in options):
        pytest.skip("every option and every kind once")
    logits = large_rows(rng, kind, 33333 if kind == "peaked" else 40000)
    options = dict(options, seed=int(rng.integers(1 << 60)))
    (x,) = to_device(device, logits)
    got = results_of(device, x, **options)
    assert_same(got, reference.sample(logits.astype(np.float64), **options))
    for mine, other in zip(got, streamed(device, x, **options), strict=True):
        assert (mine is None) or to_host(mine).tobytes() == to_host(other).tobytes()
    # An array of default values selects another kernel, which handles each row by its options.
    name = "min_p" if "top_p" in options else "top_p"
    if name not in options:
        (each,) = to_device(device, np.full(2, 1 if name == "top_p" else 0, np.float32))
        for mine, other in zip(got, sample(x, **{name: each}, **options), strict=True):
            assert (mine is None) or to_host(mine).tobytes() == to_host(other).tobytes()


def test_draws_do_not_depend_on_the_alignment(device, rng):
    """Accesses of one logit and of four."""
    logits = random(rng, (3, 20000), "float32", scale=2)
    (x, padded) = to_device(device, logits, np.append(logits.reshape(-1), np.float32(0)))
    shifted = to_device(device, np.append(np.float32(0), logits.reshape(-1)))[0]
    for options in ({}, {"logprobs": 0}, {"top_p": 0.8, "logprobs": 0}):
        first = sample(x, seed=5, **options)
        for other in (padded[:-1], shifted[1:]):
            again = sample(other.reshape(3, 20000), seed=5, **options)
            for mine, theirs in zip(first, again, strict=True):
                assert (mine is None) or to_host(mine).tobytes() == to_host(theirs).tobytes()


@pytest.mark.emulator
def test_rising_logits_fill_the_list_twice():
    """Every logit exceeds the threshold from the first round, so the list overflows at first."""
    logits = np.linspace(-5, 5, 33000, dtype=np.float32)[None]
    with cukit.backend("emulator", arch="sm_80"):
        got = sample(logits, top_k=50, logprobs=3, seed=2)
    assert_same(got, reference.sample(logits.astype(np.float64), top_k=50, logprobs=3, seed=2))


@pytest.mark.parametrize("spread", [pytest.param(1e-6, marks=pytest.mark.slow), 1e-3], ids=str)
def test_logits_that_differ_in_their_last_bits(device, rng, spread):
    """Thousands of tokens are in one bin of the first round."""
    logits = (8 + random(rng, (2, 5000), "float32") * spread).astype(np.float32)
    (x,) = to_device(device, logits)
    for options in ({"top_k": 30, "logprobs": 5}, {"top_p": 0.5}, {"top_k": 2000, "top_p": 0.5}):
        got = results_of(device, x, seed=9, **options)
        assert_same(got, reference.sample(logits.astype(np.float64), seed=9, **options))


def test_masked_tokens_are_never_drawn(device):
    logits = np.full((4, 700), -np.inf, np.float32)
    logits[:, 13], logits[:, 600] = 1, 1
    logits[3, 600] = -np.inf
    (x,) = to_device(device, logits)
    for options in ({}, {"top_k": 50}, {"top_k": 50, "top_p": 0.999}, {"top_p": 0.999}):
        drawn = [
            to_host(sample(x, seed=seed, logprobs=4, **options).tokens).tolist()
            for seed in range(0, 40, 4)
        ]
        assert {token for row in drawn for token in row} == {13, 600}
        assert all(row[3] == 13 for row in drawn)
    listed = to_host(sample(x, logprobs=4).top_logprobs)
    np.testing.assert_allclose(listed[0, :2], np.log(0.5), rtol=1e-6)
    assert np.isneginf(listed[0, 2:]).all()


def test_invalid_rows_get_no_token_and_do_not_affect_others(device, rng):
    logits = random(rng, (10, 900), "float32")
    logits[1, 800], logits[2, 3], logits[3] = np.nan, np.inf, -np.inf
    options = {
        "temperature": np.array([1, 1, 1, 1, -1, np.nan, 1, 1, np.inf, 1], np.float32),
        "top_k": np.array([5, 5, 5, 5, 5, 5, -2, 5, 5, 5], np.int32),
        "top_p": np.array([1, 1, 1, 1, 1, 1, 1, np.nan, 1, 1.01], np.float32),
    }
    placed = dict(zip(options, to_device(device, *options.values()), strict=True))
    (x,) = to_device(device, logits)
    got = sample(x, logprobs=2, **placed)
    assert (to_host(got.tokens)[1:] == -1).all()
    assert np.isnan(to_host(got.logprobs)[1:]).all()
    assert (to_host(got.top_tokens)[1:] == -1).all()
    assert np.isnan(to_host(got.top_logprobs)[1:]).all()
    assert to_host(got.tokens)[0] == to_host(sample(x[:1], top_k=5).tokens)[0]
    assert_same(got, reference.sample(logits, logprobs=2, **options))


def test_rows_with_invalid_penalties_get_no_token(device, rng):
    logits = random(rng, (6, 900), "float32")
    penalties = {
        "repetition_penalty": np.array([1.1, 0, -1, np.inf, 1, 1], np.float32),
        "presence_penalty": np.array([0.1, 0, 0, 0, np.nan, 0], np.float32),
        "frequency_penalty": np.array([0.1, 0, 0, 0, 0, np.inf], np.float32),
    }
    history = np.full((6, 1), -1, np.int32)
    history[0] = 7
    placed = dict(zip(penalties, to_device(device, *penalties.values()), strict=True))
    x, text = to_device(device, logits, history)
    got = to_host(sample(x, history=text, top_k=5, **placed).tokens)
    assert got[0] >= 0
    assert (got[1:] == -1).all()
    wide = reference.sample(logits.astype(np.float64), history=history, top_k=5, **penalties)
    np.testing.assert_array_equal(got, wide.tokens)


@pytest.mark.parametrize("temperature", [1e-50, 1e-42])
def test_temperatures_that_float32_cannot_represent_are_0(device, rng, temperature):
    (x,) = to_device(device, random(rng, (3, 600), "float32"))
    greedy = to_host(x).argmax(axis=1)
    (each,) = to_device(device, np.full(3, temperature, np.float32))
    for value in (temperature, each):
        np.testing.assert_array_equal(to_host(sample(x, temperature=value).tokens), greedy)


def test_bounds_of_the_options(device, rng):
    logits = random(rng, (3, 2000), "float32")
    (x,) = to_device(device, logits)
    plain = to_host(sample(x, seed=4).tokens)
    for options in ({"top_k": 2000}, {"top_k": 5000}, {"top_p": 1.0}, {"min_p": 0.0}):
        np.testing.assert_array_equal(to_host(sample(x, seed=4, **options).tokens), plain)
    best = logits.argmax(axis=1)
    for options in ({"top_k": 1}, {"top_p": 0}, {"min_p": 1}, {"temperature": 0}):
        np.testing.assert_array_equal(to_host(sample(x, seed=4, **options).tokens), best)


def test_the_token_that_reaches_top_p_is_kept(device):
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    (x,) = to_device(device, np.repeat(logits, 60, axis=0))
    for top_p, kept in ((0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.9, 4)):
        tokens = to_host(sample(x, top_p=top_p, seed=1).tokens)
        assert set(tokens.tolist()) == set(range(kept)), top_p


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [option for option in OPTIONS if "logprobs" not in option], ids=str
)
@pytest.mark.emulator
def test_clusters_and_single_blocks_agree(rng, options):
    """`sample`, and `speculative_verify` without drafts."""
    logits = random(rng, (2, 20000), "float32", scale=2)
    options = dict(options, seed=5)
    tokens = []
    for arch in ("sm_80", "sm_90"):
        with cukit.backend("emulator", arch=arch):
            tokens.append(sample(logits, **options).tokens)
            drafts = np.zeros((2, 0), np.int32)
            verified = speculative_verify(drafts, logits[:, None], **options)
            tokens.append(verified.tokens[:, 0])
    assert all(np.array_equal(tokens[0], other) for other in tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_row_alone_and_in_a_batch(rng, options):
    """Results are bitwise equal for all sizes of clusters and thread blocks."""
    logits = random(rng, (300, 32000), "float32", scale=2)
    (x,) = to_device("gpu", logits)
    together = sample(x, seed=100, **options)
    for row in (0, 7, 299):
        alone = sample(x[row : row + 1], seed=100 + row, **options)
        for mine, single in zip(together, alone, strict=True):
            if mine is not None:
                assert to_host(mine)[row].tobytes() == to_host(single)[0].tobytes()


# Distribution ----------------------------------------------------------------------------------


def chi_square_deviate(tokens, probabilities):
    """The chi-square statistic as a standard normal deviate (Wilson and Hilferty); rare tokens are
    counted together."""
    draws = tokens.size
    counts = np.bincount(tokens, minlength=probabilities.size).astype(np.float64)
    assert not counts[probabilities == 0].any()
    rare = probabilities * draws < 10
    expected = np.append(probabilities[~rare], probabilities[rare].sum()) * draws
    observed = np.append(counts[~rare], counts[rare].sum())
    present = expected > 0
    statistic = ((observed - expected)[present] ** 2 / expected[present]).sum()
    freedom = max(int(present.sum()) - 1, 1)
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread)


DISTRIBUTIONS: list[dict[str, Any]] = [
    {},
    {"top_k": 7},
    {"top_p": 0.7, "temperature": 1.3},
    {"top_k": 12, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", DISTRIBUTIONS, ids=str)
def test_draws_follow_the_distribution(device, rng, options):
    draws = {"cpu": 10**6, "gpu": 10**6, "emulator": 3000}[device]
    logits = random(rng, (1, 24), "float32", scale=1.5)
    rows = reference._Rows(
        np,
        logits.astype(np.float64),
        *(options.get(name) for name in ("temperature", "top_k", "top_p", "min_p")),
    )
    exact = rows.weights[0] / rows.weights.sum()
    for stream in ("seeds", "steps"):
        tokens = []
        for begin in range(0, draws, 100_000):
            count = min(100_000, draws - begin)
            numbers = np.arange(begin, begin + count)
            (x, steps) = to_device(device, np.repeat(logits, count, axis=0), numbers)
            same = to_device(device, np.full(count, 11))[0]
            drawn = (
                sample(x, seed=begin, **options)
                if stream == "seeds"
                else sample(x, seed=same, step=steps, **options)
            )
            tokens.append(to_host(drawn.tokens))
        assert chi_square_deviate(np.concatenate(tokens), exact) < 5


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"top_k": 50}, {"top_p": 0.9}], ids=str)
def test_a_million_draws_of_a_large_vocabulary(rng, options):
    import cupy

    logits = random(rng, (1, 128256), "float32", scale=2)
    rows = reference._Rows(
        np,
        logits.astype(np.float64),
        *(options.get(name) for name in ("temperature", "top_k", "top_p", "min_p")),
    )
    exact = rows.weights[0] / rows.weights.sum()
    x = cupy.repeat(cupy.asarray(logits), 4000, axis=0)
    tokens = [to_host(sample(x, seed=i * 4000, **options).tokens) for i in range(250)]
    assert chi_square_deviate(np.concatenate(tokens), exact) < 5


def test_random_numbers_are_philox():
    """A known answer of the Random123 library, and the mean of 100,000 numbers."""
    full = np.array([2**64 - 1], np.uint64)
    zero = np.zeros(1, np.uint64)
    assert int(reference.philox_uint64(zero, zero, 0)[0]) == 0xE169C58D6627E8D5
    uniform = reference.philox_uint64(np.arange(100_000).astype(np.uint64), full.repeat(100_000), 1)
    assert abs((uniform * 2.0**-64).mean() - 0.5) < 0.005


# Errors and the plan ---------------------------------------------------------------------------


def test_errors_name_the_argument():
    logits = np.zeros((3, 8), np.float32)
    with pytest.raises(ArrayDtypeError, match="sample: logits must be float32"):
        sample(logits.astype(np.int32))
    with pytest.raises(ArrayShapeError, match="logits must have 2 axes"):
        sample(logits[0])
    with pytest.raises(ConfigError, match="logits must have at least one token"):
        sample(logits[:, :0])
    with pytest.raises(ConfigError, match="temperature must be a finite number of 0 or more"):
        sample(logits, temperature=-1)
    with pytest.raises(ConfigError, match="top_k must be an integer of 1 or more, got 0"):
        sample(logits, top_k=0)
    with pytest.raises(ConfigError, match="top_p must be a finite number of 0 or more and at most"):
        sample(logits, top_p=1.5)
    with pytest.raises(ConfigError, match="repetition_penalty must be a finite number above 0"):
        sample(logits, repetition_penalty=0)
    with pytest.raises(ArrayDtypeError, match="seed must be int64"):
        sample(logits, seed=np.zeros(3, np.int32))
    with pytest.raises(ArrayShapeError, match=r"top_k must have shape \(3,\), got \(2,\)"):
        sample(logits, top_k=np.ones(2, np.int32))
    with pytest.raises(ConfigError, match=r"logprobs must be at most 8 \(tokens\), got 9"):
        sample(logits, logprobs=9)
    with pytest.raises(ArrayShapeError, match=r"history must have shape \(3, any\)"):
        sample(logits, history=np.zeros((2, 5), np.int32))


def test_an_empty_batch(device):
    (x,) = to_device(device, np.zeros((0, 50), np.float32))
    assert sample(x, top_k=5, logprobs=2).top_logprobs.shape == (0, 2)


def test_plans_of_streamed_rows():
    hopper = TYPICAL_DEVICES["sm_90"]
    for vec, dtype in ((1, "float16"), (4, "float32"), (8, "bfloat16")):
        for vocab_size, tokens in ((1000, 256), (50257, 1024), (128256, 1024)):
            config = plan_sample(256, vocab_size, dtype, vec, hopper)
            assert (config.cluster, config.resident) == (1, False)
            assert config.atom * vec * 32 == tokens
            assert config.atoms == -(-vocab_size // tokens)
            blocks = config.blocks_per_sm
            assert config.capacity == min(vocab_size, 10240)
            assert blocks * (config.shared_bytes + 1024) <= hopper.shared_bytes_per_sm
    for draws in ("Few", "All"):
        config = plan_sample(256, 128256, "float32", 4, hopper, draws=draws)
        assert config.capacity == 0
    for device in TYPICAL_DEVICES.values():
        config = plan_sample(256, 1 << 20, "float32", 4, device)
        assert config.shared_bytes <= device.shared_bytes_per_block


@pytest.mark.parametrize(
    ("rows", "vocab_size", "draws", "cluster"),
    [
        (1, 128256, "Any", 8),
        (8, 128256, "Any", 8),
        (9, 128256, "Any", 1),
        (1, 16384, "Any", 4),
        (1, 8000, "Any", 1),
        (1, 1 << 20, "Any", 1),
        (1, 128256, "Few", 1),
        (1, 128256, "All", 1),
    ],
)
def test_few_rows_are_spread_over_clusters(rows, vocab_size, draws, cluster):
    """With a small top_k, or without truncation, one thread block reads the row once instead."""
    config = plan_sample(rows, vocab_size, "float32", 4, TYPICAL_DEVICES["sm_90"], draws=draws)
    assert (config.cluster, config.resident) == (cluster, cluster > 1)
    assert config.cluster * config.atoms * config.atom * 32 * config.vec >= vocab_size
    single = plan_sample(rows, vocab_size, "float32", 4, TYPICAL_DEVICES["sm_80"], draws=draws)
    assert single.cluster == 1


@pytest.mark.parametrize("draws", ["Few", "All", "Any"])
@pytest.mark.parametrize("rows", [4, 256])
def test_drafts_are_read_as_rows_of_sample(rows, draws):
    device = TYPICAL_DEVICES["sm_90"]
    drafts = plan_sample(rows, 128256, "float32", 4, device, draws=draws, verifies=True)
    # A few rows of drafts are spread over clusters even without truncation.
    alike = "Any" if (rows, draws) == (4, "All") else draws
    plain = plan_sample(rows, 128256, "float32", 4, device, draws=alike)
    assert drafts == replace(plain, verifies=True)


def test_bfloat16_is_as_wide_as_float32_in_shared_memory():
    config = plan_sample(8, 32000, "bfloat16", 8, TYPICAL_DEVICES["sm_90"])
    assert config.resident
    assert config.shared_bytes >= 4 * 32000 // config.cluster
    assert dtype_of("bfloat16").itemsize == 2
