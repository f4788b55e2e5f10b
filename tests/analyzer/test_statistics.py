"""Intervals and verdicts for synthetic samples with known true values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cukit.analyzer.statistics import (
    Estimate,
    Verdict,
    compare,
    estimate,
    is_noisy,
    median_interval,
    summarize,
)
from cukit.errors import ConfigError


def kernel_times(
    rng: np.random.Generator, median_us: float, *, rounds: int = 3, count: int = 40
) -> list[list[float]]:
    """Skewed noise of 0.5%, occasional outliers, and a drift of 0.3% between rounds."""
    result = []
    for _ in range(rounds):
        drift = 1 + 0.003 * rng.standard_normal()
        noise = 1 + 0.005 * (rng.exponential(size=count) - np.log(2))
        outliers = np.where(rng.random(count) < 0.03, 1.5, 1.0)
        result.append(list(median_us * drift * noise * outliers))
    return result


def test_the_interval_has_its_nominal_coverage(rng: np.random.Generator) -> None:
    for count in (8, 20, 75):
        samples = rng.exponential(size=(4000, count))
        held = [low <= np.log(2) <= high for low, high in map(median_interval, samples)]
        assert np.mean(held) > 0.945, count


def test_ranks_of_the_interval_equal_those_of_the_tables() -> None:
    """Ten samples at 95%: ranks 2 and 9 (coverage 97.9%), as in textbooks."""
    assert median_interval(range(1, 11)) == (2, 9)
    assert median_interval(range(1, 21)) == (6, 15)
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval([7.0]) == (7.0, 7.0)


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=60))
def test_the_interval_brackets_the_sample_median(samples: list[float]) -> None:
    low, high = median_interval(samples)
    assert low <= np.median(samples) * (1 + 1e-12)
    assert high >= np.median(samples) * (1 - 1e-12)


def test_a_summary_has_the_statistics_of_its_samples() -> None:
    times = summarize([10.0, 11.0, 12.0, 13.0, 1000.0], timer="events", cache="cold")
    assert (times.median_us, times.iqr_us, times.min_us, times.max_us) == (12.0, 2.0, 10.0, 1000.0)
    assert times.samples == 5
    assert times.noisy
    assert not is_noisy([100.0, 100.1, 100.2] * 10)
    with pytest.raises(ConfigError, match="no samples"):
        summarize([], timer="events", cache="cold")


@pytest.mark.parametrize("repeat", range(20))
def test_two_runs_of_the_same_code_never_differ(repeat: int) -> None:
    rng = np.random.default_rng(repeat)
    for median_us in (3.0, 40.0, 900.0):
        base, new = (estimate(kernel_times(rng, median_us)) for _ in range(2))
        assert compare(base, new).verdict in (Verdict.SAME, Verdict.UNCERTAIN)


@pytest.mark.parametrize("repeat", range(20))
def test_a_difference_of_5_percent_is_found(repeat: int) -> None:
    rng = np.random.default_rng(100 + repeat)
    base = estimate(kernel_times(rng, 100.0))
    slower = compare(base, estimate(kernel_times(rng, 105.0)))
    assert slower.verdict is Verdict.SLOWER
    assert slower.ratio == pytest.approx(1.05, abs=0.01)
    assert compare(base, estimate(kernel_times(rng, 95.0))).verdict is Verdict.FASTER


def test_quiet_runs_are_called_the_same() -> None:
    rng = np.random.default_rng(7)
    verdicts = [
        compare(*(estimate(kernel_times(rng, 50.0)) for _ in range(2))).verdict for _ in range(50)
    ]
    assert verdicts.count(Verdict.SAME) >= 45


def test_noisy_measurements_are_called_uncertain() -> None:
    wide = Estimate(100.0, 90.0, 115.0)
    assert compare(wide, Estimate(105.0, 104.0, 106.0)).verdict is Verdict.UNCERTAIN


@given(st.floats(1, 1e5), st.floats(1, 1e5), st.floats(0, 0.2), st.floats(0, 0.2))
def test_swapping_the_sides_swaps_the_verdict(
    base_us: float, new_us: float, base_spread: float, new_spread: float
) -> None:
    opposite = {Verdict.FASTER: Verdict.SLOWER, Verdict.SLOWER: Verdict.FASTER}
    base = Estimate(base_us, base_us * (1 - base_spread), base_us * (1 + base_spread))
    new = Estimate(new_us, new_us * (1 - new_spread), new_us * (1 + new_spread))
    there, back = compare(base, new), compare(new, base)
    # Rounding may matter only at the limit of the tolerance.
    edges = (there.low, there.high, back.low, back.high)
    if all(abs(edge - limit) > 1e-9 for edge in edges for limit in (1.02, 1 / 1.02)):
        assert back.verdict is opposite.get(there.verdict, there.verdict)


def test_an_outlying_round_widens_the_range() -> None:
    apart = estimate([[100.0] * 20, [100.0] * 20, [108.0] * 20])
    assert (apart.low_us, apart.high_us) == (100.0, 108.0)
    with pytest.raises(ConfigError, match="no samples"):
        estimate([[]])
