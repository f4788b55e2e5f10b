"""What samples of a time say, and what two sets of them say about each other. Pure functions.

Times on a GPU are skewed and have outliers, so all rests on order statistics: the median, and
an interval for it from the binomial distribution of ranks, which assumes nothing about the shape of
the noise. Samples taken close together share their clock and temperature, so the interval of one
sitting is too narrow to compare sittings; :class:`Estimate` therefore also covers the medians of
the rounds that the samples were taken in.
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
"""An interval wider than this share of the median makes a time noisy."""

TOLERANCE = 0.02
"""A difference below this share is none: clocks and memory layouts alone make as much."""


def median_interval(
    samples: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Interval that holds the true median with at least `confidence`, if the samples allow.

    The number of samples below the median is binomial(n, 1/2): the interval runs from the k-th to
    the (n + 1 - k)-th smallest, k the largest rank that keeps the promise. With fewer than about
    six samples none does, and the interval is the whole range.
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
    """Everything that a report says of one set of samples. Raises ConfigError for none."""
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
    """`samples` in consecutive pieces of these sizes; without sizes, in one."""
    ends = np.cumsum(sizes or (len(samples),)).tolist()
    return [tuple(samples[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def is_noisy(samples_us: Sequence[float], confidence: float = CONFIDENCE) -> bool:
    """True where the interval of the median is wider than `NOISY_INTERVAL` of it."""
    low, high = median_interval(samples_us, confidence)
    return high - low > NOISY_INTERVAL * float(np.median(samples_us))


@dataclass(frozen=True)
class Estimate:
    """A median and the range that the truth is believed in."""

    median_us: float
    low_us: float
    high_us: float


def estimate(rounds: Sequence[Sequence[float]], confidence: float = 0.99) -> Estimate:
    """The median of all samples; the range covers its interval and the median of every round."""
    pooled = [sample for samples in rounds for sample in samples]
    if not pooled:
        raise ConfigError("estimate: no samples")
    low, high = median_interval(pooled, confidence)
    medians = [float(np.median(samples)) for samples in rounds if len(samples)]
    return Estimate(float(np.median(pooled)), min(low, *medians), max(high, *medians))


class Verdict(str, Enum):
    """What a comparison says of NEW beside BASE."""

    SAME = "SAME"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    UNCERTAIN = "UNCERTAIN"


@dataclass(frozen=True)
class Difference:
    """NEW over BASE."""

    verdict: Verdict
    ratio: float
    """new median / base median: above 1 is slower."""
    low: float
    high: float
    """The range of the ratio that both estimates allow."""


def compare(base: Estimate, new: Estimate, tolerance: float = TOLERANCE) -> Difference:
    """Whether NEW differs from BASE by more than `tolerance`, as far as the estimates tell.

    SLOWER and FASTER: every ratio that the two ranges allow lies beyond the tolerance. SAME: every
    one lies within. UNCERTAIN: the ranges allow both, and more samples are wanted. Nothing is
    called slower because a point moved: the whole range has to.
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
