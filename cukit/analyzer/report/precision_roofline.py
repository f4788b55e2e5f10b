"""The roofline of benchmark results: one roof per precision, and the points above a roof.

Points have the colour of the precision in which they compute, like its roof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cukit.analyzer import peaks
from cukit.analyzer.devices import datasheet_ceilings
from cukit.analyzer.peaks import Peak
from cukit.analyzer.report import numbers, svg
from cukit.analyzer.report.benchmarks import BenchmarkResults, impl_title, is_ours
from cukit.analyzer.report.layout import Block, Cell, Collapsible, Column, Figure, Paragraph, Table
from cukit.analyzer.report.roofline import Point, Roof, roofline
from cukit.analyzer.results import Record

TOLERANCE = 1.005
"""Rates are medians: up to half a percent above a ceiling counts as on it."""

COLOURS = {"fp16/bf16": 0, "fp8": 2, "int8": 3, "tf32": 4, "fp32": 5}
"""Precision -> series. Colour 1 is not used: other figures use it for peers."""


@dataclass(frozen=True)
class Placed:
    """A record with the precision of its arithmetic."""

    record: Record
    precision: str

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return float(1e3 * self.record["tflops"] / self.record["gbps"])

    @property
    def title(self) -> str:
        r = self.record
        return f"{impl_title(r['impl'])}, {r['op']} {r['case']} {r['dtype']}"


def roofline_blocks(results: BenchmarkResults) -> list[Block]:
    """The figure, and the points above a measured ceiling; empty without ceilings."""
    copy, known = results.ceiling("copy_gbps"), peaks.peaks(results.environment)
    placed = [found for record in results.records if (found := _place(record, known)) is not None]
    if copy is None or not placed:
        return []
    present = [name for name in known if any(p.precision == name for p in placed)]
    roofs = _roofs(copy, results, {name: known[name] for name in present})
    points = [
        Point(
            p.intensity,
            p.record["tflops"],
            svg.colour(COLOURS[p.precision]),
            f"{p.title}: {numbers.tflops(p.record['tflops'])} in {p.precision}, "
            f"{numbers.microseconds(p.record['median_us'])}",
            hollow=not is_ours(p.record["impl"]),
        )
        for p in placed
    ]
    figure = Figure(
        "Roofline",
        lambda width: roofline(roofs, points, title="Roofline of the benchmark cases", width=width),
        "Each precision has a roof of its colour. Solid: measured in the same run; dashed: the "
        "datasheet. Filled: cukit; rings: peers. FLOPs and bytes are the minimum that the op "
        "needs, so additional traffic shows as a lower point.",
        tuple((svg.colour(COLOURS[name]), _legend(name, known[name])) for name in present),
    )
    return [figure, *_above(placed, copy, known, results)]


def _place(record: Record, known: Mapping[str, tuple[Peak, ...]]) -> Placed | None:
    rates = (record.get("tflops") or 0.0, record.get("gbps") or 0.0)
    if not record["correct"] or min(rates) <= 0.0:  # the axes are logarithmic
        return None
    precision = peaks.precision_of(record["dtype"], record["case"], record["impl"])
    return Placed(record, precision) if precision is not None and precision in known else None


def _roofs(
    copy: float, results: BenchmarkResults, known: Mapping[str, tuple[Peak, ...]]
) -> list[Roof]:
    roofs = [Roof("bandwidth", copy, f"copy {numbers.gbps(copy)}", measured=True)]
    if gbps := datasheet_ceilings(str(results.environment.get("gpu"))).datasheet_gbps:
        label = f"datasheet {numbers.gbps(gbps)}"
        roofs.append(Roof("bandwidth", gbps, label, measured=False))
    # Precisions with the same rate share a line in the colour of the first.
    lines: dict[tuple[float, bool], list[str]] = {}
    for name, found in known.items():
        for peak in found:
            lines.setdefault((peak.tflops, peak.measured), []).append(name)
    for (rate, measured), names in lines.items():
        colour = svg.colour(COLOURS[names[0]])
        roofs.append(Roof("compute", rate, f"{rate:,.0f}", measured, colour))
    return roofs


def _legend(precision: str, found: Sequence[Peak]) -> str:
    rates = [f"{'measured' if peak.measured else 'datasheet'} {peak.tflops:,.0f}" for peak in found]
    return f"{precision}: {', '.join(rates)} TFLOP/s"


def _above(
    placed: Sequence[Placed],
    copy: float,
    known: Mapping[str, tuple[Peak, ...]],
    results: BenchmarkResults,
) -> list[Block]:
    """Explains points above a measured ceiling."""
    on_paper = datasheet_ceilings(str(results.environment.get("gpu"))).datasheet_gbps
    rows = []
    for p in placed:
        rate, memory = p.record["tflops"], copy * p.intensity / 1e3
        peak = known[p.precision][0]
        # The roof that applies at this intensity.
        if memory <= peak.tflops:
            ceiling, name, limit = memory, "measured copy", (on_paper or 0) * p.intensity / 1e3
            reason = "the ceiling is a copy, which writes as much as it reads"
        elif peak.measured:
            ceiling, name = peak.tflops, f"measured {p.precision}"
            limit = max((q.tflops for q in known[p.precision] if not q.measured), default=0.0)
            reason = "the ceiling is one square matrix product of random numbers"
        else:
            continue
        if rate <= TOLERANCE * ceiling:
            continue
        if limit and rate > limit:
            reason = "above the datasheet, too: inputs in L2, or less work than declared"
        cells = (
            Cell(p.record["op"], tone="code"),
            Cell(f"{p.record['case']} {p.record['dtype']}"),
            Cell(impl_title(p.record["impl"])),
            Cell(numbers.tflops(rate), rate),
            Cell(f"{name} {ceiling:,.0f}", ceiling),
            Cell(f"+{100 * (rate / ceiling - 1):.1f}%", rate / ceiling),
            Cell(reason, tone="prose"),
        )
        rows.append(cells)
    if not rows:
        return []
    rows.sort(key=lambda row: -(row[5].value or 0.0))
    numeric = ("rate", "ceiling", "above it")
    header = (
        *map(Column, ("op", "case", "implementation")),
        *(Column(name, numeric=True) for name in numeric),
        Column("reason"),
    )
    many = "point is" if len(rows) == 1 else "points are"
    return [
        Paragraph(
            f"{len(rows)} {many} above a measured ceiling, by {rows[0][5].text[1:]} at most. A "
            "measured ceiling is the rate of one program, a copy or a large square matrix product "
            "of cuBLAS, at the clocks during its run. The hardware's limit is dashed."
        ),
        Collapsible("Points above a measured ceiling", (Table(header, tuple(rows)),)),
    ]
