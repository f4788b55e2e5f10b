"""Draws the figures of docs/memory.md: part of `make tables`.

docs/memory_pools.svg shows measured results. docs/memory_map.svg shows a small pool of host memory;
its layout is the same on every machine.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from cukit.analyzer.report import svg
from cukit.analyzer.report.memory_pools import HELD, draw_held, pool_title, replayed_on
from cukit.analyzer.results import read
from cukit.memory import MemoryPool, MemoryPoolConfig
from cukit.memory.picture import map_svg
from cukit.memory.providers.host import HostProvider
from profiling.drawing import MARGIN, WIDTH, figure, swatch, write_changed
from profiling.memory_pool import FAMILY
from profiling.tables import PUBLISHED, ROOT

BARS = ROOT / "docs" / "memory_pools.svg"
MAP = ROOT / "docs" / "memory_map.svg"

MIB = 1 << 20


def main() -> int:
    """Update the figures; print the names of those that changed."""
    write_changed({BARS: draw_bars(read(PUBLISHED)), MAP: draw_map()})
    return 0


def draw_bars(results: Mapping[str, Any]) -> str | None:
    """One group of bars per log, one bar per pool; None without measurements."""
    records = [record for record in results["records"] if record["family"] == FAMILY]
    if not records:
        return None
    return figure(
        draw_held(records, WIDTH - 2 * MARGIN),
        label=HELD,
        title=HELD,
        subtitle=f"{results['environment']['gpu']}. Shorter is better.",
        legend=_legend([pool_title(pool) for pool in replayed_on(records)]),
    )


def _legend(names: list[str]) -> list[str]:
    parts = []
    x = WIDTH - MARGIN
    for number, name in reversed(list(enumerate(names))):
        x -= svg.text_width(name) * 1.2 + 19
        parts.append(swatch(x, number))
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
