"""`cukit bench`: the cases and peers that its arguments select, and exported results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cukit.cli import run
from profiling import run as harness
from profiling.run import Runner

Capture = pytest.CaptureFixture[str]


def cases(capsys: Capture, *arguments: str) -> list[tuple[str, str]]:
    assert run(["bench", "--list", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [(line.split()[0], line.split()[1]) for line in lines]


def test_cases_are_selected_by_family_and_op(capsys: Capture) -> None:
    assert {family for family, _ in cases(capsys, "attention")} == {"attention"}
    assert {op for _, op in cases(capsys, "rope")} == {"rope"}
    assert {op for _, op in cases(capsys, "rope", "--only", "gelu")} == {"rope", "gelu"}
    both = cases(capsys, "--family", "layers", "--only", "rms_norm")
    assert set(both) == {("layers", "rms_norm")}


@pytest.mark.parametrize("arguments", [["nonsense"], ["--only", "nonsense"]])
def test_an_unknown_op_is_named(arguments: list[str], capsys: Capture) -> None:
    assert run(["bench", *arguments]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_peers_are_selected_by_library(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []

    class RecordingRunner(Runner):
        def __init__(self, *, peers: Any, quick: bool) -> None:
            chosen.append(peers)
            super().__init__(peers=peers, quick=quick)

    monkeypatch.setattr(harness, "Runner", RecordingRunner)
    small = ["bench", "rms_norm", "--small"]
    assert run(small) == 0
    assert run([*small, "--peers", "torch,liger"]) == 0
    assert run([*small, "--no-peers"]) == 0
    assert chosen == [True, ["torch", "liger"], False]
    some = Runner(peers=["torch"], quick=True)
    assert [some._wanted(name) for name in ("torch-compile", "torch", "liger")] == [
        True,
        True,
        False,
    ]


def test_results_are_exported(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert run(["bench", "rms_norm", "--small", "--no-peers", "--export", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    assert {(record["op"], record["impl"]) for record in records} == {("rms_norm", "cukit")}
    assert all(record["timer"] in ("events", "wall", "host enqueue") for record in records)
    assert run(["compare", str(path), str(path)]) == 0
