"""The chapter on analysed kernels: times, throughput, residency, advice, and missing values."""

from __future__ import annotations

from collections.abc import Sequence

from cukit.analyzer.report import numbers, svg
from cukit.analyzer.report.instruction_mixes import mix_figure, mix_stack
from cukit.analyzer.report.layout import (
    Block,
    Cell,
    Collapsible,
    Column,
    Figure,
    Gallery,
    Paragraph,
    Section,
    Table,
    Thumbnail,
    cell,
)
from cukit.analyzer.report.lines import occupancy_curve
from cukit.analyzer.report.measured_blocks import probe_blocks, script_blocks, shortened
from cukit.analyzer.report.roofline import Point, Roof, roofline
from cukit.analyzer.schema import (
    AnalysisReport,
    Environment,
    KernelAnalysis,
    LaunchAnalysis,
    RooflinePoint,
    TimeStatistics,
)


def analysis_section(report: AnalysisReport) -> Section:
    """Overview, roofline, and each kernel's details in a fold."""
    environment = report.environment
    blocks: list[Block] = [*script_blocks(report), _overview(report.analyses)]
    if figure := _roofline(report):
        blocks.append(figure)
    if report.accesses:
        blocks += probe_blocks(report.accesses)
    blocks += [
        Collapsible(
            shortened(analysis.name), tuple(_details(analysis)), open=len(report.analyses) == 1
        )
        for analysis in report.analyses
    ]
    return Section("Analysis", _machine(environment), tuple(blocks))


def _machine(environment: Environment) -> str:
    parts = [environment.gpu or f"no GPU: static analysis for {environment.arch}"]
    parts += [f"driver {environment.driver}"] if environment.driver else []
    parts += [f"CUDA {environment.cuda}"] if environment.cuda else []
    parts += [f"{name} {version}" for name, version in environment.versions.items()]
    return " · ".join([*parts, environment.date])


def _overview(analyses: Sequence[KernelAnalysis]) -> Table:
    columns = ("cold", "95% interval", "warm", "bandwidth", "TFLOP/s", "of the roof")
    more = ("registers", "spills", "occupancy", "achieved")
    rows = []
    for analysis in analyses:
        cold, work = analysis.cold, analysis.throughput
        # The last roof is the closest one: the measured one, if there is one.
        roof = analysis.roofline[-1] if analysis.roofline else None
        launch = _main_launch(analysis)
        resources = launch.resources if launch else None
        resident = launch.occupancy if launch else None
        achieved = analysis.counters.achieved_occupancy if analysis.counters else None
        spills = None
        if resources and resources.spill_store_bytes is not None:
            spills = resources.spill_store_bytes + (resources.spill_load_bytes or 0)
        interval = (
            Cell(f"{numbers.digits(cold.ci_low_us)} to {numbers.microseconds(cold.ci_high_us)}")
            if cold
            else Cell("")
        )
        rows.append(
            (
                Cell(analysis.name, tone="code"),
                _time(cold),
                interval,
                _time(analysis.warm),
                cell(work.gbps if work else None, numbers.gbps),
                cell(work.tflops if work else None, numbers.digits),
                _roof(roof),
                cell(resources.registers if resources else None, str),
                cell(spills, numbers.num_bytes, tone="bad" if spills else ""),
                cell(resident.fraction if resident else None, numbers.percent),
                cell(achieved, numbers.percent),
            )
        )
    header = (Column("kernel"), *(Column(name, numeric=True) for name in (*columns, *more)))
    return Table(header, tuple(rows), "Kernels").without_empty_columns()


def _main_launch(analysis: KernelAnalysis) -> LaunchAnalysis | None:
    """The launch that takes longest, or the first if none was traced."""
    return max(analysis.launches, key=lambda launch: launch.device_us or 0.0, default=None)


def _roof(point: RooflinePoint | None) -> Cell:
    if point is None:
        return Cell("")
    return Cell(f"{numbers.percent(point.fraction)} {point.roof}", point.fraction)


def _time(statistics: TimeStatistics | None) -> Cell:
    if statistics is None:
        return Cell("")
    noise = " (noisy)" if statistics.noisy else ""
    return Cell(numbers.microseconds(statistics.median_us) + noise, statistics.median_us)


def _roofline(report: AnalysisReport) -> Figure | None:
    ceilings = report.environment.ceilings
    placed = [a for a in report.analyses if a.roofline and a.throughput and a.throughput.tflops]
    pipes = dict.fromkeys(point.pipe for analysis in placed for point in analysis.roofline)
    bandwidths = ((ceilings.measured_copy_gbps, True), (ceilings.datasheet_gbps, False))
    roofs = [
        Roof("bandwidth", value, f"{_word(measured)} {numbers.gbps(value)}", measured)
        for value, measured in bandwidths
        if value
    ]
    tables = ((ceilings.measured_tflops, True), (ceilings.datasheet_tflops, False))
    for table, measured in tables:
        roofs += [
            Roof("compute", table[pipe], f"{table[pipe]:,.0f}", measured)
            for pipe in pipes
            if pipe in table
        ]
    if not placed or {roof.kind for roof in roofs} != {"bandwidth", "compute"}:
        return None
    limits = "; ".join(
        f"{pipe} {', '.join(rates)}"
        for pipe in pipes
        if (
            rates := [
                f"{_word(measured)} {table[pipe]:,.0f}"
                for table, measured in tables
                if pipe in table
            ]
        )
    )
    points = []
    for series, analysis in enumerate(placed):
        work = analysis.throughput
        assert work is not None
        assert work.tflops is not None
        first = analysis.roofline[0]
        about = f"{analysis.name}: {numbers.tflops(work.tflops)} in {first.pipe}"
        points.append(Point(first.intensity, work.tflops, svg.colour(series), about))
    return Figure(
        "Roofline",
        lambda width: roofline(
            roofs, points, title="Roofline of the analysed kernels", width=width
        ),
        f"Solid: measured on this machine; dashed: its datasheet. Ceilings in TFLOP/s: {limits}.",
        tuple((svg.colour(series), analysis.name) for series, analysis in enumerate(placed)),
    )


def _word(measured: bool) -> str:
    return "measured" if measured else "datasheet"


def _details(analysis: KernelAnalysis) -> list[Block]:
    blocks: list[Block] = []
    if analysis.advice:
        blocks.append(_advice(analysis))
    if analysis.launches:
        blocks.append(_launches(analysis.launches))
    if mixes := _mixes(analysis.launches):
        blocks.append(mixes)
    if accesses := _accesses(analysis.launches):
        blocks.append(accesses)
    if thumbnails := _thumbnails(analysis.launches):
        blocks.append(
            Gallery(
                "Occupancy over threads per block",
                "For the registers and shared memory of this variant; with another block size, the "
                "compiler may use a different number of registers.",
                thumbnails,
            )
        )
    if timings := [t for t in (analysis.cold, analysis.warm) if t]:
        blocks.append(_timings(timings))
    if facts := _facts(analysis):
        blocks.append(facts)
    if analysis.missing:
        rows = tuple(
            (Cell(name), Cell(why, tone="prose")) for name, why in analysis.missing.items()
        )
        columns = (Column("field"), Column("reason"))
        blocks.append(Table(columns, rows, "Not measured"))
    return blocks or [Paragraph("There are no results for this kernel.")]


def _advice(analysis: KernelAnalysis) -> Table:
    rows = tuple(
        (
            *(Cell(words, tone="prose") for words in (a.suggestion, a.expected_gain, a.evidence)),
            Cell(a.rule),
        )
        for a in analysis.advice
    )
    names = ("suggestion", "expected gain", "evidence", "rule")
    return Table(tuple(Column(name) for name in names), rows, "Advice")


def _launches(launches: Sequence[LaunchAnalysis]) -> Table:
    names = ("registers", "shared", "occupancy", "waves", "tail filled", "device time")
    rows = []
    for launch in launches:
        resources, resident, waves = launch.resources, launch.occupancy, launch.waves
        shared = (
            resources.static_shared_bytes + resources.dynamic_shared_bytes if resources else None
        )
        rows.append(
            (
                Cell(launch.name, tone="code"),
                Cell("×".join(map(str, launch.grid)) if all(launch.grid) else ""),
                Cell("×".join(map(str, launch.block))),
                cell(resources.registers if resources else None, str),
                cell(shared, numbers.num_bytes),
                cell(resident.fraction if resident else None, numbers.percent),
                cell(waves.waves if waves else None, numbers.digits),
                cell(waves.tail_fraction if waves else None, numbers.percent),
                cell(launch.device_us, numbers.microseconds),
                Cell(resident.limiter if resident else ""),
            )
        )
    header = (
        *(Column(name) for name in ("launch", "grid", "block")),
        *(Column(name, numeric=True) for name in names),
        Column("limited by"),
    )
    return Table(header, tuple(rows), "Launches").without_empty_columns()


def _mixes(launches: Sequence[LaunchAnalysis]) -> Figure | None:
    """The instruction mix of each launch, without padding. Instructions in loops count once."""
    known = {launch.name: launch.instruction_mix for launch in launches if launch.instruction_mix}
    if not known:
        return None
    return mix_figure(
        "Instruction mix",
        [mix_stack(shortened(name), [mix]) for name, mix in known.items()],
    )


def _accesses(launches: Sequence[LaunchAnalysis]) -> Table | None:
    """Memory instructions in the code. Instructions in loops count once."""
    rows: list[tuple[Cell, ...]] = []
    for launch in launches:
        access = launch.memory_access
        if access is None:
            continue
        name = Cell(launch.name, tone="code")
        for width in access.widths:
            bits = Cell(f"{width.bits} bit", width.bits)
            count = Cell(str(width.instructions), width.instructions)
            rows.append((name, Cell(width.operation), bits, count))
        for what, number in (("bulk copy", access.bulk_copies), ("atomic", access.atomics)):
            if number:
                rows.append((name, Cell(what), Cell(""), Cell(str(number), number)))
    columns = (Column("launch"), Column("access"), Column("per thread", numeric=True))
    header = (*columns, Column("instructions", numeric=True))
    return Table(header, tuple(rows), "Memory accesses in the code") if rows else None


def _thumbnails(launches: Sequence[LaunchAnalysis]) -> tuple[Thumbnail, ...]:
    """One curve for each distinct launch with known residency."""
    found: dict[tuple[object, ...], Thumbnail] = {}
    for launch in launches:
        resident = launch.occupancy
        if resident is None or not resident.by_threads:
            continue
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        values = [(point.value, point.fraction) for point in resident.by_threads]
        title = f"{launch.name}: occupancy over threads per block"
        share = numbers.percent(resident.fraction)
        detail = f"{share} at {threads} threads, limited by {resident.limiter}"
        markup = occupancy_curve(values, threads, title=title)
        found.setdefault((launch.name, threads, markup), Thumbnail(launch.name, detail, markup))
    return tuple(found.values())


def _timings(timings: Sequence[TimeStatistics]) -> Table:
    names = ("median", "IQR", "mean", "std", "min", "max", "samples")
    rows = []
    for t in timings:
        times = (t.median_us, t.iqr_us, t.mean_us, t.std_us, t.min_us, t.max_us)
        cells = [Cell(numbers.microseconds(value), value) for value in times]
        own = f"{numbers.digits(t.overhead_us)} ± {t.overhead_uncertainty_us:.2f} µs"
        subtracted = Cell(own, t.overhead_us) if t.overhead_us else Cell("")
        count = Cell(str(t.samples), t.samples)
        rows.append((Cell(t.cache), Cell(t.timer), *cells, count, subtracted))
    header = (
        *(Column(name) for name in ("L2", "timer")),
        *(Column(name, numeric=True) for name in (*names, "timer overhead, subtracted")),
    )
    return Table(header, tuple(rows), "Samples").without_empty_columns()


def _facts(analysis: KernelAnalysis) -> Table | None:
    """Energy, the GPU's state and counters, one row each."""
    facts: list[tuple[str, str]] = []
    if energy := analysis.energy:
        value = f"{energy.joules_per_call:.3g} ± {energy.uncertainty_joules:.1g} J per call"
        window = f"{energy.window_s:.1f} s at {energy.mean_watts:.0f} W"
        facts.append(("energy", f"{value}, {energy.calls_per_joule:.3g} calls per J ({window})"))
    if state := analysis.conditions:
        if state.sm_clock_mhz is not None:
            limit = f" of {state.sm_clock_max_mhz:.0f}" if state.sm_clock_max_mhz else ""
            facts.append(("SM clock", f"{state.sm_clock_mhz:.0f}{limit} MHz"))
        if state.temperature_c is not None:
            facts.append(("temperature", f"{state.temperature_c:.0f} °C"))
        facts.append(("throttled by", ", ".join(state.throttle_reasons) or "nothing"))
    if analysis.peak_bytes is not None:
        facts.append(("memory besides inputs", numbers.num_bytes(analysis.peak_bytes)))
    if counters := analysis.counters:
        for name, count in (
            ("read", counters.dram_read_bytes),
            ("written", counters.dram_write_bytes),
        ):
            if count is not None:
                facts.append(
                    (f"device memory {name} ({counters.source})", numbers.num_bytes(count))
                )
        for name, share in (("L1", counters.l1_hit_fraction), ("L2", counters.l2_hit_fraction)):
            if share is not None:
                facts.append((f"{name} hits ({counters.source})", numbers.percent(share)))
        for name, sectors in (
            ("load", counters.load_sectors_per_request),
            ("store", counters.store_sectors_per_request),
        ):
            if sectors is not None:
                what = f"sectors per {name} request ({counters.source})"
                facts.append((what, numbers.digits(sectors)))
    rows = tuple((Cell(name), Cell(value, tone="prose")) for name, value in facts)
    return Table((Column("fact"), Column("value")), rows, "Other facts") if rows else None
