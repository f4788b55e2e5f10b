"""Line charts: curves over steps, and occupancy over block size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cukit.analyzer.report import numbers, svg

LEFT, RIGHT, TOP, BOTTOM = 46.0, 14.0, 14.0, 42.0
MAX_MARKED = 12
"""Curves with at most this many points mark each of them."""


@dataclass(frozen=True)
class Curve:
    """A named series of (x, y)."""

    name: str
    series: int
    points: tuple[tuple[float, float], ...]


def line_chart(
    curves: Sequence[Curve], *, title: str, x_label: str, y_label: str, width: float
) -> str:
    """Curves over a common x axis that starts at 0; the y axis covers the range of the values."""
    height = 330.0 if width >= 600 else 260.0
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    step = svg.nice_step((max(ys) - min(ys)) / 4 or abs(max(ys)) or 1.0)
    low = step * (min(ys) // step)
    high = step * -(-max(ys) // step)
    x = svg.Scale(0.0, max(xs) or 1.0, LEFT, width - RIGHT)
    y = svg.Scale(low, high if high > low else low + step, height - BOTTOM, TOP + 12)
    parts = []
    for value in y.ticks(6):
        parts.append(svg.line(x.start, y(value), x.stop, y(value), "grid"))
        parts.append(svg.text(numbers.tick(value), x.start - 7, y(value) + 4, "tick", "end"))
    for value in x.ticks(4 if width < 600 else 8):
        label = numbers.tick(value)
        parts.append(svg.tick(label, x(value), y.start + 17, svg.EDGE, width - svg.EDGE))
    parts.append(svg.line(x.start, y.start, x.stop, y.start, "axis"))
    parts.append(svg.text(x_label, x.stop, y.start + 34, "tick", "end"))
    parts.append(svg.text(y_label, 2.0, TOP, "tick"))
    parts += [_curve(curve, x, y) for curve in curves]
    return svg.figure(width, height, title, parts)


def _curve(curve: Curve, x: svg.Scale, y: svg.Scale) -> str:
    places = [(x(step), y(value)) for step, value in curve.points]
    path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
    parts = [
        svg.tip(curve.name),
        svg.element("path", d=path, class_=f"curve {svg.colour(curve.series)}"),
    ]
    if len(places) <= MAX_MARKED:
        for (px, py), (step, value) in zip(places, curve.points, strict=True):
            tip = svg.tip(f"{curve.name}, {numbers.tick(step)}: {numbers.digits(value, 4)}")
            class_ = f"dot {svg.colour(curve.series)}"
            parts.append(svg.element("circle", tip, cx=px, cy=py, r=4.0, class_=class_))
    return svg.element("g", *parts)


def occupancy_curve(
    values: Sequence[tuple[int, float]], current: int, *, title: str, width: float = 220.0
) -> str:
    """Share of resident warps over threads per block, with the current block size marked."""
    height = 104.0
    x = svg.Scale(0.0, float(values[-1][0]), 36.0, width - 16)
    y = svg.Scale(0.0, 1.0, height - 22, 10.0)
    parts = []
    for share in (0.0, 0.5, 1.0):
        parts.append(svg.line(x.start, y(share), x.stop, y(share), "grid" if share else "axis"))
        parts.append(svg.text(numbers.percent(share), x.start - 5, y(share) + 3.5, "small", "end"))
    for threads in (256, 512, 768, 1024):
        if threads <= values[-1][0]:
            parts.append(svg.text(str(threads), x(threads), height - 7, "small", "middle"))
    path = "M" + "L".join(f"{x(threads):.1f} {y(share):.1f}" for threads, share in values)
    parts.append(svg.element("path", d=path, class_="curve colour-0"))
    here = dict(values).get(current)
    if here is not None:
        parts.append(svg.line(x(current), y.start, x(current), y.stop, "mark"))
        tip = svg.tip(f"{current} threads: {numbers.percent(here)}")
        parts.append(
            svg.element("circle", tip, cx=x(current), cy=y(here), r=4.0, class_="dot colour-0")
        )
    return svg.figure(width, height, title, parts)
