"""SVG building blocks: elements, scales and ticks, the root of a figure.

Figures contain no colours: their parts have classes, and the page (or the style sheet of a
standalone figure) defines how these look in light and in dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from importlib.resources import files

NUM_COLOURS = 8
"""Classes `colour-0` to `colour-7`; 0 is cukit."""

WIDE, HALF, NARROW = 960.0, 640.0, 360.0
"""Widths in pixels of a figure: the full page, one of two columns, and a phone."""

NUM_SHADES = 5
"""Classes `shade-0` (faint) to `shade-4`, for values that have an order."""

EDGE = 2.0
"""Margin at the edge of a figure that stays free of text."""

TICK_SIZE = 11.0
"""Font size of tick labels; must match figure.css."""

Draw = Callable[[float], str]
"""Draws a figure for a width."""


def element(name: str, *children: str, **attributes: str | float | None) -> str:
    """One element. Attribute names lose a trailing underscore and turn others into hyphens."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(children)}</{name}>" if children else f"<{name}{written}/>"


def text(content: str, x: float, y: float, class_: str, anchor: str | None = None) -> str:
    """A line of text with its baseline at `y`; `anchor` is middle or end."""
    return element("text", escape(content), x=x, y=y, class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def tick(content: str, x: float, y: float, low: float, high: float) -> str:
    """The label of a tick, centred at `x` but kept between `low` and `high`."""
    half = text_width(content, TICK_SIZE) / 2
    if x + half > high:
        return text(content, high, y, "tick", "end")
    if x - half < low:
        return text(content, low, y, "tick")
    return text(content, x, y, "tick", "middle")


def tip(content: str) -> str:
    """The tooltip of the enclosing element."""
    return element("title", escape(content))


def colour(index: int) -> str:
    """The class of a series; further series share the last colour."""
    return f"colour-{min(index, NUM_COLOURS - 1)}"


def figure(width: float, height: float, label: str, parts: Iterable[str]) -> str:
    """The root of a figure that scales with the page, with a label for screen readers."""
    return element(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_attribute(width)} {_attribute(height)}",
        width=width,
        height=height,
        role="img",
        aria_label=label,
        class_="figure",
    )


def shade(index: int) -> str:
    """The class of a value that is the `index`-th of `NUM_SHADES` in order."""
    return f"shade-{min(index, NUM_SHADES - 1)}"


def responsive(draw: Draw, wide: float = WIDE) -> str:
    """A figure drawn twice, for wide and narrow screens; the page's style shows one of them."""
    return element("div", draw(wide), class_="wide") + element("div", draw(NARROW), class_="narrow")


def text_width(content: str, size: float = 12.0) -> float:
    """The approximate width of a line of text, since no font metrics are available."""
    return 0.56 * size * len(content)


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` onto pixels from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = math.log(value), math.log(low), math.log(high)
        share = (value - low) / (high - low) if high > low else 0.0
        return self.start + share * (self.stop - self.start)

    def ticks(self, at_most: int) -> list[float]:
        """Round values within the scale."""
        return self._decades(at_most) if self.logarithmic else self._steps(at_most)

    def _steps(self, at_most: int) -> list[float]:
        step = nice_step((self.high - self.low) / max(at_most, 1))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(index * step, 12) for index in range(first, last + 1)]

    def _decades(self, at_most: int) -> list[float]:
        """1, 2, 5, 10, 20, ... if at most `at_most` of these fit, else every n-th power of ten."""
        slack = (self.high / self.low) ** 0.001  # a thousandth of the axis
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for leading, every in (((1, 2, 5), 1), *(((1,), every) for every in range(1, 100))):
            found = [m * 10.0**e for e in range(first, last + 1, every) for m in leading]
            found = [value for value in found if self.low / slack <= value <= self.high * slack]
            if len(found) <= at_most:
                break
        return found


def nice_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5, 5, 10 times a power of ten that is not below `rough`."""
    if rough <= 0:
        return 1.0
    magnitude = 10.0 ** math.floor(math.log10(rough))
    return next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * (1 - 1e-9))


def style() -> str:
    """The style sheet for the classes of figures, for light and dark mode."""
    return (files(__package__) / "templates" / "figure.css").read_text(encoding="utf-8")


def _attribute(value: str | float) -> str:
    if isinstance(value, str):
        return escape(value, quote=True)
    return f"{value:.2f}".rstrip("0").rstrip(".")
