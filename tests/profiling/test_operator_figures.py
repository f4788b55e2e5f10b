"""The figures of the sequence and memory operators show what the ops compute."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from profiling.operator_figures import FIGURES
from profiling.tables import ROOT


@pytest.mark.parametrize("name", FIGURES)
def test_the_file_equals_what_the_ops_compute(name: str) -> None:
    drawn = FIGURES[name]()
    ElementTree.fromstring(drawn)
    assert "prefers-color-scheme: dark" in drawn
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == drawn, "run `make tables`"
