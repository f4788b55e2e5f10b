"""Each rule, on an analysis that triggers it and on analyses that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cukit.analyzer.advice import advise
from cukit.analyzer.residency import analyze_occupancy, analyze_waves
from cukit.analyzer.schema import (
    AccessPoint,
    AccessWidth,
    Advice,
    Conditions,
    Counters,
    KernelAnalysis,
    LaunchAnalysis,
    MemoryAccess,
    Resources,
    RooflinePoint,
)
from cukit.analyzer.statistics import summarize
from cukit.core.device import typical_device

H200 = typical_device("sm_90")


def launch(
    *, threads: int = 256, blocks: int = 132 * 8, registers: int = 32, spills: int = 0
) -> LaunchAnalysis:
    resident = analyze_occupancy(H200, threads=threads, registers=registers, shared_bytes=0)
    return LaunchAnalysis(
        name="k",
        grid=(blocks, 1, 1),
        block=(threads, 1, 1),
        resources=Resources(registers, 0, 0, spills, spills, spills, None),
        occupancy=resident,
        waves=analyze_waves(H200, blocks, resident.blocks_per_sm),
        memory_access=MemoryAccess("decoded", (AccessWidth("load", 128, 4),), 0),
    )


def analysis(one: LaunchAnalysis | None = None, median_us: float = 100.0) -> KernelAnalysis:
    return KernelAnalysis(
        name="k",
        kind="raw kernel",
        arch="sm_90",
        launches=(one or launch(),),
        cold=summarize([median_us] * 9, timer="events", cache="cold"),
        warm=summarize([median_us] * 9, timer="graph replay", cache="warm"),
        throughput=None,
        roofline=(),
        energy=None,
        conditions=None,
        counters=None,
        advice=(),
        missing={},
    )


def by_rule(found: KernelAnalysis, accesses: tuple[AccessPoint, ...] = ()) -> dict[str, Advice]:
    return {advice.rule: advice for advice in advise(found, H200.num_sms, accesses)}


def point(fraction: float) -> RooflinePoint:
    return RooflinePoint("fp32", 0.1, "memory", "measured", 4000.0, None, 90.0, fraction)


def test_tma_kernels_get_no_advice_on_warps_or_wide_loads() -> None:
    narrow = (AccessWidth("load", 32, 4),)
    one = launch(registers=255, threads=384)
    by_hand = replace(one, memory_access=MemoryAccess("decoded", narrow, 0))
    by_tma = replace(one, memory_access=MemoryAccess("decoded", narrow, 2))
    assert {"narrow loads", "occupancy by registers"} <= set(by_rule(analysis(by_hand)))
    assert by_rule(analysis(by_tma)) == {}


def test_asynchronous_copies_are_loads_too() -> None:
    widths = (AccessWidth("async copy", 128, 4), AccessWidth("load", 32, 1))
    one = replace(launch(), memory_access=MemoryAccess("decoded", widths, 0))
    assert "narrow loads" not in by_rule(analysis(one))


def test_a_kernel_without_faults_gets_no_advice() -> None:
    assert by_rule(analysis()) == {}


@pytest.mark.parametrize(
    ("one", "rule", "gain"),
    [
        (launch(spills=64), "spills", "not bounded"),
        (launch(threads=200, blocks=132 * 9), "ragged block", "at most 1.12x"),
        (launch(blocks=44), "small grid", "at most 3.00x"),
        (launch(blocks=132 * 8 + 1), "tail", "at most 2.00x"),
        (launch(registers=200, blocks=132), "occupancy by registers", "at most 2.00x"),
    ],
)
def test_each_fault_of_a_launch_has_its_rule(one: LaunchAnalysis, rule: str, gain: str) -> None:
    assert by_rule(analysis(one))[rule].expected_gain.startswith(gain)


def test_a_kernel_at_its_roof_gets_no_other_advice() -> None:
    narrow = replace(
        launch(registers=200, blocks=132),
        memory_access=MemoryAccess("decoded", (AccessWidth("load", 32, 4),), 0),
    )
    far, near = (replace(analysis(narrow), roofline=(point(f),)) for f in (0.5, 0.9))
    assert {"narrow loads", "occupancy by registers"} <= set(by_rule(far))
    assert set(by_rule(near)) == {"at the roof"}
    assert by_rule(near)["at the roof"].expected_gain.startswith("at most 1.11x")


def test_the_access_probe_bounds_the_gain_of_wider_loads() -> None:
    narrow = analysis(
        replace(
            launch(),
            memory_access=MemoryAccess("decoded", (AccessWidth("load", 32, 4),), 0),
        )
    )
    assert "4x fewer load instructions" in by_rule(narrow)["narrow loads"].expected_gain
    probe = (AccessPoint(4, 1, 3000.0, 0.75, 1.0), AccessPoint(16, 1, 4000.0, 1.0, 1.0))
    gain = by_rule(narrow, probe)["narrow loads"].expected_gain
    assert gain == (
        "at most 1.33x: the access probe reads 3000 GB/s with 32-bit loads, 4000 with 128-bit loads"
    )


def test_short_calls_are_launch_bound() -> None:
    assert "4.0 us (graph replay)" in by_rule(analysis(median_us=4.0))["launch bound"].evidence


def test_a_throttled_gpu_is_reported() -> None:
    held = Conditions(1500.0, 1980.0, None, None, 700.0, ("software power cap",))
    found = by_rule(replace(analysis(), conditions=held))["throttled"]
    assert found.expected_gain.startswith("at most 1.32x")
    assert "software power cap" in found.evidence
    fast = replace(held, sm_clock_mhz=1975.0)
    assert "throttled" not in by_rule(replace(analysis(), conditions=fast))


def test_counters_show_uncoalesced_loads() -> None:
    counted = replace(analysis(), counters=Counters("ncu", load_sectors_per_request=32.0))
    assert by_rule(counted)["uncoalesced loads"].expected_gain.startswith("at most 2.0x")
    ideal = replace(analysis(), counters=Counters("ncu", load_sectors_per_request=16.0))
    assert by_rule(ideal) == {}


def test_counters_show_uncoalesced_stores() -> None:
    narrow = replace(
        launch(), memory_access=MemoryAccess("decoded", (AccessWidth("store", 32, 1),), 0)
    )
    counted = replace(analysis(narrow), counters=Counters("ncu", store_sectors_per_request=32.0))
    found = by_rule(counted)["uncoalesced stores"]
    assert found.evidence == "32.0 sectors a store request; 4 suffice"
    assert found.expected_gain.startswith("at most 8.0x")


def test_without_widths_only_certain_cases_are_uncoalesced() -> None:
    """A traced kernel has no access widths; 16 sectors per request suffice for 16-byte loads."""
    traced = replace(launch(), memory_access=None)
    counters = Counters("ncu", load_sectors_per_request=16.0, store_sectors_per_request=32.0)
    found = by_rule(replace(analysis(traced), counters=counters))
    assert set(found) == {"uncoalesced stores"}
    assert "16 suffice for 16 bytes a thread" in found["uncoalesced stores"].evidence
