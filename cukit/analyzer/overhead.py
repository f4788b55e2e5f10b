"""Measures the time that a pair of CUDA events adds to the kernel between them.

The interval between two events includes about 2 us of work of the GPU's front end, independent of
the kernel: a kernel of 3 us is measured as 5 us. The overhead is the difference between two
measurements of the same kernel: between two events, and in a long chain of kernels that a CUDA
graph replays without the host. The kernel loads nothing, so a cold cache does not slow it down.
Measurements at several kernel lengths give the uncertainty.
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
"""The resolution of event timestamps, and so of every time between two events."""


@dataclass(frozen=True)
class Overhead:
    """The time to subtract from each sample of an event timer."""

    us: float
    uncertainty_us: float
    """Half the range of the differences whose median is `us`, but at least one tick."""

    def corrected(self, samples_us: Sequence[float]) -> tuple[float, ...]:
        """Samples without the overhead, but at least one tick, so that rates stay finite."""
        return tuple(max(sample - self.us, EVENT_TICK_US) for sample in samples_us)


def overhead_of(events: Timer, graph: Timer, calls: Sequence[Call]) -> Overhead:
    """The overhead of `events`: its median minus that of `graph`, per call."""

    def median_us(call: Call, timer: Timer) -> float:
        return measure({"": call}, timer, rounds=1, min_samples=25, pause_s=0.0)[""].median_us

    return overhead_from([median_us(call, events) - median_us(call, graph) for call in calls])


def overhead_from(differences: Sequence[float]) -> Overhead:
    """The overhead from the differences for several kernels: their median, and half their range."""
    spread = (max(differences) - min(differences)) / 2
    return Overhead(float(np.median(differences)), max(spread, EVENT_TICK_US))


def calibration_calls() -> list[Call]:
    """The calibration kernel, in several lengths."""
    cupy = require_cupy("measuring the overhead of events")
    out = cupy.empty(fma_threads(current_device()), cupy.float32)
    return [partial(launch_fma, out, rounds) for rounds in ROUNDS]
