"""Building blocks of the programs that draw the figures of docs/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from xml.etree import ElementTree

from cukit.analyzer.report import svg
from profiling.tables import ROOT

WIDTH, MARGIN = 960.0, 24.0
_HEAD = 74.0


def write_changed(drawn: Mapping[Path, str | None]) -> None:
    """Write the figures that differ from their files, and print their names. None: not drawn."""
    for path, new in drawn.items():
        if new is not None and (not path.exists() or path.read_text(encoding="utf-8") != new):
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


def background(width: float, height: float) -> list[str]:
    """The style and the panel, which follow the browser's light or dark mode."""
    return [
        svg.element("style", svg.style() + "svg .panel { fill: var(--page); }\n"),
        svg.element("rect", class_="panel", width=width, height=height, rx=12.0),
    ]


def figure(chart: str, *, label: str, title: str, subtitle: str, legend: Sequence[str]) -> str:
    """Return an SVG file of WIDTH: titles and legend above a chart of WIDTH - 2 MARGIN.

    label: of the figure, for screen readers.
    """
    height = float(ElementTree.fromstring(chart).attrib["height"]) + _HEAD + MARGIN / 2
    parts = [
        *background(WIDTH, height),
        svg.element(
            "text", escape(title), x=MARGIN, y=36.0, style="font-size: 17px; font-weight: 650"
        ),
        svg.text(subtitle, MARGIN, 56.0, "detail"),
        *legend,
        svg.element("g", chart, transform=f"translate({MARGIN:.0f} {_HEAD:.0f})"),
    ]
    return svg.figure(WIDTH, height, label, parts) + "\n"


def swatch(x: float, series: int) -> str:
    """The coloured square of a series in a legend."""
    return svg.element(
        "rect", x=x, y=26.0, width=11.0, height=11.0, rx=2.0, class_=svg.colour(series)
    )
