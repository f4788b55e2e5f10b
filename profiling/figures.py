"""Draws the figures of the measured results: `python -m profiling.figures` (`make tables`).

Each op has two bars, cukit and the fastest peer, on its largest case. The figures depend only on
profiling/results/h200.json, and a test checks that they are up to date. They follow the browser's
light or dark mode.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cukit.analyzer.report import svg
from cukit.analyzer.report.benchmarks import largest_cases
from cukit.analyzer.report.section_benchmarks import FASTEST_PEER, draw_summary
from cukit.analyzer.results import OURS, read
from profiling.drawing import MARGIN, WIDTH, figure, swatch, write_changed
from profiling.tables import FIGURE_TITLE, HIGHLIGHTS, PAGES, PUBLISHED, ROOT, kernel_cases

FIGURE = ROOT / "docs" / "benchmarks.svg"


def main() -> int:
    """Update the figures; print the names of those that changed."""
    write_changed(figures(read(PUBLISHED)))
    return 0


def figures(results: dict[str, Any]) -> dict[Path, str]:
    """The figure of all ops, one of the README's ops, and one per documentation page, by path."""
    drawn = {FIGURE: draw(results)}
    for page, ops in {"highlights": HIGHLIGHTS, **PAGES}.items():
        drawn[FIGURE.with_name(f"benchmarks_{page}.svg")] = draw(results, ops)
    return {path: text for path, text in drawn.items() if text is not None}


def draw(results: dict[str, Any], ops: Collection[str] | None = None) -> str | None:
    """Return the figure of `ops` (default: all) as an SVG file; None if no case has a floor."""
    cases = [case for case in largest_cases(kernel_cases(results)) if ops is None or case.op in ops]
    if not cases:
        return None
    found = results["environment"]
    return figure(
        draw_summary(cases, WIDTH - 2 * MARGIN),
        label=FIGURE_TITLE,
        title="Share of the floor reached by each op on its largest case",
        subtitle=f"{found['gpu']}, {found['date']}, cold L2, median times. Longer bars are faster.",
        legend=_legend(),
    )


def _legend() -> list[str]:
    """The legend of the two series, in the upper right corner."""
    parts = []
    x = WIDTH - MARGIN
    for series, name in ((1, FASTEST_PEER), (0, OURS)):
        parts.append(svg.text(name, x, 36.0, "label", "end"))
        x -= svg.text_width(name) * 1.15 + 17
        parts.append(swatch(x, series))
        x -= 18
    return parts


if __name__ == "__main__":
    sys.exit(main())
