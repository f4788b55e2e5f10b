"""`cukit report` as a command: its files, and a one-line message for every invalid input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cukit.cli import run
from tests.analyzer.report import samples

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(samples.benchmarks()))
    return path


def test_all_output_formats_are_written_at_once(
    results: Path, tmp_path: Path, capsys: Capture
) -> None:
    run_file = tmp_path / "report.json"
    run_file.write_text(json.dumps(samples.distillation()))
    page, data, trace = (
        tmp_path / "out" / f"r.{suffix}" for suffix in ("html", "json", "trace.json")
    )
    arguments = ["report", str(results), str(run_file), "--title", "A run"]
    assert run([*arguments, "-o", str(page), "-o", str(data), "-o", str(trace)]) == 0
    output = capsys.readouterr().out
    assert "faster in 2" in output
    assert f"wrote {page}" in output
    assert "<title>A run</title>" in page.read_text()
    assert [d["kind"] for d in json.loads(data.read_text())["documents"]] == [
        "benchmarks", "distillation",
    ]  # fmt: skip
    assert json.loads(trace.read_text())["traceEvents"]


def test_without_results_the_kernels_are_described(tmp_path: Path, capsys: Capture) -> None:
    page = tmp_path / "kernels.html"
    assert run(["report", "--op", "gelu", "--arch", "sm_80", "-q", "-o", str(page)]) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    text = page.read_text()
    assert "DTYPE=bfloat16" in text
    assert "As compiled for sm_80" in text


def test_a_report_is_written_atomically_and_never_over_a_source(
    results: Path, tmp_path: Path, capsys: Capture
) -> None:
    before = results.read_text()
    assert run(["report", str(results), "-o", str(results)]) == 2
    assert "is one of the results" in capsys.readouterr().err
    assert results.read_text() == before
    page, trace = tmp_path / "r.html", tmp_path / "r.trace.json"  # these results have no trace
    assert run(["report", str(results), "-o", str(page), "-o", str(trace)]) == 2
    assert not page.exists()


@pytest.mark.parametrize("number", ["Infinity", "NaN", "1e999", "9" * 5000])
def test_numbers_out_of_range_are_rejected(number: str, results: Path, capsys: Capture) -> None:
    content = json.loads(results.read_text())
    content["records"][0]["median_us"] = "HERE"
    results.write_text(json.dumps(content).replace('"HERE"', number))
    for command in ("report", "compare"):
        files = [str(results)] * (2 if command == "compare" else 1)
        assert run([command, *files]) == 2
        error = capsys.readouterr().err
        assert "is out of range" in error
        assert len(error) < 300


def test_invalid_inputs_give_a_message(results: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "odd.json").write_text("{}")
    for arguments, complaint in (
        ([str(tmp_path / "absent.json")], "absent.json"),
        ([str(tmp_path / "odd.json")], "not a kind of results"),
        ([str(results), "-o", str(tmp_path / "r.pdf")], "r.pdf"),
        ([str(results), "-o", str(tmp_path / "r.trace.json")], "no times of single ops"),
        ([str(results), "--arch", "sm_80"], "--arch"),
        (["--op", "nonsense"], "nonsense"),
    ):
        assert run(["report", *arguments]) == 2
        captured = capsys.readouterr()
        assert complaint in captured.err
        assert captured.err.startswith("cukit: ")
    assert not (tmp_path / "r.pdf").exists()
