"""The roofline: the limits of memory and arithmetic units, and the kernels below them.

S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for
multicore architectures", Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from cukit.analyzer.report import numbers, svg

LEFT, RIGHT, TOP, BOTTOM = 52.0, 44.0, 26.0, 44.0
"""The right margin holds the labels of ceilings, since no kernel is there."""
LABEL_HEIGHT = 13.0


@dataclass(frozen=True)
class Roof:
    """A limit: "bandwidth" in GB/s, or "compute" in TFLOP/s."""

    kind: str
    value: float
    label: str
    """A few letters for a ceiling; words for a bandwidth, whose line has room for them."""
    measured: bool
    """Whether this machine reached it; if not, it is the datasheet's."""
    class_: str = ""
    """The colour of the points to which it applies; empty for a roof of all points."""


@dataclass(frozen=True)
class Point:
    """A kernel under the roof."""

    flops_per_byte: float
    tflops: float
    class_: str
    description: str
    hollow: bool = False
    """For points that are shown for comparison."""


def roofline(roofs: Sequence[Roof], points: Sequence[Point], *, title: str, width: float) -> str:
    """Both axes are logarithmic; the roof rises up to its ridge and is flat from there."""
    height = 420.0 if width >= 600 else 340.0
    memory = [roof for roof in roofs if roof.kind == "bandwidth"]
    compute = [roof for roof in roofs if roof.kind == "compute"]
    x = _scale([p.flops_per_byte for p in points] + _ridges(memory, compute), LEFT, width - RIGHT)
    lowest = min([p.tflops for p in points] + [x.low * roof.value / 1e3 for roof in memory])
    lowest = max(lowest, min((p.tflops for p in points), default=lowest) / 30)
    highest = max([p.tflops for p in points] + [roof.value for roof in compute])
    y = svg.Scale(lowest / 1.5, highest * 1.6, height - BOTTOM, TOP, logarithmic=True)
    parts = _frame(x, y)
    for roof in memory:
        top = max((c.value for c in _of_same_origin(roof, compute)), default=y.high)
        parts.append(_slope(roof, x, y, top))
    if memory:
        parts.append(_slope_label(memory, x, y, highest))
    for roof, baseline in _placed(compute, y):
        parts += _flat(roof, x, y, memory, baseline)
    size = 1.0 if width >= 600 else 0.75
    # Points for comparison are drawn first, below the others.
    parts += [_dot(p, x, y, size) for p in sorted(points, key=lambda p: not p.hollow)]
    return svg.figure(width, height, title, parts)


def _of_same_origin(roof: Roof, others: Sequence[Roof]) -> list[Roof]:
    """Other roofs of the same origin, measured or datasheet; all if there are none."""
    return [other for other in others if other.measured == roof.measured] or list(others)


def _ridges(memory: Sequence[Roof], compute: Sequence[Roof]) -> list[float]:
    """Intensities above which arithmetic is the limit."""
    return [1e3 * c.value / m.value for c in compute for m in memory]


def _scale(values: Sequence[float], start: float, stop: float) -> svg.Scale:
    """A scale with room on either side of every point and of the ridge."""
    return svg.Scale(min(values) / 4, max(values) * 2, start, stop, logarithmic=True)


def _frame(x: svg.Scale, y: svg.Scale) -> list[str]:
    parts = []
    for value in x.ticks(int((x.stop - x.start) / 60)):
        parts.append(svg.line(x(value), y.stop, x(value), y.start, "grid"))
        label = numbers.tick(value)
        parts.append(svg.tick(label, x(value), y.start + 16, svg.EDGE, x.stop + RIGHT - svg.EDGE))
    for value in y.ticks(8):
        parts.append(svg.line(x.start, y(value), x.stop, y(value), "grid"))
        parts.append(svg.text(numbers.tick(value), x.start - 7, y(value) + 4, "tick", "end"))
    parts.append(svg.text("FLOP per byte", x.stop, y.start + 34, "tick", "end"))
    parts.append(svg.text("TFLOP/s", x.start - 42, y.stop - 10, "tick"))
    return parts


def _slope(roof: Roof, x: svg.Scale, y: svg.Scale, top: float) -> str:
    """The bandwidth's line, from the left or lower edge up to the highest roof."""
    first = max(x.low, 1e3 * y.low / roof.value)
    last = min(1e3 * top / roof.value, x.high)
    ends = (x(first), y(first * roof.value / 1e3), x(last), y(last * roof.value / 1e3))
    return svg.line(*ends, _style(roof))


def _slope_label(memory: Sequence[Roof], x: svg.Scale, y: svg.Scale, top: float) -> str:
    """The names of all bandwidths, along the highest of them, above which there are no points."""
    ordered = sorted(memory, key=lambda roof: -roof.value)
    fastest = ordered[0].value
    first, last = max(x.low, 1e3 * y.low / fastest), min(1e3 * top / fastest, x.high)
    x1, y1 = x(first), y(first * fastest / 1e3)
    x2, y2 = x(last), y(last * fastest / 1e3)
    angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
    middle_x, middle_y = x1 + 0.45 * (x2 - x1), y1 + 0.45 * (y2 - y1) - 8
    return svg.element(
        "text",
        escape(", ".join(roof.label for roof in ordered)),
        class_="tick strong",
        text_anchor="middle",
        transform=f"translate({middle_x:.1f} {middle_y:.1f}) rotate({angle:.1f})",
    )


def _placed(compute: Sequence[Roof], y: svg.Scale) -> list[tuple[Roof, float]]:
    """Every ceiling with the baseline of its label: at its line, or below the previous label."""
    found: list[tuple[Roof, float]] = []
    for roof in sorted(compute, key=lambda roof: -roof.value):
        lowest = found[-1][1] + LABEL_HEIGHT if found else 0.0
        found.append((roof, max(y(roof.value) + 4, lowest)))
    return found


def _flat(
    roof: Roof, x: svg.Scale, y: svg.Scale, memory: Sequence[Roof], baseline: float
) -> list[str]:
    fastest = max((m.value for m in _of_same_origin(roof, memory)), default=None)
    ridge = x.low if fastest is None else max(x.low, 1e3 * roof.value / fastest)
    height = y(roof.value)
    return [
        svg.line(x(ridge), height, x.stop, height, _style(roof)),
        svg.text(roof.label, x.stop + 6, baseline, "tick strong"),
    ]


def _style(roof: Roof) -> str:
    origin = "roof" if roof.measured else "roof datasheet"
    return f"{origin} {roof.class_}".rstrip()


def _dot(point: Point, x: svg.Scale, y: svg.Scale, size: float) -> str:
    class_ = f"{point.class_} {'hollow' if point.hollow else 'dot'}"
    return svg.element(
        "circle",
        svg.tip(point.description),
        cx=x(point.flops_per_byte),
        cy=y(point.tflops),
        r=size * (3.5 if point.hollow else 4.5),
        class_=class_,
    )
