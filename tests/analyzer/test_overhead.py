"""The overhead of a timer: exact on simulated timers, plausible on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cukit.analyzer.overhead import EVENT_TICK_US, Overhead, calibration_calls, overhead_of


class SimulatedTimer:
    """A timer that takes the return value of a call as its time, and adds its own overhead."""

    name = "simulated"

    def __init__(self, own_us: Callable[[float], float]) -> None:
        self._own_us = own_us

    def prepare(self, call: Callable[[], object]) -> Callable[[], float]:
        known_us = float(str(call()))
        return lambda: known_us + self._own_us(known_us)


CALLS = [lambda: 1.0, lambda: 4.0, lambda: 16.0]


def test_a_constant_overhead_is_found_exactly() -> None:
    found = overhead_of(SimulatedTimer(lambda _: 2.4), SimulatedTimer(lambda _: 0.0), CALLS)
    assert found.us == pytest.approx(2.4)
    assert found.uncertainty_us == EVENT_TICK_US, "at least a tick of the event timer"


def test_the_uncertainty_is_half_the_range() -> None:
    found = overhead_of(
        SimulatedTimer(lambda us: 2.2 + us / 40), SimulatedTimer(lambda _: 0.0), CALLS
    )
    assert found.us == pytest.approx(2.3)
    assert found.uncertainty_us == pytest.approx((2.6 - 2.225) / 2)


def test_samples_are_corrected_and_stay_positive() -> None:
    assert Overhead(2.5, 0.1).corrected((5.0, 3.0, 1.0)) == (2.5, 0.5, EVENT_TICK_US)


@pytest.mark.gpu
@pytest.mark.timing
def test_events_of_this_gpu_read_a_few_microseconds_more() -> None:
    from cukit.analyzer.timing import GpuTimer, GraphTimer

    found = overhead_of(GpuTimer(), GraphTimer(), calibration_calls())
    assert 0.5 < found.us < 6
    assert found.uncertainty_us < 0.5
