"""Report blocks of measurements that span kernels: a traced script, and strided accesses."""

from __future__ import annotations

from collections.abc import Sequence

from cukit.analyzer.report import numbers, svg
from cukit.analyzer.report.bars import Bar, Group, bar_chart
from cukit.analyzer.report.layout import (
    Block,
    Cell,
    Collapsible,
    Column,
    Figure,
    Table,
    Tile,
    Tiles,
)
from cukit.analyzer.report.lines import Curve, line_chart
from cukit.analyzer.schema import AccessPoint, AnalysisReport, TracedLaunch

MAX_KERNELS = 24
"""Number of bars; the table below them lists all kernels."""

MAX_NAME = 48
"""Characters of a kernel's name; the names of templates can be arbitrarily long."""


def script_blocks(report: AnalysisReport) -> list[Block]:
    """The GPU utilisation of a traced script, and its time by kernel."""
    traced = [analysis for analysis in report.analyses if analysis.warm]
    if not report.timeline or not traced:
        return []
    totals = {a.name: (a.warm.mean_us * a.warm.samples, a.warm.samples) for a in traced if a.warm}
    whole = sum(total for total, _ in totals.values())
    launches = sum(samples for _, samples in totals.values())
    tiles = [
        Tile(f"{launches:,}", "kernel launches"),
        Tile(numbers.microseconds(whole), "in kernels in total"),
    ]
    if len(report.timeline) == launches:
        busy, span = _busy_us(report.timeline)
        tiles.append(Tile(numbers.percent(busy / span), "of the time a kernel was running"))
    groups = []
    for name, (total, samples) in list(totals.items())[:MAX_KERNELS]:
        note = f"{numbers.microseconds(total)}, {total / whole:.1%}"
        calls = f"{samples:,} {'launch' if samples == 1 else 'launches'}"
        groups.append(Group(shortened(name), calls, (Bar(0, total, note, f"{name}: {note}"),)))
    title = "Time of the script by kernel"
    figure = Figure(
        title,
        lambda width: bar_chart(groups, title=title, unit="µs", width=width),
        "" if len(totals) <= MAX_KERNELS else f"The first {MAX_KERNELS} of {len(totals)} kernels.",
    )
    return [Tiles(tuple(tiles)), figure]


def shortened(name: str) -> str:
    """The name, cut to MAX_NAME characters."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"


def _busy_us(timeline: Sequence[TracedLaunch]) -> tuple[float, float]:
    """Time in which at least one kernel ran, and time from the first start to the last end."""
    busy, end = 0.0, 0.0
    for launch in timeline:
        last = launch.start_us + launch.duration_us
        busy += max(0.0, last - max(end, launch.start_us))
        end = max(end, last)
    return busy, end


def probe_blocks(accesses: Sequence[AccessPoint]) -> list[Block]:
    """The bandwidth of loads by the stride between adjacent threads."""
    widths = tuple(dict.fromkeys(point.access_bytes for point in accesses))
    curves = [
        Curve(
            f"{width} bytes per thread",
            series,
            tuple((p.stride, 100 * p.efficiency) for p in accesses if p.access_bytes == width),
        )
        for series, width in enumerate(widths)
    ]
    title = "Bandwidth of strided loads"
    figure = Figure(
        title,
        lambda width: line_chart(
            curves, title=title, x_label="stride in words", y_label="% of the best", width=width
        ),
        "Measured on this GPU: bandwidth of the requested bytes, by the distance between the words "
        "of adjacent threads.",
        tuple((svg.colour(curve.series), curve.name) for curve in curves),
    )
    names = ("bytes per thread", "stride", "useful", "of the best", "limit by sectors")
    rows = tuple(
        (
            Cell(str(point.access_bytes), point.access_bytes),
            Cell(str(point.stride), point.stride),
            Cell(numbers.gbps(point.useful_gbps), point.useful_gbps),
            Cell(numbers.percent(point.efficiency), point.efficiency),
            Cell(numbers.percent(point.sector_fraction), point.sector_fraction),
        )
        for point in accesses
    )
    table = Table(tuple(Column(name, numeric=True) for name in names), rows)
    return [figure, Collapsible("The probe in numbers", (table,))]
