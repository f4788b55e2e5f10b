"""Stacked bar charts: bars of equal length, divided into parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cukit.analyzer.report import numbers, svg
from cukit.analyzer.report.layout import Figure

BAR, GAP, LABEL_HEIGHT = 17.0, 9.0, 16.0
AXIS = 22.0
LABEL_SIZE, DETAIL_SIZE, NOTE_SIZE = 12.5, 11.0, 11.0
NARROW_BELOW = 500.0


@dataclass(frozen=True)
class Part:
    """A part of a whole: its class (`svg.colour`, `svg.shade`), name and size."""

    class_: str
    name: str
    value: float


@dataclass(frozen=True)
class Stack:
    """One bar. Parts of size zero are left out."""

    label: str
    detail: str
    parts: tuple[Part, ...]


def stacked_figure(title: str, caption: str, stacks: Sequence[Stack]) -> Figure:
    """The chart with a legend of the parts that occur, in order."""
    names = {part.class_: part.name for stack in stacks for part in stack.parts if part.value > 0}
    order = dict.fromkeys(part.class_ for stack in stacks for part in stack.parts)
    return Figure(
        title,
        lambda width: stacked_chart(stacks, title=title, width=width),
        caption,
        tuple((class_, names[class_]) for class_ in order if class_ in names),
    )


def stacked_chart(stacks: Sequence[Stack], *, title: str, width: float) -> str:
    """Bars from 0 to 100%, with labels to their left, or above them if the figure is narrow."""
    narrow = width < NARROW_BELOW
    labels = max((svg.text_width(stack.label, LABEL_SIZE) for stack in stacks), default=0.0)
    details = max((svg.text_width(stack.detail, DETAIL_SIZE) for stack in stacks), default=0.0)
    left = svg.EDGE if narrow else labels * 1.1 + details + 22
    scale = svg.Scale(0.0, 1.0, left, width - svg.EDGE - (0 if narrow else 6))
    y = svg.EDGE
    drawn: list[str] = []
    for stack in stacks:
        if narrow:
            drawn.append(svg.text(stack.label, left, y + 11, "label"))
            drawn.append(svg.text(stack.detail, scale.stop, y + 11, "detail", "end"))
            y += LABEL_HEIGHT
        else:
            drawn.append(svg.text(stack.label, svg.EDGE, y + BAR - 4.5, "label"))
            drawn.append(svg.text(stack.detail, left - 9, y + BAR - 4.5, "detail", "end"))
        drawn += _parts(stack, scale, y)
        y += BAR + GAP
    bottom = y - GAP + 4
    ticks = [
        svg.tick(numbers.percent(share), scale(share), bottom + 14, svg.EDGE, width - svg.EDGE)
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    return svg.figure(width, bottom + AXIS, title, [*ticks, *drawn])


def _parts(stack: Stack, scale: svg.Scale, y: float) -> list[str]:
    whole = sum(part.value for part in stack.parts) or 1.0
    drawn, start = [], 0.0
    for part in stack.parts:
        if part.value <= 0:
            continue
        share = part.value / whole
        x, length = scale(start), scale(start + share) - scale(start)
        start += share
        note = numbers.percent(share)
        about = svg.tip(f"{stack.label}: {part.name} {share:.1%}")
        # A gap separates neighbouring parts, so that readers need not distinguish the colours.
        size = {"width": max(length - 1.0, 0.5), "height": BAR}
        pieces = [about, svg.element("rect", x=x, y=y, class_=part.class_, **size)]
        if length > svg.text_width(note, NOTE_SIZE) + 10:
            pieces.append(svg.text(note, x + length / 2, y + BAR - 5, "inside", "middle"))
        drawn.append(svg.element("g", *pieces))
    return drawn
