"""Summary of a kernel trace: launch counts, times and advice for each kernel name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cukit.analyzer.advice import advise
from cukit.analyzer.cupti import KernelRecord
from cukit.analyzer.kernel_analyzer import launch_of
from cukit.analyzer.roofline import throughput
from cukit.analyzer.schema import Counters, KernelAnalysis, TracedLaunch
from cukit.analyzer.statistics import summarize
from cukit.core.device import Device

KIND = "traced kernel"

MAX_LAUNCHES = 50_000
"""Maximum launches in a timeline: viewers cannot draw files of many megabytes."""

NOT_IN_TRACES = "a traced kernel runs only as often as the script launches it"


def analyses_of(
    records: Sequence[KernelRecord],
    device: Device,
    counters: Mapping[str, Counters] | None = None,
) -> tuple[KernelAnalysis, ...]:
    """One analysis per kernel name, in order of decreasing total time.

    `warm` summarises the durations of all launches of the kernel. `launches` holds one launch: the
    longest with the grid, block and dynamic shared memory that took the most time in total.
    `throughput` counts the bytes read from and written to device memory; it needs `counters`.
    """
    by_name: dict[str, list[KernelRecord]] = {}
    for record in records:
        by_name.setdefault(record.name, []).append(record)
    analyses = [
        _analysis(name, found, device, (counters or {}).get(name), counters is not None)
        for name, found in by_name.items()
    ]
    return tuple(sorted(analyses, key=total_us, reverse=True))


def timeline_of(records: Sequence[KernelRecord]) -> tuple[TracedLaunch, ...]:
    """The launches in order of their start; if there are more, the longest MAX_LAUNCHES."""
    origin = min(record.start_ns for record in records)
    longest = sorted(records, key=lambda record: -record.duration_us)[:MAX_LAUNCHES]
    return tuple(
        TracedLaunch(
            record.name, record.stream, (record.start_ns - origin) / 1e3, record.duration_us
        )
        for record in sorted(longest, key=lambda record: record.start_ns)
    )


def total_us(analysis: KernelAnalysis) -> float:
    """The total time of all launches of a traced kernel, in microseconds."""
    return analysis.warm.mean_us * analysis.warm.samples if analysis.warm else 0.0


def _analysis(
    name: str,
    records: Sequence[KernelRecord],
    device: Device,
    counters: Counters | None,
    counters_given: bool,
) -> KernelAnalysis:
    durations = [record.duration_us for record in records]
    times = summarize(durations, timer="cupti", cache="as the script left it")
    missing = dict.fromkeys(("cold", "energy", "conditions", "roofline"), NOT_IN_TRACES)
    moved = None
    if counters is None:
        missing["counters"] = (
            f"ncu measured no kernel {name}" if counters_given else "not requested: pass --counters"
        )
        missing["throughput"] = "the bytes of a traced kernel are only known from counters"
    else:
        sides = (counters.dram_read_bytes, counters.dram_write_bytes)
        moved = sum(side for side in sides if side is not None) or None
        if moved is None:
            missing["throughput"] = "ncu reported no traffic to device memory"
    analysis = KernelAnalysis(
        name=name,
        kind=KIND,
        arch=device.arch,
        launches=(launch_of(_main_record(records), device),),
        cold=None,
        warm=times,
        # The counters are means over all launches too.
        throughput=throughput(bytes_moved=moved, flops=None, time_us=times.mean_us)
        if moved
        else None,
        roofline=(),
        energy=None,
        conditions=None,
        counters=counters,
        advice=(),
        missing=missing,
    )
    return replace(analysis, advice=advise(analysis, device.num_sms))


def _main_record(records: Sequence[KernelRecord]) -> KernelRecord:
    """The longest launch of the shape that took the most time in total."""
    totals: dict[tuple[object, ...], float] = {}
    for record in records:
        totals[_shape(record)] = totals.get(_shape(record), 0.0) + record.duration_us
    shape = max(totals, key=lambda key: totals[key])
    return max((r for r in records if _shape(r) == shape), key=lambda record: record.duration_us)


def _shape(record: KernelRecord) -> tuple[object, ...]:
    return record.grid, record.block, record.dynamic_shared_bytes
