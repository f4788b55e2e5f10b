"""Numbers that change over the steps of a training run, as pure functions of the step.

A schedule is any function from the step (0 for the first) to a float. It is evaluated on the host,
never waits for the GPU, and has no state: a resumed run needs only its step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """The same value at every step."""

    value: float

    def __call__(self, step: int) -> float:
        return self.value


@dataclass(frozen=True)
class Linear:
    """From `start` at step 0 to `end` at step `steps`, then `end`."""

    start: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        share = min(step / self.steps, 1.0) if self.steps > 0 else 1.0
        return self.start + (self.end - self.start) * share


@dataclass(frozen=True)
class Cosine:
    """From `start` at step 0 to `end` at step `steps` along half a cosine, then `end`."""

    start: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        share = min(step / self.steps, 1.0) if self.steps > 0 else 1.0
        return self.start + (self.end - self.start) * 0.5 * (1 - math.cos(math.pi * share))


@dataclass(frozen=True)
class WarmupCosine:
    """Up to `peak` in `warmup` equal increments, then half a cosine down to `floor * peak`."""

    peak: float
    warmup: int
    steps: int
    floor: float = 0.1

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        share = min((step - self.warmup) / max(1, self.steps - self.warmup), 1.0)
        return self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * share)))


@dataclass(frozen=True)
class WarmupDecay:
    """(1 + step) / (10 + step), at most `value`: a moving average over fewer steps at the start."""

    value: float

    def __call__(self, step: int) -> float:
        return min(self.value, (1 + step) / (10 + step))


def as_schedule(value: float | Schedule) -> Schedule:
    """`value` if it is a schedule, else a constant one."""
    return value if callable(value) else Constant(value)
