"""Draws the figures of the measured results: `python -m profiling.figures` (`make tables`).

Each op has two bars, cukit and the fastest peer, on its largest case. The figures depend on
profiling/results/ alone, and a test compares both. They follow the browser's light or dark mode.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from cukit.analyzer.report import svg
from cukit.analyzer.report.benchmarks import OURS, largest_cases
from cukit.analyzer.report.section_benchmarks import FASTEST_PEER, draw_summary
from cukit.analyzer.results import read
from profiling.tables import FLOOR, PAGES, PUBLISHED, ROOT, kernel_cases

FIGURE = ROOT / "docs" / "benchmarks.svg"

WIDTH, MARGIN, HEAD = 960.0, 24.0, 74.0


def main() -> int:
    """Update the figures; print the names of those that changed."""
    results = read(PUBLISHED)
    for path, new in figures(results).items():
        if not path.exists() or path.read_text(encoding="utf-8") != new:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


def figures(results: dict[str, Any]) -> dict[Path, str]:
    """The figure of all ops, and one per documentation page."""
    drawn = {FIGURE: draw(results)}
    for page, ops in PAGES.items():
        drawn[FIGURE.with_name(f"benchmarks_{page}.svg")] = draw(results, ops)
    return {path: figure for path, figure in drawn.items() if figure is not None}


def draw(results: dict[str, Any], ops: Collection[str] | None = None) -> str | None:
    """Return the figure of `ops` (default: all) as an SVG file; None if no case has a floor."""
    cases = [case for case in largest_cases(kernel_cases(results)) if ops is None or case.op in ops]
    if not cases:
        return None
    bars = draw_summary(cases, WIDTH - 2 * MARGIN)
    height = float(ElementTree.fromstring(bars).attrib["height"])
    whole = HEAD + height + MARGIN / 2
    found = results["environment"]
    machine = f"{found['gpu']}, {found['date']}, cold L2, median times. Longer bars are faster."
    panel = svg.element("rect", class_="panel", width=WIDTH, height=whole, rx=12.0)
    placed = svg.element("g", bars, transform=f"translate({MARGIN:.0f} {HEAD:.0f})")
    parts = [
        svg.element("style", svg.style() + "svg .panel { fill: var(--page); }\n"),
        panel,
        svg.element(
            "text",
            escape("Share of the floor reached by each op on its largest case"),
            x=MARGIN,
            y=36.0,
            style="font-size: 17px; font-weight: 650",
        ),
        svg.text(machine, MARGIN, 56.0, "detail"),
        *_legend(),
        placed,
    ]
    return svg.figure(WIDTH, whole, FLOOR, parts) + "\n"


def _legend() -> list[str]:
    """The names of the two series, in the upper right corner."""
    parts = []
    x = WIDTH - MARGIN
    for series, name in ((1, FASTEST_PEER), (0, OURS)):
        parts.append(svg.text(name, x, 36.0, "label", "end"))
        x -= svg.text_width(name) * 1.15 + 17
        swatch = svg.element(
            "rect", x=x, y=26.0, width=11.0, height=11.0, rx=2.0, class_=svg.colour(series)
        )
        parts.append(swatch)
        x -= 18
    return parts


if __name__ == "__main__":
    sys.exit(main())
