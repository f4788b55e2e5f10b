"""Draws the picture of the measured results: `python -m profiling.figures` (`make tables`).

One pair of bars an op, cukit beside the fastest peer, on the op's largest case. The file is drawn
from profiling/results/ alone, so a test holds it to them; light or dark follows the reader's.
"""

from __future__ import annotations

import sys
from html import escape
from typing import Any
from xml.etree import ElementTree

from cukit.analyzer.report import svg
from cukit.analyzer.report.benchmarks import OURS, BenchmarkResults, largest_cases
from cukit.analyzer.report.section_benchmarks import FASTEST_PEER, draw_summary
from cukit.analyzer.results import read
from profiling.tables import PUBLISHED, ROOT

FIGURE = ROOT / "docs" / "benchmarks.svg"

WIDTH, MARGIN, HEAD = 960.0, 24.0, 74.0


def main() -> int:
    """Bring the picture up to date; say if it changed."""
    new = draw(read(PUBLISHED))
    if new is None:
        print(f"{PUBLISHED} holds nothing to draw")
    elif not FIGURE.exists() or FIGURE.read_text(encoding="utf-8") != new:
        FIGURE.write_text(new, encoding="utf-8")
        print(f"wrote {FIGURE.relative_to(ROOT)}")
    return 0


def draw(results: dict[str, Any]) -> str | None:
    """The picture as a file of SVG, or None where no case has a floor."""
    measured = BenchmarkResults(results["environment"], tuple(results["records"]))
    cases = largest_cases(measured.cases)
    if not cases:
        return None
    bars = draw_summary(cases, WIDTH - 2 * MARGIN)
    height = float(ElementTree.fromstring(bars).attrib["height"])
    whole = HEAD + height + MARGIN / 2
    found = measured.environment
    machine = f"{found['gpu']}, {found['date']}, cold L2, medians. Longer bars are faster."
    panel = svg.element("rect", class_="panel", width=WIDTH, height=whole, rx=12.0)
    placed = svg.element("g", bars, transform=f"translate({MARGIN:.0f} {HEAD:.0f})")
    parts = [
        svg.element("style", svg.style() + "svg .panel { fill: var(--page); }\n"),
        panel,
        svg.element(
            "text",
            escape("Speed of each op on its largest case"),
            x=MARGIN,
            y=36.0,
            style="font-size: 17px; font-weight: 650",
        ),
        svg.text(machine, MARGIN, 56.0, "detail"),
        *_legend(),
        placed,
    ]
    title = "Share of the best conceivable speed of each op, cukit and the fastest peer"
    return svg.figure(WIDTH, whole, title, parts) + "\n"


def _legend() -> list[str]:
    """Names of the two series, in the upper right corner."""
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
