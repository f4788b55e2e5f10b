"""Bar charts: groups of horizontal bars on a common scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from cukit.analyzer.report import numbers, svg

BAR, BAR_GAP, GROUP_GAP = 13.0, 3.0, 15.0
NOTE_SIZE, LABEL_SIZE = 11.0, 12.5
AXIS = 30.0
PADDING = 4.0
NARROW_BELOW = 600.0
HEAVY = 1.12
"""Bold letters are wider by this factor."""


@dataclass(frozen=True)
class Bar:
    """One bar: its series' number, its length, and the text at its end."""

    series: int
    value: float
    note: str
    description: str
    """The full description, shown on hovering."""


@dataclass(frozen=True)
class Group:
    """Bars that belong together, under a label."""

    label: str
    detail: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Mark:
    """A value to compare every bar with."""

    value: float
    label: str


def bar_chart(
    groups: Sequence[Group], *, title: str, unit: str, width: float, mark: Mark | None = None
) -> str:
    """Bars from zero, with labels to their left, or above them if the figure is narrow."""
    narrow = width < NARROW_BELOW
    left = PADDING if narrow else PADDING + _label_width(groups)
    notes = [bar.note for group in groups for bar in group.bars]
    widest = max((svg.text_width(note, NOTE_SIZE) for note in notes), default=0)
    right = width - PADDING - HEAVY * widest - 6
    largest = max(
        [bar.value for group in groups for bar in group.bars] + ([mark.value] if mark else [])
    )
    scale = svg.Scale(0.0, largest or 1.0, left, right)
    top = AXIS if mark else PADDING + 4
    y = top
    bodies: list[str] = []
    for group in groups:
        body, y = _group(group, scale, y, narrow=narrow)
        bodies.append(body)
        y += GROUP_GAP
    bottom = y - GROUP_GAP + 8
    frame = [
        svg.line(scale(value), top - 4, scale(value), bottom, "grid" if value else "axis")
        for value in scale.ticks(4 if narrow else 8)
    ]
    frame += [
        svg.tick(numbers.tick(value), scale(value), bottom + 15, svg.EDGE, width - svg.EDGE)
        for value in scale.ticks(4 if narrow else 8)
    ]
    end = max(right, svg.EDGE + svg.text_width(unit, svg.TICK_SIZE))
    frame.append(svg.text(unit, end, bottom + 31, "tick", "end"))
    if mark is not None:
        x = scale(mark.value)
        beyond_middle = x > (left + right) / 2
        frame.append(svg.line(x, top - 8, x, bottom, "mark"))
        bodies.append(
            svg.text(mark.label, x, top - 13, "tick strong", "end" if beyond_middle else None)
        )
    return svg.figure(width, bottom + 38, title, [*frame, *bodies])


def _group(group: Group, scale: svg.Scale, y: float, *, narrow: bool) -> tuple[str, float]:
    """The bars of a group, starting at `y`, and their lower end."""
    height = len(group.bars) * (BAR + BAR_GAP) - BAR_GAP
    parts = []
    if narrow:
        room = scale.stop - PADDING - 6 - svg.text_width(group.detail, NOTE_SIZE)
        fitting = replace(group, label=_cut(group.label, room))
        parts.append(_one_line(fitting, PADDING, y + 10))
        y += 17
    elif len(group.bars) == 1:
        parts.append(_one_line(group, scale.start - 10, y + height - 2.6, "end"))
    else:
        middle = y + height / 2
        parts.append(svg.text(group.label, scale.start - 10, middle - 2, "label", "end"))
        parts.append(svg.text(group.detail, scale.start - 10, middle + 12, "detail", "end"))
    for bar in group.bars:
        end = scale(bar.value)
        parts.append(
            svg.element(
                "g",
                svg.tip(bar.description),
                svg.element(
                    "rect",
                    x=scale.start,
                    y=y,
                    width=max(end - scale.start, 1.0),
                    height=BAR,
                    rx=2.0,
                    class_=svg.colour(bar.series),
                ),
                svg.text(
                    bar.note, end + 5, y + BAR - 2.6, "note strong" if not bar.series else "note"
                ),
            )
        )
        y += BAR + BAR_GAP
    return svg.element("g", *parts), y - BAR_GAP


def _one_line(group: Group, x: float, y: float, anchor: str | None = None) -> str:
    """Label and detail on one line."""
    label = svg.element("tspan", escape(group.label), class_="label")
    detail = svg.element("tspan", escape(group.detail), class_="detail", dx=6.0)
    parts = [label, detail] if group.detail else [label]
    return svg.element("text", *parts, x=x, y=y, text_anchor=anchor)


def _cut(label: str, room: float) -> str:
    """The label, shortened if it does not fit."""
    letters = int(room / (HEAVY * svg.text_width("m", LABEL_SIZE)))
    return label if len(label) <= letters else f"{label[: max(letters - 1, 1)]}…"


def _label_width(groups: Sequence[Group]) -> float:
    found = 0.0
    for group in groups:
        label = HEAVY * svg.text_width(group.label, LABEL_SIZE)
        detail = svg.text_width(group.detail, NOTE_SIZE)
        found = max(found, label + 6 + detail if len(group.bars) == 1 else max(label, detail))
    return found + 14
