"""Plots of a pool's address space: SVG for documents, text for terminals.

Free memory has two colours: whole pages, which remapping can gather at new addresses, and parts of
pages, which join a larger hole only if the blocks beside them move. The SVG contains light and dark
styles, scoped to one class, so it works as a file and inside any page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from rich.text import Text

from cukit.memory.bookkeeping.blocks import Range
from cukit.memory.history import Sample
from cukit.memory.layout import KINDS, Layout, Piece, largest_hole, totals

NAMES = {
    "live": "live",
    "pending": "pending",
    "whole": "free, whole pages",
    "part": "free, beside live memory",
    "unmapped": "no memory",
}

WIDTH = 960.0
MARGIN, LABEL, HEAD = 16.0, 92.0, 62.0
ROW, GAP = 20.0, 8.0
ROWS = 8
"""Maximum number of rows of the map."""
MIN_WIDTH = 2.0
"""Narrower blocks are drawn together, as stacked shares."""
PAGE_MARKS = 5.0
"""Page boundaries are marked if pages are at least this wide."""
TIP = 8.0
"""Narrower pieces have no tooltip."""

STYLE = """
.cukit-memory { --live: #2a5fd6; --pending: #d49a3a; --whole: #9fd3b0; --part: #e3b5ac;
  --ink: #1b1f27; --soft: #5b6472; --edge: #c3cad4; --back: #fbfbfa; }
@media (prefers-color-scheme: dark) {
  .cukit-memory { --live: #6f9bff; --pending: #c99a4b; --whole: #3c6f52; --part: #7d463e;
    --ink: #e6e9ef; --soft: #a3adbb; --edge: #3d4654; --back: #12151b; } }
.cukit-memory text { font: 11px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif;
  fill: var(--soft); stroke: none; }
.cukit-memory .title { font-size: 14px; font-weight: 650; fill: var(--ink); }
.cukit-memory .live { fill: var(--live); } .cukit-memory .pending { fill: var(--pending); }
.cukit-memory .whole { fill: var(--whole); } .cukit-memory .part { fill: var(--part); }
.cukit-memory .unmapped { fill: none; stroke: var(--edge); stroke-dasharray: 2 3; }
.cukit-memory .back { fill: var(--back); } .cukit-memory .tick { stroke: var(--edge); }
.cukit-memory .curve { fill: none; stroke: var(--ink); stroke-width: 1.6; }
.cukit-memory .area { opacity: 0.85; } .cukit-memory .tip { fill: transparent; }
"""


# The map ------------------------------------------------------------------------------------------


def map_svg(ranges: Sequence[Range], title: str = "Memory of the pool", rows: int = ROWS) -> str:
    """The address space as one SVG element: all ranges in order, in rows."""
    layout = Layout(ranges, rows)
    scale = (WIDTH - LABEL - MARGIN) / layout.row_bytes
    present = {stretch.kind for stretch in layout.stretches}
    parts = _heading(title, summary(ranges), [kind for kind in KINDS if kind in present])
    shapes: dict[str, list[str]] = {kind: [] for kind in KINDS}
    marks, tips, number = [], [], 0
    for number, (start, end) in enumerate(layout.rows(), start=1):
        top = HEAD + (number - 1) * (ROW + GAP)
        parts.append(_text(num_bytes(start), LABEL - 8, top + 14, anchor="end"))
        for piece in layout.pieces(start, end, MIN_WIDTH / scale):
            x, width = LABEL + (piece.start - start) * scale, piece.size * scale
            for kind, y, height in _shares(piece, top):
                inset = 0.5 if width > 2 * MIN_WIDTH else 0.0
                shapes[kind].append(
                    f"M{_n(x)} {_n(y)}h{_n(width - inset)}v{_n(height)}h{_n(inset - width)}z"
                )
            if width >= TIP:
                tips.append(_tip(piece, x, top, width))
        if layout.page_bytes * scale >= PAGE_MARKS:
            marks.append(_page_marks(layout, start, end, top, scale))
    parts += [
        f'<path class="{kind}" d="{"".join(shapes[kind])}"/>' for kind in KINDS if shapes[kind]
    ]
    height = HEAD + number * (ROW + GAP) + MARGIN / 2
    return _figure(height, title, [*parts, *marks, *tips])


def _shares(piece: Piece, top: float) -> Iterator[tuple[str, float, float]]:
    """(kind, top, height) of a piece's parts: one bar, or the stacked shares of several kinds."""
    y, total = top + ROW, sum(piece.shares.values())
    for kind in KINDS:
        if share := piece.shares[kind]:
            height = ROW * share / total
            y -= height
            yield kind, y, height


def _tip(piece: Piece, x: float, top: float, width: float) -> str:
    """A transparent rectangle with a tooltip that lists the kinds and sizes."""
    shares = [(kind, piece.shares[kind]) for kind in KINDS if piece.shares[kind]]
    named = ", ".join(f"{NAMES[kind]}: {num_bytes(share)}" for kind, share in shares)
    place = f'x="{_n(x)}" y="{_n(top)}" width="{_n(width)}" height="{_n(ROW)}"'
    return f'<rect class="tip" {place}><title>{escape(named)}</title></rect>'


def _page_marks(layout: Layout, start: int, end: int, top: float, scale: float) -> str:
    page, y = layout.page_bytes, _n(top + ROW + 1)
    path = "".join(
        f"M{_n(LABEL + (place + address - low - start) * scale)} {y}v3"
        for place, size, kind, low in layout.between(start, end)
        for address in range(-(-low // page) * page, low + size + 1, page)
        if kind != "unmapped"
    )
    return f'<path class="tick" d="{path}"/>'


def summary(ranges: Sequence[Range]) -> str:
    """One line of numbers."""
    found = totals(ranges)
    free = found["whole"] + found["part"]
    hole = largest_hole(ranges)
    parts = [f"{num_bytes(found['live'])} live"]
    if found["pending"]:
        parts.append(f"{num_bytes(found['pending'])} pending")
    parts.append(f"{num_bytes(free)} free, {num_bytes(found['whole'])} of it whole pages")
    if free:
        parts.append(f"largest hole {num_bytes(hole)}")
        parts.append(f"fragmentation {1 - hole / free:.0%}")
    return " · ".join(parts)


# Over time ----------------------------------------------------------------------------------------

MAX_POINTS = 400


def timeline_svg(samples: Sequence[Sample], title: str = "Memory over time") -> str:
    """Live and held memory as areas, fragmentation as a line, over the events of a history."""
    height, bottom, top = 220.0, 24.0, HEAD
    right = WIDTH - 48.0
    shown = _grouped(samples)
    parts = _heading(title, _over_time(samples), ("live", "whole"), curve=True)
    if shown:
        most = max(sample.mapped for sample in samples) or 1
        last = max(len(shown) - 1, 1)
        xs = [LABEL + (right - LABEL) * number / last for number in range(len(shown))]

        def place(share: float) -> float:
            return height - bottom - (height - bottom - top) * share

        for kind, values in (
            ("whole", [max(s.mapped for s in group) / most for group in shown]),
            ("live", [max(s.live for s in group) / most for group in shown]),
        ):
            line = "L".join(f"{_n(x)} {_n(place(v))}" for x, v in zip(xs, values, strict=True))
            base = _n(height - bottom)
            area = f"M{_n(xs[0])} {base}L{line}L{_n(xs[-1])} {base}Z"
            parts.append(f'<path class="area {kind}" d="{area}"/>')
        curve = "L".join(
            f"{_n(x)} {_n(place(_mean_fragmentation(group)))}"
            for x, group in zip(xs, shown, strict=True)
        )
        parts.append(f'<path class="curve" d="M{curve}"/>')
        for share in (0.0, 0.5, 1.0):
            parts.append(_text(num_bytes(most * share), LABEL - 8, place(share) + 4, anchor="end"))
            parts.append(_text(f"{share:.0%}", right + 8, place(share) + 4))
        seconds = samples[-1].time - samples[0].time
        note = f"{len(samples):,} events in {seconds:.3g} s"
        parts.append(_text(note, right, height - 8, anchor="end"))
    return _figure(height, title, parts)


def _grouped(samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    """Consecutive samples in at most MAX_POINTS groups."""
    group = -(-len(samples) // MAX_POINTS) or 1
    return [samples[start : start + group] for start in range(0, len(samples), group)]


def _mean_fragmentation(samples: Sequence[Sample]) -> float:
    return sum(sample.fragmentation for sample in samples) / len(samples)


def _over_time(samples: Sequence[Sample]) -> str:
    if not samples:
        return "no events"
    live, held = max(s.live for s in samples), max(s.mapped for s in samples)
    mean = _mean_fragmentation(samples)
    return (
        f"at most {num_bytes(live)} live and {num_bytes(held)} held · "
        f"fragmentation {mean:.0%} on average"
    )


# In a terminal ------------------------------------------------------------------------------------

_COLOURS = {
    "live": "blue",
    "pending": "yellow",
    "whole": "green",
    "part": "red",
    "unmapped": "dim",
    "gap": "",
}
_GLYPHS = {"live": "█", "pending": "▓", "whole": "░", "part": "▒", "unmapped": "·", "gap": " "}


def map_text(ranges: Sequence[Range], width: int = 96, rows: int = ROWS) -> Text:
    """The address space as characters; each shows the most frequent kind of its bytes."""
    layout = Layout(ranges, rows)
    result = Text(summary(ranges) + "\n")
    for start, end in layout.rows():
        result.append(f"{num_bytes(start):>10} ", "dim")
        columns = range(-(-(end - start) * width // layout.row_bytes))
        for kind, run in groupby(_column(layout, start, end, width, n) for n in columns):
            result.append(_GLYPHS[kind] * len(list(run)), _COLOURS[kind])
        result.append("\n")
    for kind in KINDS:
        result.append(f"{_GLYPHS[kind]} ", _COLOURS[kind])
        result.append(f"{NAMES[kind]}   ", "dim")
    return result


def _column(layout: Layout, start: int, end: int, width: int, number: int) -> str:
    """The most frequent kind of one character's bytes; "gap" if it has none."""
    low = start + number * layout.row_bytes // width
    high = max(min(start + (number + 1) * layout.row_bytes // width, end), low + 1)
    shares = dict.fromkeys(KINDS, 0)
    for stretch in layout.between(low, high):
        shares[stretch.kind] += stretch.size
    return max(KINDS, key=lambda kind: shares[kind]) if any(shares.values()) else "gap"


# SVG elements -------------------------------------------------------------------------------------


def _heading(title: str, line: str, kinds: Sequence[str], *, curve: bool = False) -> list[str]:
    parts = [_text(title, MARGIN, 22, "title"), _text(line, MARGIN, 40)]
    named = [NAMES[kind] for kind in kinds] if not curve else ["live", "held"]
    x = WIDTH - MARGIN
    if curve:
        x -= 92
        parts.append(_text("fragmentation", x + 16, 22))
        parts.append(f'<path class="curve" d="M{_n(x - 2)} 18h12"/>')
        x -= 14
    for kind, name in reversed(list(zip(kinds, named, strict=True))):
        x -= 6.1 * len(name)
        parts.append(_text(name, x, 22))
        x -= 16
        parts.append(f'<rect class="{kind}" x="{_n(x)}" y="13" width="11" height="11"/>')
        x -= 12
    return parts


def _figure(height: float, title: str, parts: Sequence[str]) -> str:
    size = f'width="{_n(WIDTH)}" height="{_n(height)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(WIDTH)} {_n(height)}" {size} '
        f'class="cukit-memory" role="img" aria-label="{escape(title, quote=True)}">'
        f'<style>{STYLE}</style><rect class="back" {size} rx="8"/>{"".join(parts)}</svg>'
    )


def _text(
    content: str, x: float, y: float, kind: str | None = None, anchor: str | None = None
) -> str:
    extra = f' class="{kind}"' if kind else ""
    extra += f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{_n(x)}" y="{_n(y)}"{extra}>{escape(content)}</text>'


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def num_bytes(value: float) -> str:
    """`"1.5 GiB"`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:.0f} B"
