"""Schedules are pure functions of the step."""

from __future__ import annotations

import itertools

import pytest

from cukit.distill.training.schedule import Constant, Cosine, Linear, WarmupCosine, as_schedule


def test_constant_and_number() -> None:
    assert Constant(0.5)(0) == Constant(0.5)(10**6) == 0.5
    assert as_schedule(2.0)(7) == 2.0
    schedule = Linear(0, 1, 10)
    assert as_schedule(schedule) is schedule


def test_linear_stops_at_its_end() -> None:
    schedule = Linear(1.0, 3.0, 4)
    assert [schedule(step) for step in (0, 1, 4, 9)] == [1.0, 1.5, 3.0, 3.0]
    assert Linear(1.0, 3.0, 0)(0) == 3.0


def test_cosine_is_slow_at_both_ends() -> None:
    schedule = Cosine(4.0, 1.0, 8)
    values = [schedule(step) for step in range(10)]
    assert values[::4] == pytest.approx([4.0, 2.5, 1.0])
    assert values[9] == 1.0
    assert values[0] - values[1] < values[3] - values[4]
    assert Cosine(4.0, 1.0, 0)(0) == 1.0


def test_warmup_cosine_rises_then_falls_to_its_floor() -> None:
    schedule = WarmupCosine(peak=2.0, warmup=4, steps=20, floor=0.1)
    values = [schedule(step) for step in range(25)]
    assert values[:4] == [0.5, 1.0, 1.5, 2.0]
    assert values[4] == 2.0
    assert all(a >= b for a, b in itertools.pairwise(values[3:]))
    assert values[12] == pytest.approx(2.0 * 0.55)
    assert values[20:] == pytest.approx([0.2] * 5)
