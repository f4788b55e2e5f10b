"""Results as a trace for Perfetto (ui.perfetto.dev) or Chrome (chrome://tracing).

Launches of a traced script have their measured start times. Elsewhere only durations are measured:
the launches of an analysed call are then placed one after another, in order and without gaps. The
ops of a training step are placed in the same way, in the order of the file (the longest first,
"everything else" last). The track names state this order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cukit.analyzer.report.documents import Document
from cukit.errors import ConfigError

MAX_BYTES = 16 * 2**20
"""Viewers open a file of this size in seconds, but not one of gigabytes."""


@dataclass(frozen=True)
class Span:
    """One entry of the trace."""

    track: str
    name: str
    start_us: float
    duration_us: float
    details: dict[str, Any] = field(default_factory=dict)


def spans_of(documents: Sequence[Document]) -> list[Span]:
    """Everything in `documents` that fits on a timeline."""
    spans: list[Span] = []
    for document in documents:
        if document.kind == "distillation":
            spans += _step(document)
        elif document.kind == "analysis":
            spans += _launches(document)
    return spans


def trace_json(spans: Sequence[Span], max_bytes: int = MAX_BYTES) -> str:
    """Trace events as JSON of at most `max_bytes`; the shortest spans are dropped if necessary.

    `otherData.left_out` counts them.
    """
    tracks = {name: number for number, name in enumerate(dict.fromkeys(s.track for s in spans))}
    names = [
        {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}}
        for name, number in tracks.items()
    ]
    frame = len(_document(names, [], len(spans)))
    by_size = sorted(range(len(spans)), key=lambda index: -spans[index].duration_us)
    kept: list[int] = []
    room = max_bytes - frame
    if room < 0:
        raise ConfigError(f"trace: {max_bytes} bytes are too few even for the names of the tracks")
    for index in by_size:
        room -= len(json.dumps(_event(spans[index], tracks))) + 2
        if room < 0:
            break
        kept.append(index)
    events = [_event(spans[index], tracks) for index in sorted(kept)]
    return _document(names, events, len(spans) - len(kept))


def _document(names: list[dict[str, Any]], events: list[dict[str, Any]], left_out: int) -> str:
    content = {
        "traceEvents": [*names, *events],
        "displayTimeUnit": "ns",
        "otherData": {"generator": "cukit", "left_out": left_out},
    }
    return json.dumps(content)


def _event(span: Span, tracks: dict[str, int]) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 1,
        "tid": tracks[span.track],
        "name": span.name,
        "ts": round(span.start_us, 3),
        "dur": round(span.duration_us, 3),
        "args": span.details,
    }


def _step(document: Document) -> Iterator[Span]:
    start = 0.0
    for entry in document.content["milliseconds_per_step_by_op"]:
        duration = 1e3 * entry["milliseconds"]
        details = {"calls": entry["calls"]}
        yield Span("distillation step, ops by total", entry["name"], start, duration, details)
        start += duration


def _launches(document: Document) -> Iterator[Span]:
    report = document.analysis()
    for each in report.timeline:
        yield Span(f"stream {each.stream}", each.name, each.start_us, each.duration_us)
    if report.timeline:
        return
    for analysis in report.analyses:
        start = 0.0
        for launch in analysis.launches:
            if launch.device_us is None:
                continue
            details = {"grid": launch.grid, "block": launch.block}
            track = f"{analysis.name}, launches in order"
            yield Span(track, launch.name, start, launch.device_us, details)
            start += launch.device_us
