"""The figure of the published results."""

from __future__ import annotations

from xml.etree import ElementTree

from cukit.analyzer.results import read
from profiling.figures import FIGURE, draw, figures
from profiling.run import load_cases
from profiling.tables import PAGES, PUBLISHED
from tests.analyzer.report import samples


def test_the_figure_is_self_contained() -> None:
    figure = draw(samples.benchmarks())
    assert figure is not None
    assert figure == draw(samples.benchmarks())
    ElementTree.fromstring(figure)
    assert "prefers-color-scheme: dark" in figure
    assert "http" not in figure.replace("http://www.w3.org/2000/svg", "")
    for words in ("rms_norm", "161 µs, 1.25×", "NVIDIA H200, 2026-01-02", "torch-cudnn"):
        assert words in figure


def test_no_results_give_no_figure() -> None:
    assert draw({"environment": {}, "records": []}) is None


def test_the_figures_show_the_measured_values() -> None:
    expected = figures(read(PUBLISHED))
    assert FIGURE in expected
    for path, figure in expected.items():
        assert path.exists()
        assert path.read_text(encoding="utf-8") == figure, "run `make tables`"


def test_every_op_with_a_bench_case_is_on_a_page() -> None:
    elsewhere = {"batched_copy"}  # docs/memory.md
    benched = {case.op for case in load_cases()}
    assert benched - elsewhere == {op for ops in PAGES.values() for op in ops}
