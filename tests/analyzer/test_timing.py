"""Order and statistics of timing on a simulated clock, and the clocks of a GPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest

from cukit.analyzer.timing import (
    EnqueueTimer,
    GpuTimer,
    GraphTimer,
    HostTimer,
    PeakMemory,
    Timing,
    WallTimer,
    measure,
)


class ScriptedTimer:
    """A timer that takes the return value of a call as its duration, and records the durations."""

    name = "script"

    def __init__(self) -> None:
        self.durations: list[float] = []

    def prepare(self, call: Callable[[], object]) -> Callable[[], float]:
        def sample_us() -> float:
            duration = float(str(call()))
            self.durations.append(duration)
            return duration

        return sample_us


def test_median_and_spread_are_robust_to_an_outlier() -> None:
    timing = Timing((10.0, 11.0, 12.0, 13.0, 1000.0))
    assert timing.median_us == 12.0
    assert timing.iqr_us == 2.0


def test_implementations_are_interleaved() -> None:
    timer = ScriptedTimer()
    impls: dict[str, Callable[[], object]] = {"short": lambda: 100.0, "long": lambda: 1e6}
    timings = measure(impls, timer, rounds=2, min_samples=2, max_samples=3, pause_s=0)
    one_round = [100.0] * 4 + [1e6] * 3  # one untimed run before the samples of each call
    assert timer.durations == [100.0, 1e6, *one_round, *one_round]
    assert timings["short"].samples_us == (100.0,) * 6
    assert timings["long"].samples_us == (1e6,) * 4


def test_a_budget_bounds_the_samples() -> None:
    timer = ScriptedTimer()
    timings = measure(
        {"work": lambda: 1000.0}, timer, rounds=1, budget_ms=10, max_samples=1000, pause_s=0
    )
    assert len(timings["work"].samples_us) == 10


def test_a_noisy_call_adds_rounds_for_all_calls() -> None:
    jumps = itertools.cycle([100.0, 140.0, 60.0])
    timings = measure(
        {"quiet": lambda: 100.0, "noisy": lambda: next(jumps)},
        ScriptedTimer(),
        rounds=2,
        max_rounds=5,
        min_samples=4,
        max_samples=4,
        pause_s=0,
    )
    assert timings["noisy"].round_sizes == (4,) * 5
    assert timings["quiet"].round_sizes == (4,) * 5, "all calls take part in every round"
    alone = measure({"quiet": lambda: 100.0}, ScriptedTimer(), max_rounds=5, pause_s=0)
    assert len(alone["quiet"].round_sizes) == 2


def test_samples_are_split_into_rounds() -> None:
    assert Timing((1.0, 2.0, 3.0), (2, 1)).rounds == [(1.0, 2.0), (3.0,)]
    assert Timing((1.0, 2.0)).rounds == [(1.0, 2.0)]


def test_the_host_timer_waits_for_the_call() -> None:
    sample_us = HostTimer().prepare(lambda: time.sleep(0.01))
    assert sample_us() >= 10_000


@pytest.mark.gpu
@pytest.mark.timing
def test_the_gpu_timer_times_the_device_and_not_the_host() -> None:
    """A copy on the device, launched by a slow host."""
    import cupy

    source = cupy.zeros(1 << 28, cupy.uint8)
    target = cupy.empty_like(source)

    def slow_host() -> None:
        time.sleep(0.002)
        cupy.copyto(target, source)

    timer = GpuTimer()
    impls = {"plain": lambda: cupy.copyto(target, source), "slow host": slow_host}
    timings = measure(impls, timer, pause_s=0)
    assert timings["plain"].median_us > 20
    assert timings["slow host"].median_us < 1.2 * timings["plain"].median_us


@pytest.mark.gpu
@pytest.mark.timing
def test_the_clocks_of_a_gpu_agree_on_a_long_kernel() -> None:
    """A copy of 300 MiB takes much longer than any clock's overhead, and exceeds any L2."""
    import cupy

    source = cupy.zeros(300 << 20, cupy.uint8)
    target = cupy.empty_like(source)

    def copy() -> None:
        cupy.copyto(target, source)

    events = measure({"copy": copy}, GpuTimer(), pause_s=0)["copy"].median_us
    warm = measure({"copy": copy}, GpuTimer(cold=False), pause_s=0)["copy"].median_us
    replay = measure({"copy": copy}, GraphTimer(), pause_s=0)["copy"].median_us
    wall = measure({"copy": copy}, WallTimer(), pause_s=0)["copy"].median_us
    assert warm == pytest.approx(events, rel=0.1)
    assert replay == pytest.approx(events, rel=0.1)
    assert events * 0.95 < wall < events + 200


@pytest.mark.gpu
@pytest.mark.timing
def test_the_enqueue_timer_times_the_host_and_not_the_device() -> None:
    import cupy

    large = cupy.zeros(1 << 24, cupy.float32)
    assert EnqueueTimer().prepare(lambda: cupy.add(large, 1, out=large))() < 100


@pytest.mark.gpu
@pytest.mark.unguarded
def test_peak_memory_is_the_most_allocated_at_once() -> None:
    import cupy

    before = cupy.zeros(1 << 22, cupy.uint8)
    with PeakMemory() as memory:
        first = cupy.zeros(1 << 20, cupy.uint8)
        del first
        second = cupy.zeros(1 << 21, cupy.uint8)
        third = cupy.zeros(1 << 20, cupy.uint8)
        del second, third
    del before
    assert memory.bytes == 3 << 20
