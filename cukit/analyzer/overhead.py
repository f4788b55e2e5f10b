"""What a pair of CUDA events reads beyond the kernel between them, measured.

Between the two time stamps lie the kernel and the work of the GPU's front end on either side of it:
some 2 us that do not depend on the kernel, and that make a kernel of 3 us look like one of 5. They
are the difference between two readings of the same kernel: between two events, and as a link of a
long chain, which a CUDA graph replays without the host. The kernel computes and loads nothing, so
that it takes equally long with a cold cache. Its readings for several lengths tell the uncertainty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from cukit.analyzer.ceiling_probes import fma_threads, launch_fma
from cukit.analyzer.timing import Call, Timer, measure
from cukit.core.device import current_device, require_cupy

ROUNDS = (1, 2, 4, 8, 16)
"""Lengths of the kernel: about 1.5 to 17 us."""

EVENT_TICK_US = 0.032
"""Events are stamped in steps of this length: nothing is known better."""


@dataclass(frozen=True)
class Overhead:
    """To be subtracted from what a clock reads."""

    us: float
    uncertainty_us: float
    """Half the range of the readings that `us` is the median of."""

    def corrected(self, samples_us: Sequence[float]) -> tuple[float, ...]:
        """Samples without the overhead. Nothing takes less than a tick: rates stay finite."""
        return tuple(max(sample - self.us, EVENT_TICK_US) for sample in samples_us)


def overhead_of(clock: Timer, chain: Timer, calls: Sequence[Call]) -> Overhead:
    """By how much `clock` reads more than `chain`: the median over `calls`."""

    def median_us(call: Call, timer: Timer) -> float:
        return measure({"": call}, timer, rounds=1, min_samples=25, pause_s=0.0)[""].median_us

    return overhead_from([median_us(call, clock) - median_us(call, chain) for call in calls])


def overhead_from(differences: Sequence[float]) -> Overhead:
    """From what a clock read too much of several kernels."""
    spread = (max(differences) - min(differences)) / 2
    return Overhead(float(np.median(differences)), max(spread, EVENT_TICK_US))


def calibration_calls() -> list[Call]:
    """The kernel of known time, in several lengths."""
    cupy = require_cupy("measuring the events' own time")
    out = cupy.empty(fma_threads(current_device()), cupy.float32)
    return [partial(launch_fma, out, rounds) for rounds in ROUNDS]
