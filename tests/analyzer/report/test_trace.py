"""Traces for a viewer: their spans, and their size limit."""

from __future__ import annotations

import json

import pytest

from cukit.analyzer.report import generate_report
from cukit.analyzer.report.trace import Span, trace_json
from cukit.errors import ConfigError
from tests.analyzer.report import samples


def test_spans_equal_those_of_the_data() -> None:
    report = generate_report([samples.analysis(), samples.distillation(), samples.kernels()])
    trace = json.loads(report.to_trace())
    spans = {e["name"]: e for e in trace["traceEvents"] if e["ph"] == "X"}
    assert spans["my_kernel"]["dur"] == 41.5
    assert spans["matmul"]["dur"] == pytest.approx(10028.36)
    assert spans["flash_attention"]["ts"] == pytest.approx(10028.36)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    assert names == ["my_kernel, launches in order", "distillation step, ops by total"]
    assert trace["otherData"]["left_out"] == 0


def test_launches_of_a_traced_script_keep_their_times_and_streams() -> None:
    trace = json.loads(generate_report([samples.traced()]).to_trace())
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in spans] == [
        ("small", 0.0, 10.0),
        ("large", 5.0, 20.0),
        ("small", 45.0, 5.0),
    ]
    assert [e["tid"] for e in spans] == [0, 1, 0]


@pytest.mark.parametrize("max_bytes", [700, 5_000, 50_000, 10_000_000])
def test_a_trace_respects_its_size_limit_and_counts_omissions(max_bytes: int) -> None:
    spans = [Span(f"track {i % 3}", f"op {i}", float(i), float(i * i % 101)) for i in range(1000)]
    text = trace_json(spans, max_bytes)
    assert len(text.encode()) <= max_bytes
    trace = json.loads(text)
    kept = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(kept) + trace["otherData"]["left_out"] == 1000
    assert (len(kept) == 1000) == (max_bytes == 10_000_000)
    shortest_kept = min(event["dur"] for event in kept)
    assert sum(span.duration_us > shortest_kept for span in spans) <= len(kept)
    assert [event["ts"] for event in kept] == sorted(event["ts"] for event in kept)


def test_a_size_limit_too_small_for_a_trace_is_rejected() -> None:
    with pytest.raises(ConfigError, match="10 bytes"):
        trace_json([Span("track", "op", 0.0, 1.0)], 10)


def test_results_without_times_of_single_ops_are_rejected() -> None:
    with pytest.raises(ConfigError, match="no times of single ops"):
        generate_report([samples.benchmarks()]).to_trace()
