"""Statistics of time samples, and comparison of two sets of samples. Pure functions.

GPU times are skewed and have outliers, so everything is based on order statistics: the median, and
an interval for it from the binomial distribution of ranks, which assumes nothing about the shape of
the noise. Samples of one round share clock and temperature, so the interval of one round is too
narrow to compare rounds; the range of an :class:`Estimate` therefore also covers the median of each
round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from cukit.analyzer.schema import TimeStatistics
from cukit.errors import ConfigError

CONFIDENCE = 0.95
NOISY_INTERVAL = 0.02
"""A time is noisy if its interval is wider than this fraction of the median."""

TOLERANCE = 0.02
"""Smaller relative differences are ignored: SM clock and memory layout alone cause them."""


def median_interval(
    samples: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Interval that holds the true median with at least `confidence`, if there are enough samples.

    The number of samples below the median is binomial(n, 1/2): the interval runs from the k-th to
    the (n + 1 - k)-th smallest, k being the largest rank with that confidence. With too few samples
    (at 0.95, fewer than six) there is no such rank, and the interval is the whole range.
    """
    ordered = sorted(samples)
    count = len(ordered)
    allowed = (1 - confidence) / 2
    below, rank = 0.0, 0
    while rank < count // 2:
        below += math.exp(_log_choose(count, rank) - count * math.log(2))
        if below > allowed:
            break
        rank += 1
    rank = max(rank, 1)
    return ordered[rank - 1], ordered[count - rank]


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def summarize(
    samples_us: Sequence[float],
    *,
    timer: str,
    cache: str,
    confidence: float = CONFIDENCE,
    round_sizes: Sequence[int] = (),
) -> TimeStatistics:
    """The statistics of one set of samples. Raises ConfigError for an empty set."""
    if not samples_us:
        raise ConfigError("summarize: no samples")
    values = np.asarray(samples_us, dtype=np.float64)
    low, high = median_interval(samples_us, confidence)
    first, median, third = (float(q) for q in np.percentile(values, (25, 50, 75)))
    return TimeStatistics(
        timer=timer,
        cache=cache,
        median_us=median,
        iqr_us=third - first,
        mean_us=float(values.mean()),
        std_us=float(values.std(ddof=1)) if len(values) > 1 else 0.0,
        min_us=float(values.min()),
        max_us=float(values.max()),
        ci_low_us=low,
        ci_high_us=high,
        confidence=confidence,
        samples=len(values),
        noisy=is_noisy(samples_us, confidence),
        samples_us=tuple(float(value) for value in values),
        round_sizes=tuple(round_sizes),
    )


def split(samples: Sequence[float], sizes: Sequence[int]) -> list[tuple[float, ...]]:
    """Splits `samples` into consecutive pieces of these sizes; without sizes, into one."""
    ends = np.cumsum(sizes or (len(samples),)).tolist()
    return [tuple(samples[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def is_noisy(samples_us: Sequence[float], confidence: float = CONFIDENCE) -> bool:
    """Whether the interval of the median is wider than `NOISY_INTERVAL` times the median."""
    low, high = median_interval(samples_us, confidence)
    return high - low > NOISY_INTERVAL * float(np.median(samples_us))


@dataclass(frozen=True)
class Estimate:
    """A median, and the estimated range of the true one."""

    median_us: float
    low_us: float
    high_us: float


def estimate(rounds: Sequence[Sequence[float]], confidence: float = 0.99) -> Estimate:
    """The median of all samples; its range covers their interval and the median of every round."""
    pooled = [sample for samples in rounds for sample in samples]
    if not pooled:
        raise ConfigError("estimate: no samples")
    low, high = median_interval(pooled, confidence)
    medians = [float(np.median(samples)) for samples in rounds if len(samples)]
    return Estimate(float(np.median(pooled)), min(low, *medians), max(high, *medians))


class Verdict(str, Enum):
    """The result of comparing NEW with BASE."""

    SAME = "SAME"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    UNCERTAIN = "UNCERTAIN"


@dataclass(frozen=True)
class Difference:
    """NEW compared with BASE."""

    verdict: Verdict
    ratio: float
    """new median / base median: above 1 is slower."""
    low: float
    high: float
    """The range of ratios that both estimates allow."""


def compare(base: Estimate, new: Estimate, tolerance: float = TOLERANCE) -> Difference:
    """Whether NEW differs from BASE by more than `tolerance`.

    SLOWER and FASTER: every ratio that the two ranges allow exceeds the tolerance; a shifted median
    is not enough. SAME: every such ratio is within the tolerance. UNCERTAIN: neither; more samples
    are needed.
    """
    if min(base.low_us, new.low_us) <= 0 or tolerance < 0:
        raise ConfigError("compare: times must be positive and the tolerance not negative")
    low, high = new.low_us / base.high_us, new.high_us / base.low_us
    if low > 1 + tolerance:
        verdict = Verdict.SLOWER
    elif high < 1 / (1 + tolerance):
        verdict = Verdict.FASTER
    elif 1 / (1 + tolerance) <= low and high <= 1 + tolerance:
        verdict = Verdict.SAME
    else:
        verdict = Verdict.UNCERTAIN
    return Difference(verdict, new.median_us / base.median_us, low, high)
