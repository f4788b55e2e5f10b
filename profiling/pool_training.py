"""Times steps of `cukit distill` with cukit's and CuPy's pools, for profiling.memory_pool."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cukit.distill import Distiller, LanguageModelling, Trainer, Windows
from cukit.distill.run.memory import POOLS, RunMemory
from cukit.distill.run.settings import DEFAULTS, DistillSettings
from cukit.models import Transformer

SETTINGS = DEFAULTS["gpu"]

CASES: dict[str, tuple[str, DistillSettings]] = {
    "teacher": ("teacher", SETTINGS),
    "student, distilled": ("student", SETTINGS),
    # Small enough that a step is bound by the host, so the cost of the pool is visible.
    "student, distilled, one window of 128": ("student", replace(SETTINGS, batch=1, seq_len=128)),
}
"""The trained model and the settings of each case, by name."""

ROUNDS, STEPS = 16, 6
WARM_UP_STEPS = 3


class Measured(NamedTuple):
    """One case on one pool: microseconds per step, by round."""

    case: str
    pool: str
    step_us: list[float]
    host_us: list[float]
    """Host time until everything is enqueued; the rest of the step waits for the GPU."""
    tokens: int
    """Tokens per step."""


class _Training:
    def __init__(self, pool: str, phase: str, settings: DistillSettings) -> None:
        import cupy

        self._synchronize = cupy.cuda.Device().synchronize
        self._memory = RunMemory(cupy, pool)
        text = np.random.default_rng(0).integers(32, 127, 1 << 22, np.uint8)
        with self._memory.in_use():
            windows = Windows(text, batch=settings.batch, seq_len=settings.seq_len, seed=0, xp=cupy)
            teacher = Transformer.initialise(settings.teacher_config(), seed=0, xp=cupy)
            objective: Any = LanguageModelling(teacher)
            if phase == "student":
                student = Transformer.initialise(settings.student_config(), seed=1, xp=cupy)
                objective = Distiller(
                    student, teacher, alpha=settings.alpha, temperature=settings.temperature
                )
            self._trainer = Trainer(objective, windows, lr=1e-4)
        self.tokens = self._trainer.tokens_per_step

    def run(self, steps: int) -> tuple[float, float]:
        """Return the time of a step, and the host time to enqueue it, in microseconds."""
        with self._memory.in_use():
            self._synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                self._trainer.train_step()
            queued = time.perf_counter()
            self._synchronize()
            done = time.perf_counter()
        return (done - start) / steps * 1e6, (queued - start) / steps * 1e6


def measure_training() -> Iterator[Measured]:
    """Measure every case on both pools in interleaved runs, alternating which is first."""
    for case, (phase, settings) in CASES.items():
        impls = {pool: _Training(pool, phase, settings) for pool in POOLS}
        for impl in impls.values():
            impl.run(WARM_UP_STEPS)
        found: dict[str, list[tuple[float, float]]] = {pool: [] for pool in POOLS}
        for number in range(ROUNDS):
            for pool in POOLS if number % 2 else reversed(POOLS):
                found[pool].append(impls[pool].run(STEPS))
        for pool, times in found.items():
            steps, hosts = ([time[i] for time in times] for i in (0, 1))
            yield Measured(case, pool, steps, hosts, impls[pool].tokens)
