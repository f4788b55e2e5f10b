"""The chapter on one file of benchmark results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from cukit.analyzer import peaks
from cukit.analyzer.report import numbers, svg
from cukit.analyzer.report.bars import Bar, Group, Mark, bar_chart
from cukit.analyzer.report.benchmarks import (
    EQUAL,
    BenchmarkResults,
    Case,
    impl_title,
    is_ours,
    largest_cases,
)
from cukit.analyzer.report.layout import (
    Block,
    Cell,
    Collapsible,
    Column,
    Entry,
    Facts,
    Figure,
    Index,
    Paragraph,
    Section,
    Table,
    Tile,
    Tiles,
    cell,
)
from cukit.analyzer.report.memory_pools import pool_blocks
from cukit.analyzer.report.precision_roofline import roofline_blocks
from cukit.analyzer.results import OURS, Record
from cukit.analyzer.statistics import NOISY_INTERVAL

FASTEST_PEER = "fastest peer"

FLAGS = (
    ("slower", "slower than the fastest peer"),
    ("faster", "faster"),
    ("alone", "without a peer"),
    ("wrong", "with a wrong result"),
    ("noisy", "noisy"),
)


def benchmark_section(results: BenchmarkResults, anchor: str = "cases") -> Section:
    """Verdict, summary of the ops, roofline, and every case as a table and as bars.

    anchor: of the table, unique in a report.
    """
    blocks: list[Block] = [Paragraph(results.verdict, lead=True), _tiles(results, anchor)]
    if summary := summary_figure(results.cases):
        blocks.append(summary)
    blocks += roofline_blocks(results)
    if results.cases:
        blocks.append(_table(results.cases, anchor))
    for family in results.families:
        cases = results.of_family(family)
        ops = dict.fromkeys(case.op for case in cases)
        figures = [_op_figure([case for case in cases if case.op == op], results) for op in ops]
        blocks.append(Collapsible(f"Every case of {family} in bars", tuple(figures)))
        blocks.append(Collapsible(f"Every time of {family} and its spread", (_times(cases),)))
    blocks += pool_blocks(results.memory_pools)
    return Section("Benchmarks", results.machine, tuple(blocks))


def _tiles(results: BenchmarkResults, anchor: str) -> Tiles:
    speeds = [case.speed for case in results.cases if case.speed is not None]
    floors = [
        share
        for case in results.cases
        if case.ours and (share := case.share_of_floor(case.ours)) is not None
    ]
    wrong = sum(not record["correct"] for record in results.records if is_ours(record["impl"]))
    flagged = [flag for case in results.cases for flag in _flags(case)]
    tiles = [Tile(str(len(results.cases)), "cases", leads_to=f"#{anchor}" if results.cases else "")]
    if speeds:
        mean = math.exp(sum(map(math.log, speeds)) / len(speeds))
        tone = "good" if mean > 1 + EQUAL else "bad" if mean < 1 - EQUAL else ""
        label = "speed relative to the fastest peer, geometric mean"
        tiles.append(Tile(f"{mean:.2f}×", label, tone))
    if floors:
        middle = sorted(floors)[len(floors) // 2]
        tiles.append(Tile(numbers.percent(middle), "of the attainable speed, median case"))
    if slower := flagged.count("slower"):
        label = "cases slower than the fastest peer"
        tiles.append(Tile(str(slower), label, leads_to=f"#{anchor}?flag=slower"))
    tiles.append(Tile(str(wrong), "wrong results of cukit", "bad" if wrong else ""))
    return Tiles(tuple(tiles))


def summary_figure(cases: Sequence[Case]) -> Figure | None:
    """cukit and the fastest peer, one pair of bars per op, or None if there is nothing to show."""
    chosen = largest_cases(cases)
    if not chosen:
        return None
    return Figure(
        "Speed of each op on its largest case",
        lambda width: draw_summary(chosen, width),
        "The floor of the time is the larger of bytes over measured copy bandwidth and FLOPs over "
        "the matrix rate of their precision. A bar shows the floor as a share of the time beside "
        "it: longer is faster.",
        ((svg.colour(0), OURS), (svg.colour(1), FASTEST_PEER)),
    )


def draw_summary(cases: Sequence[Case], width: float) -> str:
    """The figure of :func:`summary_figure`, for cases with a floor and a cukit record."""
    groups = []
    for case in cases:
        bars = [_share_bar(0, case, case.ours)] if case.ours else []
        if peer := case.fastest_peer:
            bars.append(_share_bar(1, case, peer))
        groups.append(Group(case.op, f"{case.name} {case.dtype}", tuple(bars)))
    return bar_chart(
        groups,
        title="Share of the attainable speed of each op, cukit and the fastest peer",
        unit="% of the attainable speed",
        width=width,
        mark=Mark(100.0, "the floor"),
    )


def _share_bar(series: int, case: Case, record: Record) -> Bar:
    share = case.share_of_floor(record) or 0.0
    name = impl_title(record["impl"])
    time = numbers.microseconds(record["median_us"])
    if series == 0:
        note = time + (f", {case.speed:.2f}×" if case.speed is not None else "")
    else:
        note = f"{time} {name}"
    about = f"{name}, {case.op} {case.name} {case.dtype}"
    return Bar(series, 100 * share, note, f"{about}: {time}, {numbers.percent(share)} of the floor")


def _op_figure(cases: Sequence[Case], results: BenchmarkResults) -> Figure:
    """Bars of all cases of an op: rates if work is declared, else calls per second."""
    # An implementation has one colour throughout its family.
    series = {impl: number for number, impl in enumerate(results.impls_of(cases[0].family))}
    present = {record["impl"] for case in cases for record in case.records}
    field, unit, mark = _measure(cases, results)
    groups = []
    for case in cases:
        bars = [
            Bar(
                series[record["impl"]],
                record[field] if field else 1e6 / record["median_us"],
                numbers.microseconds(record["median_us"]),
                f"{impl_title(record['impl'])}: {numbers.microseconds(record['median_us'])}, "
                f"IQR {numbers.microseconds(record['iqr_us'])}",
            )
            for record in sorted(case.records, key=lambda record: series[record["impl"]])
            if record["correct"]
        ]
        groups.append(Group(case.name, case.dtype, tuple(bars)))
    op = cases[0].op
    return Figure(
        op,
        lambda width: bar_chart(
            groups, title=f"{op}: {unit} of each implementation", unit=unit, width=width, mark=mark
        ),
        legend=tuple(
            (svg.colour(n), impl_title(impl)) for impl, n in series.items() if impl in present
        ),
    )


def _measure(
    cases: Sequence[Case], results: BenchmarkResults
) -> tuple[str | None, str, Mark | None]:
    """The field that shows an op's speed, its unit, and its ceiling."""
    records = [record for case in cases for record in case.records if record["correct"]]
    if records and all(record.get("tflops") for record in records):
        used = {peaks.precision_of(r["dtype"], r["case"], r["impl"]) for r in records}
        known = peaks.peaks(results.environment).get(used.pop() or "") if len(used) == 1 else None
        if not known:  # bars of several precisions have no common ceiling
            return "tflops", "TFLOP/s", None
        origin = "measured ceiling" if known[0].measured else "datasheet"
        return "tflops", "TFLOP/s", Mark(known[0].tflops, origin)
    if records and all(record.get("gbps") for record in records):
        copy = results.ceiling("copy_gbps")
        return "gbps", "GB/s", Mark(copy, "measured ceiling") if copy else None
    return None, "calls per second", None


def _table(cases: Sequence[Case], anchor: str) -> Table:
    """cukit and the fastest peer; opening a row shows every implementation."""
    counted = {flag for case in cases for flag in _flags(case)}
    index = Index(
        anchor,
        "cases",
        ("op", "family", "dtype"),
        tuple((flag, title) for flag, title in FLAGS if flag in counted),
        tuple(
            Entry((case.op, case.family, case.dtype), _flags(case), (_implementations(case),))
            for case in cases
        ),
    )
    columns = (
        Column("case"),
        Column(OURS, numeric=True),
        Column(FASTEST_PEER, numeric=True),
        Column("speedup", numeric=True),
        Column("of floor", numeric=True),
        Column("TFLOP/s", numeric=True, minor=True),
        Column("bandwidth", numeric=True, minor=True),
    )
    return Table(columns, tuple(map(_row, cases)), "Every case", index=index)


def _row(case: Case) -> tuple[Cell, ...]:
    by_impl = {record["impl"]: record for record in case.records}
    peer, ours = case.fastest_peer, case.ours or {}
    peer_cell = _time_cell(peer)
    if peer is not None:
        peer_cell = replace(peer_cell, note=impl_title(peer["impl"]))
    return (
        Cell(f"{case.name} {case.dtype}"),
        _time_cell(by_impl.get(OURS)),
        peer_cell,
        _speed_cell(case.speed),
        _floor_cell(case),
        cell(ours.get("tflops"), numbers.digits),
        cell(ours.get("gbps"), numbers.gbps),
    )


def _flags(case: Case) -> tuple[str, ...]:
    speed = case.speed
    found = {
        "faster": speed is not None and speed > 1 + EQUAL,
        "slower": speed is not None and speed < 1 - EQUAL,
        "alone": speed is None,
        "wrong": any(not record["correct"] for record in case.records),
        "noisy": any(_is_noisy(record) for record in case.records),
    }
    return tuple(flag for flag, holds in found.items() if holds)


def _implementations(case: Case) -> Facts:
    """Every implementation's time with its spread, samples and error."""
    numeric = ("median", "IQR", "range of the median", "samples", "error")
    header = ("implementation", *numeric, "result")
    rows = tuple(
        (
            impl_title(record["impl"]),
            numbers.microseconds(record["median_us"]),
            numbers.microseconds(record["iqr_us"]),
            _interval(record).text,
            str(record.get("samples", "")),
            "" if record.get("error") is None else f"{record['error']:.1e}",
            "correct" if record["correct"] else "wrong",
        )
        for record in sorted(case.records, key=lambda record: float(record["median_us"]))
    )
    return Facts("Implementations, fastest first", rows, header)


def _times(cases: Sequence[Case]) -> Table:
    """Every time with its spread, samples and error."""
    numeric = ("median", "IQR", "range of the median", "samples", "bandwidth", "FLOP/s", "error")
    more = ("memory besides inputs", "energy per call", "calls per J")
    rows = []
    for record in (record for case in cases for record in case.records):
        median, energy = record["median_us"], record.get("joules_per_call")
        rows.append(
            (
                Cell(record["op"], tone="code"),
                Cell(f"{record['case']} {record['dtype']}"),
                Cell(impl_title(record["impl"])),
                Cell(numbers.microseconds(median), median),
                Cell(numbers.microseconds(record["iqr_us"]), record["iqr_us"]),
                _interval(record),
                cell(record.get("samples"), str),
                cell(record.get("gbps"), numbers.gbps),
                cell(record.get("tflops"), numbers.tflops),
                cell(record.get("error"), lambda error: f"{error:.1e}"),
                cell(record.get("peak_bytes"), numbers.num_bytes),
                cell(energy, lambda joules: f"{joules:.3g} J"),
                cell(1 / energy if energy else None, numbers.digits),
                Cell("correct") if record["correct"] else Cell("wrong", tone="bad"),
            )
        )
    columns = [*map(Column, ("op", "case", "implementation"))]
    columns += [Column(name, numeric=True) for name in (*numeric, *more)]
    return Table((*columns, Column("result")), tuple(rows)).without_empty_columns()


def _interval(record: Record) -> Cell:
    """The estimated range of the true median."""
    if "range_us" not in record:
        return Cell("")
    low, high = record["range_us"]
    noisy = " (noisy)" if _is_noisy(record) else ""
    return Cell(f"{numbers.digits(low)} to {numbers.microseconds(high)}{noisy}", low)


def _is_noisy(record: Record) -> bool:
    low, high = record.get("range_us") or (0.0, 0.0)
    return bool(high - low > NOISY_INTERVAL * record["median_us"])


def _time_cell(record: Record | None) -> Cell:
    if record is None:
        return Cell("")
    if not record["correct"]:
        return Cell("wrong", tone="bad")
    return Cell(numbers.microseconds(record["median_us"]), record["median_us"])


def _speed_cell(speed: float | None) -> Cell:
    if speed is None:
        return Cell("")
    tone = "good" if speed > 1 + EQUAL else "bad" if speed < 1 - EQUAL else ""
    return Cell(f"{speed:.2f}", speed, tone)


def _floor_cell(case: Case) -> Cell:
    share = case.share_of_floor(case.ours) if case.ours else None
    return Cell("") if share is None else Cell(numbers.percent(share), share)
