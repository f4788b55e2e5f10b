"""The chapter on a distillation run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cukit.analyzer.report import numbers, svg
from cukit.analyzer.report.bars import Bar, Group, bar_chart
from cukit.analyzer.report.layout import (
    Block,
    Cell,
    Code,
    Collapsible,
    Column,
    Figure,
    Paragraph,
    Section,
    Table,
    Tile,
    Tiles,
)
from cukit.analyzer.report.lines import Curve, line_chart

TITLES = {
    "teacher": "teacher",
    "student": "student, distilled",
    "student-alone": "student, alone",
    "student-attention": "with attention",
    "student-hidden": "with hidden states",
}
COLOURS = {
    "student": 0, "student-alone": 1, "teacher": 2, "student-attention": 3, "student-hidden": 4,
}  # fmt: skip
"""Colour 0, elsewhere cukit's, is the distilled student's."""


def distillation_section(run: dict[str, Any]) -> Section:
    """`run`: the content of report.json."""
    models = run["models"]
    blocks: list[Block] = [
        Paragraph(run["verdict"], lead=True),
        _tiles(run),
        _quality(models),
        _models_table(models),
        *_loss_terms(run),
        *_quantized(run),
        *_curves(run),
        _breakdown(run["milliseconds_per_step_by_op"]),
        _ops_table(run["milliseconds_per_step_by_op"]),
        Code(run["sample"], "Text written by the distilled student"),
    ]
    if pool := run.get("pool"):
        blocks.append(_pool_table(pool))
    blocks.append(Collapsible("Settings", (_settings(run["settings"]),)))
    corpus = run["corpus"]
    subtitle = (
        f"{corpus['text']}: {corpus['train_bytes'] / 1e6:.1f} MB of training text, "
        f"{corpus['validation_bytes'] / 1e6:.1f} MB of validation text · "
        f"{run['settings']['device']}, {run['settings']['dtype']} · "
        f"{numbers.seconds(run['seconds'])}"
    )
    return Section("Distillation", subtitle, tuple(blocks))


def _tiles(run: dict[str, Any]) -> Tiles:
    student, teacher = run["models"]["student"], run["models"]["teacher"]
    gain = run["gain_bits_per_byte"]
    helped = run.get("distilled_beats_alone", gain > 0)  # None: no significant difference
    tone = "quiet" if helped is None else "good" if helped else "bad"
    smaller = teacher["parameters"] / student["parameters"]
    return Tiles(
        (
            Tile(f"{gain:+.4f}", "bits per byte gained", tone),
            Tile(f"{student['bits_per_byte']:.4f}", "bits per byte, distilled student"),
            Tile(f"{smaller:.1f}×", "smaller than its teacher"),
            Tile(f"{student['tokens_per_second']:,.0f}", "tokens per second in distillation"),
            Tile(numbers.num_bytes(run["peak_memory_bytes"]), "peak memory"),
        )
    )


def _quality(models: Mapping[str, Any]) -> Figure:
    groups = []
    for phase, facts in models.items():
        value = facts["bits_per_byte"]
        parameters = f"{numbers.count(facts['parameters'])} parameters"
        bar = Bar(COLOURS[phase], value, f"{value:.4f}", f"{TITLES[phase]}: {value:.4f}")
        groups.append(Group(TITLES[phase], parameters, (bar,)))
    title = "Bits per byte on validation text"
    return Figure(
        title,
        lambda width: bar_chart(groups, title=title, unit="bits per byte", width=width),
        "Shorter is better.",
    )


def _models_table(models: Mapping[str, Any]) -> Table:
    columns = ("parameters", "bits per byte", "KL to teacher (bits)")
    more = ("top-1 agreement with teacher", "top-1 accuracy", "tokens/s", "training time")
    rows = []
    best = min(("student", "student-alone"), key=lambda phase: models[phase]["bits_per_byte"])
    for phase, facts in models.items():
        kl, agreement = facts["teacher_kl_bits"], facts["teacher_agreement"]
        speed = facts["tokens_per_second"]
        rows.append(
            (
                Cell(TITLES[phase]),
                Cell(f"{facts['parameters']:,}", facts["parameters"]),
                Cell(f"{facts['bits_per_byte']:.4f}", facts["bits_per_byte"]),
                Cell("" if kl is None else f"{kl:.4f}", kl),
                Cell("" if agreement is None else f"{agreement:.1%}", agreement),
                Cell(f"{facts['accuracy']:.1%}", facts["accuracy"]),
                Cell(f"{speed:,.0f}", speed),
                Cell(numbers.seconds(facts["seconds"]), facts["seconds"]),
            )
        )
    header = (Column("model"), *(Column(name, numeric=True) for name in (*columns, *more)))
    emphasis = (list(models).index(best),)
    return Table(header, tuple(rows), "Models on validation text", emphasis)


def _loss_terms(run: dict[str, Any]) -> list[Block]:
    """The gain of each term of the loss, for runs that measured it."""
    variants = run.get("ways") or []
    if len(variants) < 2:
        return []

    def with_interval(value: float | None, around: list[float] | None, form: str) -> Cell:
        if value is None:
            return Cell("", None)
        ends = "" if around is None else f" ({around[0]:{form}} to {around[1]:{form}})"
        return Cell(f"{value:{form}}{ends}", value)

    rows = [
        (
            Cell(TITLES[each["model"]]),
            Cell(f"{each['bits_per_byte']:.4f}", each["bits_per_byte"]),
            with_interval(each["gain_bits_per_byte"], each["gain_interval"], "+.4f"),
            with_interval(each["gap_closed"], each["gap_closed_interval"], ".1%"),
        )
        for each in variants
    ]
    names = ("bits per byte", "gain over training alone", "of the gap to the teacher closed")
    header = (Column("model"), *(Column(name, numeric=True) for name in names))
    return [Table(header, tuple(rows), "Gain from distillation, and with each term")]


def _quantized(run: dict[str, Any]) -> list[Block]:
    """The student in other formats, for runs that quantised it."""
    found = run.get("quantized") or []
    if not found:
        return []
    plain = run["models"]["student"]["bits_per_byte"]
    rows = [
        (
            Cell(each["format"]),
            Cell(f"{each['bits_per_weight']:.2f}", each["bits_per_weight"]),
            Cell(numbers.num_bytes(each["weight_bytes"]), each["weight_bytes"]),
            Cell(f"{each['bits_per_byte']:.4f}", each["bits_per_byte"]),
            Cell(f"{each['bits_per_byte'] - plain:+.4f}", each["bits_per_byte"] - plain),
            Cell(f"{each['teacher_kl_bits']:.4f}", each["teacher_kl_bits"]),
        )
        for each in found
    ]
    names = ("bits per weight", "bytes", "bits per byte", "change", "KL to teacher (bits)")
    header = (Column("weights"), *(Column(name, numeric=True) for name in names))
    title = f"The distilled student's layers, quantised ({plain:.4f} bits per byte before)"
    return [Table(header, tuple(rows), title)]


def _curves(run: dict[str, Any]) -> list[Block]:
    alpha, hidden = run["settings"]["alpha"], run["settings"]["hidden_weight"]
    states = " and the distance between hidden states" if hidden else ""
    curves = [
        Curve(TITLES[phase], COLOURS[phase], tuple((s, v) for s, v in facts["history"]))
        for phase, facts in run["models"].items()
        if facts["history"]
    ]
    title = "Loss in training"
    figure = Figure(
        title,
        lambda width: line_chart(curves, title=title, x_label="step", y_label="loss", width=width),
        "Nats per byte, on training batches. The distilled student minimises another loss than the "
        f"others: {alpha:g} parts of divergence from its teacher to {1 - alpha:.4g} of "
        f"cross-entropy{states}. Compare the curves' shapes, not their heights.",
        tuple((svg.colour(curve.series), curve.name) for curve in curves),
    )
    return [figure] if curves else []


def _breakdown(ops: list[dict[str, Any]]) -> Figure:
    whole = sum(entry["milliseconds"] for entry in ops) or 1.0
    groups = []
    for entry in ops:
        ms = entry["milliseconds"]
        word = "call" if entry["calls"] == 1 else "calls"
        calls = f"{entry['calls']:g} {word}" if entry["calls"] else ""
        note = f"{numbers.digits(ms)} ms, {ms / whole:.1%}"
        bar = Bar(0, ms, note, f"{entry['name']}: {note}")
        groups.append(Group(entry["name"], calls, (bar,)))
    title = "Time of a distillation step by op"
    return Figure(
        title,
        lambda width: bar_chart(groups, title=title, unit="ms per step", width=width),
        f"A whole step takes {numbers.digits(whole)} ms.",
    )


def _ops_table(ops: list[dict[str, Any]]) -> Table:
    whole = sum(entry["milliseconds"] for entry in ops) or 1.0
    rows = [
        (
            Cell(entry["name"], tone="code" if entry["calls"] else ""),
            Cell(f"{entry['calls']:g}" if entry["calls"] else "", entry["calls"]),
            Cell(f"{entry['milliseconds']:.3f}", entry["milliseconds"]),
            Cell(f"{entry['milliseconds'] / whole:.1%}", entry["milliseconds"] / whole),
        )
        for entry in ops
    ]
    names = ("calls", "ms", "share")
    header = (Column("op"), *(Column(name, numeric=True) for name in names))
    return Table(header, tuple(rows), "Ops of a step")


def _pool_table(pool: Mapping[str, Any]) -> Table:
    """`pool`: null if the run did not use a cukit pool, absent in older reports."""
    rows = (
        (Cell("peak live"), Cell(numbers.num_bytes(pool["peak_live_bytes"]))),
        (Cell("peak taken from the GPU"), Cell(numbers.num_bytes(pool["peak_reserved_bytes"]))),
        (Cell("allocations"), Cell(f"{pool['num_allocations']:,}")),
        (Cell("hits of an exact-size free list"), Cell(f"{pool['hit_rate']:.1%}")),
        (Cell("pages remapped"), Cell(f"{pool['pages_remapped']:,}")),
        (Cell("defragmentations"), Cell(f"{pool['num_defragments']:,}")),
        (Cell("bytes moved"), Cell(numbers.num_bytes(pool["bytes_moved"]))),
        (Cell("fragmentation at the end"), Cell(numbers.percent(pool["fragmentation"]))),
    )
    return Table((Column("memory pool"), Column("", numeric=True)), rows, "The memory pool")


def _settings(settings: Mapping[str, Any]) -> Table:
    rows = tuple((Cell(name, tone="code"), Cell(str(value))) for name, value in settings.items())
    return Table((Column("setting"), Column("value")), rows)
