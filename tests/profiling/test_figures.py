"""The picture of the published results."""

from __future__ import annotations

from xml.etree import ElementTree

from cukit.analyzer.results import read
from profiling.figures import FIGURE, draw
from profiling.tables import PUBLISHED
from tests.analyzer.report import samples


def test_the_picture_stands_alone() -> None:
    picture = draw(samples.benchmarks())
    assert picture is not None
    assert picture == draw(samples.benchmarks())
    ElementTree.fromstring(picture)
    assert "prefers-color-scheme: dark" in picture
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    for words in ("rms_norm", "161 µs, 1.25×", "NVIDIA H200, 2026-01-02", "torch-cudnn"):
        assert words in picture


def test_nothing_measured_nothing_drawn() -> None:
    assert draw({"environment": {}, "records": []}) is None


def test_the_picture_shows_what_was_measured() -> None:
    drawn = FIGURE.read_text(encoding="utf-8") if FIGURE.exists() else None
    assert drawn == draw(read(PUBLISHED)), "run `make tables`"
