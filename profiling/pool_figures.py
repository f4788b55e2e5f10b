"""Draws the figures of docs/memory.md: part of `make tables`.

docs/memory_pools.svg shows measured results; docs/memory_map.svg shows a small pool of host pages,
whose layout is the same on every machine.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from html import escape
from typing import Any
from xml.etree import ElementTree

from cukit.analyzer.report import svg
from cukit.analyzer.report.memory_pools import HELD, draw_held, pool_title, replayed_on
from cukit.analyzer.results import read
from cukit.memory import MemoryPool, MemoryPoolConfig
from cukit.memory.picture import map_svg
from cukit.memory.providers.host import HostProvider
from profiling.memory_pool import FAMILY
from profiling.tables import PUBLISHED, ROOT

BARS = ROOT / "docs" / "memory_pools.svg"
MAP = ROOT / "docs" / "memory_map.svg"

WIDTH, MARGIN, HEAD = 960.0, 24.0, 74.0
MIB = 1 << 20


def main() -> int:
    """Update the figures; print the names of those that changed."""
    for path, new in ((BARS, draw_bars(read(PUBLISHED))), (MAP, draw_map())):
        if new is not None and (not path.exists() or path.read_text(encoding="utf-8") != new):
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


def draw_bars(results: Mapping[str, Any]) -> str | None:
    """One group of bars per log, one bar per pool; None without measurements."""
    records = [record for record in results["records"] if record["family"] == FAMILY]
    if not records:
        return None
    chart = draw_held(records, WIDTH - 2 * MARGIN)
    height = float(ElementTree.fromstring(chart).attrib["height"])
    whole = HEAD + height + MARGIN / 2
    machine = f"{results['environment']['gpu']}. Shorter is better."
    parts = [
        svg.element("style", svg.style() + "svg .panel { fill: var(--page); }\n"),
        svg.element("rect", class_="panel", width=WIDTH, height=whole, rx=12.0),
        svg.element(
            "text", escape(HELD), x=MARGIN, y=36.0, style="font-size: 17px; font-weight: 650"
        ),
        svg.text(machine, MARGIN, 56.0, "detail"),
        *_legend([pool_title(pool) for pool in replayed_on(records)]),
        svg.element("g", chart, transform=f"translate({MARGIN:.0f} {HEAD:.0f})"),
    ]
    return svg.figure(WIDTH, whole, HELD, parts) + "\n"


def _legend(names: list[str]) -> list[str]:
    parts = []
    x = WIDTH - MARGIN
    for number, name in reversed(list(enumerate(names))):
        x -= svg.text_width(name) * 1.2 + 19
        square = svg.element(
            "rect", x=x, y=26.0, width=11.0, height=11.0, rx=2.0, class_=svg.colour(number)
        )
        parts.append(square)
        parts.append(svg.text(name, x + 15, 36.0, "label"))
        x -= 12
    return parts


def draw_map() -> str:
    """A pool before and after a request larger than any hole, one above the other."""
    pool = MemoryPool(MemoryPoolConfig(max_pool_size=96 * MIB), HostProvider())
    blocks = [pool.allocate(size * MIB) for size in (3, 5) * 12]
    for block in blocks[1::2]:
        pool.free(block)
    before = map_svg(pool.ranges(), "Before: 60 MiB free, largest hole 5 MiB", 4)
    large = pool.allocate(30 * MIB)
    after = map_svg(pool.ranges(), "After: 30 MiB allocated in one piece, nothing copied", 4)
    for block in (large, *blocks[::2]):
        pool.free(block)
    pool.close()
    return stacked([before, after])


def stacked(drawings: list[str]) -> str:
    """Stack drawings of equal width vertically."""
    placed, y = [], 0.0
    for drawing in drawings:
        height = float(ElementTree.fromstring(drawing).attrib["height"])
        placed.append(re.sub(r"<svg ", f'<svg y="{y:g}" ', drawing, count=1))
        y += height + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {y - 8:g}" '
        f'width="{WIDTH:g}" height="{y - 8:g}">{"".join(placed)}</svg>\n'
    )


if __name__ == "__main__":
    sys.exit(main())
