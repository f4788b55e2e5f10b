"""The gain of one model over another, and its confidence interval."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cukit.distill.training.evaluation import FEWEST_WINDOWS, Evaluation, gain_of, share_of_gap


def evaluation(bits: np.ndarray) -> Evaluation:
    return Evaluation(float(bits.mean()), 0.5, None, None, tuple(bits.tolist()))


def test_the_interval_of_the_gain_has_its_nominal_coverage(rng: np.random.Generator) -> None:
    """Windows differ by much more than the two models, so only paired differences show the gain."""
    true, hits, runs = 0.05, 0, 2000
    for _ in range(runs):
        other = rng.normal(2, 1, 12)
        found = gain_of(evaluation(other - true + rng.normal(0, 0.1, 12)), evaluation(other))
        assert found.low < found.bits_per_byte < found.high
        hits += found.low <= true <= found.high
    assert hits / runs == pytest.approx(0.95, abs=0.015)


def test_the_share_of_a_gap_and_its_interval(rng: np.random.Generator) -> None:
    """The true share is a third; the interval contains it with its nominal probability."""
    hits = 0
    for _ in range(400):
        gaps = 0.3 + 0.1 * rng.standard_normal(64)
        noise = 0.05 * rng.standard_normal(64)
        alone = 2 + rng.standard_normal(64)
        found = share_of_gap(
            evaluation(alone - gaps / 3 + noise), evaluation(alone), evaluation(alone - gaps)
        )
        assert found is not None
        hits += found.low < 1 / 3 < found.high
    assert 0.92 < hits / 400 < 0.98
    assert share_of_gap(evaluation(alone), evaluation(alone), evaluation(alone + 1)) is None
    few = share_of_gap(*(evaluation(x[:4]) for x in (alone - 0.1, alone, alone - 0.2)))
    assert few is not None
    assert few.share == pytest.approx(0.5)
    assert math.isinf(few.high)


def test_a_few_windows_are_inconclusive() -> None:
    bits = np.full(FEWEST_WINDOWS - 1, 2.0)
    found = gain_of(evaluation(bits - 1), evaluation(bits))
    assert (found.bits_per_byte, found.low, found.high) == (1.0, -math.inf, math.inf)


def test_a_worse_model_has_a_negative_gain() -> None:
    bits = np.linspace(1, 2, 64)
    found = gain_of(evaluation(bits * 1.1), evaluation(bits))
    assert found.high < 0
    assert found.num_windows == 64
