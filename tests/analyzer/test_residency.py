"""Occupancy steps and waves, compared with an exhaustive search and hand-computed values."""

from __future__ import annotations

import random

import pytest

from cukit.analyzer.devices import ANALYSIS_DEVICES, analysis_device
from cukit.analyzer.occupancy import occupancy
from cukit.analyzer.residency import analyze_occupancy, analyze_waves
from cukit.core.device import KIB, typical_device

H200 = typical_device("sm_90")


@pytest.mark.parametrize("arch", ANALYSIS_DEVICES)
def test_steps_are_the_smallest_that_help(arch: str) -> None:
    device = analysis_device(arch)
    draw = random.Random(arch)
    for _ in range(15):
        threads = draw.randint(1, 1024)
        registers = draw.randint(1, 255)
        shared = draw.randint(0, device.shared_bytes_per_block)
        now = occupancy(device, threads=threads, registers=registers, shared_bytes=shared)
        steps = {
            step.resource: step.needed
            for step in analyze_occupancy(
                device, threads=threads, registers=registers, shared_bytes=shared
            ).next_steps
        }

        def warps(threads: int = threads, registers: int = registers, shared: int = shared) -> int:
            return occupancy(
                device, threads=threads, registers=registers, shared_bytes=shared
            ).warps

        fewer = [n for n in range(1, registers) if warps(registers=n) > now.warps]
        assert steps.get("registers") == (max(fewer) if fewer else None)
        if (needed := steps.get("shared memory")) is not None:
            assert warps(shared=needed) > now.warps >= warps(shared=needed + 1)
        sizes = [n for n in range(32, 1025, 32) if warps(threads=n) > now.warps]
        nearest = min((abs(n - threads) for n in sizes), default=None)
        found = steps.get("threads")
        assert (None if found is None else abs(found - threads)) == nearest


def test_register_limits_equal_hand_computed_values() -> None:
    """65536 registers, 256 threads with 72 each: 3 blocks; with 64 each a fourth fits."""
    analysis = analyze_occupancy(H200, threads=256, registers=72, shared_bytes=0)
    assert (analysis.blocks_per_sm, analysis.limiter) == (3, "registers")
    step = analysis.next_steps[0]
    assert (step.resource, step.current, step.needed, step.blocks) == ("registers", 72, 64, 4)
    assert analysis.fraction == 3 * 8 / 64
    assert step.fraction == 0.5


def test_curves_pass_through_the_point_of_the_kernel() -> None:
    analysis = analyze_occupancy(H200, threads=256, registers=64, shared_bytes=32 * KIB)
    for curve, value in (
        (analysis.by_threads, 256),
        (analysis.by_registers, 64),
        (analysis.by_shared_bytes, 32 * KIB),
    ):
        assert {point.value: point.fraction for point in curve}[value] == analysis.fraction


def test_full_occupancy_has_no_next_step() -> None:
    assert analyze_occupancy(H200, threads=256, registers=32, shared_bytes=0).next_steps == ()


def test_waves_equal_hand_computed_values() -> None:
    one_and_a_bit = analyze_waves(H200, 132 * 2 + 66, 2)
    assert one_and_a_bit is not None
    assert one_and_a_bit.waves == 1.25
    assert one_and_a_bit.tail_fraction == 0.25
    assert one_and_a_bit.efficiency == 0.625
    full = analyze_waves(H200, 132 * 6, 2)
    assert full is not None
    assert (full.waves, full.tail_fraction, full.efficiency) == (3.0, 1.0, 1.0)
    assert analyze_waves(H200, 0, 2) is None
    assert analyze_waves(H200, 5, 0) is None
