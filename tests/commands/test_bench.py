"""`cukit bench`: the cases and peers that its arguments select."""

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


def test_a_family_or_an_op(capsys: Capture) -> None:
    assert {family for family, _ in cases(capsys, "attention")} == {"attention"}
    assert {op for _, op in cases(capsys, "rope")} == {"rope"}
    assert {op for _, op in cases(capsys, "rope", "--only", "gelu")} == {"rope", "gelu"}
    assert run(["bench", "nonsense"]) == 2


def test_peers_by_the_name_of_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []

    class Noted(Runner):
        def __init__(self, *, peers: Any, quick: bool) -> None:
            chosen.append(peers)
            super().__init__(peers=peers, quick=quick)

    monkeypatch.setattr(harness, "Runner", Noted)
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
