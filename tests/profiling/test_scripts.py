"""Errors of the measuring scripts, which need a GPU to measure."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from profiling import loss_variants, needle, two_gpus
from profiling.tables import replace_between_marks

MARKS = re.compile(r"(<!-- here -->\n).*?(<!-- /here -->)", re.DOTALL)


def test_a_document_without_marks_is_an_error(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text("<!-- here -->\nold\n<!-- /here -->\n")
    replace_between_marks(document, MARKS, "new\n")
    assert document.read_text() == "<!-- here -->\nnew\n<!-- /here -->\n"
    document.write_text("no marks\n")
    with pytest.raises(ValueError, match="no marks"):
        replace_between_marks(document, MARKS, "new\n")


@pytest.mark.parametrize("keys", ["1000", "64"])
def test_needle_rejects_numbers_of_keys(keys: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        needle.main([keys])
    assert f"multiple of 64 and at least 512, got {keys}" in capsys.readouterr().err


def test_loss_variants_lists_its_commands() -> None:
    with pytest.raises(SystemExit, match="unknown command 'head'; known: rows, products, heads"):
        loss_variants.main(["head"])


def start(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code])


@pytest.mark.parametrize(
    ("programs", "status"),
    [
        (["pass", "pass"], 0),
        (["import time; time.sleep(600)", "raise SystemExit(3)"], 3),
        (["pass", "import time; time.sleep(600)", "raise SystemExit(3)"], 3),
    ],
)
def test_the_status_of_the_failing_rank(programs: list[str], status: int) -> None:
    ranks = [start(code) for code in programs]
    assert two_gpus.wait(ranks, grace_seconds=0.0) == status
    assert all(rank.poll() is not None for rank in ranks)
