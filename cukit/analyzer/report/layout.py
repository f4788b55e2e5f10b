"""The blocks of a report, before they become HTML or text on a terminal.

A section is a list of blocks. Tables keep the number behind every cell, so that pages sort by it
and tests compare it with the data; the terminal leaves figures out.

A long table may have an `Index`: facets to select and group by, flags to filter by, and details
that a page shows when a row is opened. The terminal then prints one line per group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from cukit.analyzer.report.svg import Draw

T = TypeVar("T", int, float)

Number: TypeAlias = "float | int | None"


@dataclass(frozen=True)
class Cell:
    """A table's cell: its text and its numeric value."""

    text: str
    value: Number = None
    tone: str = ""
    """"good", "bad", "quiet", "code", "prose" (may break into lines) or nothing."""
    note: str = ""
    """A second, smaller line."""
    shares: tuple[tuple[str, float], ...] = ()
    """A stacked bar of (CSS class, share of the whole), shown on pages only."""


def cell(value: T | None, write: Callable[[T], str], tone: str = "") -> Cell:
    """The cell of a number, empty if there is none."""
    return Cell("") if value is None else Cell(write(value), value, tone)


@dataclass(frozen=True)
class Column:
    """A table's column; `numeric` ones are right-aligned."""

    title: str
    numeric: bool = False
    minor: bool = False
    """Hidden on a phone."""


@dataclass(frozen=True)
class Facts:
    """Detail of a row: a small table of text."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    header: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shares:
    """Detail of a row: parts of a whole, as a bar and as numbers."""

    title: str
    parts: tuple[tuple[str, str, int], ...]
    """(CSS class, name, count)."""


@dataclass(frozen=True)
class SampledCurve:
    """Detail of a row: a curve over evenly spaced x, with one point marked."""

    title: str
    first: int
    step: int
    percents: tuple[int, ...]
    marked: int
    note: str = ""


Detail: TypeAlias = Facts | Shares | SampledCurve


@dataclass(frozen=True)
class Entry:
    """The index of one row."""

    facets: tuple[str, ...]
    """The row's value for each facet of the index."""
    flags: tuple[str, ...] = ()
    details: tuple[Detail, ...] = ()


@dataclass(frozen=True)
class Index:
    """How to find rows of a long table; one entry per row."""

    anchor: str
    """The target of links, unique in a report."""
    noun: str
    """The plural noun for the rows, e.g. "variants"."""
    facets: tuple[str, ...]
    """Names to select and to group by; rows are grouped by the first one."""
    flags: tuple[tuple[str, str], ...]
    """(flag, its label)."""
    entries: tuple[Entry, ...]

    def groups(self) -> dict[str, list[int]]:
        """Row numbers by value of the first facet."""
        found: dict[str, list[int]] = {}
        for number, entry in enumerate(self.entries):
            found.setdefault(entry.facets[0], []).append(number)
        return found


@dataclass(frozen=True)
class Table:
    """Rows under columns. `emphasis`: numbers of the rows in bold."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    emphasis: tuple[int, ...] = ()
    index: Index | None = None

    def without_empty_columns(self) -> Table:
        """The same table without columns that are empty in every row."""
        kept = [
            number
            for number in range(len(self.columns))
            if any(row[number].text for row in self.rows)
        ]
        return replace(
            self,
            columns=tuple(self.columns[number] for number in kept),
            rows=tuple(tuple(row[number] for number in kept) for row in self.rows),
        )


@dataclass(frozen=True)
class Tile:
    """One important figure, in large type."""

    value: str
    label: str
    tone: str = ""
    leads_to: str = ""
    """An address within the page: `#anchor`, or `#anchor?flag=...` of an index."""


@dataclass(frozen=True)
class Tiles:
    """A row of tiles."""

    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Paragraph:
    """Prose. `lead`: the section's main sentence."""

    text: str
    lead: bool = False


@dataclass(frozen=True)
class Code:
    """Preformatted text."""

    text: str
    title: str = ""


@dataclass(frozen=True)
class Figure:
    """A plot with a caption below and a legend above."""

    title: str
    draw: Draw
    caption: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    """(CSS class of a series, its name)."""


@dataclass(frozen=True)
class FigureGrid:
    """Figures side by side; below one another on a phone."""

    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class FixedFigure:
    """A plot of fixed width with its own title and colours; narrow screens scroll it."""

    title: str
    markup: str


@dataclass(frozen=True)
class Thumbnail:
    """One of many small figures."""

    title: str
    detail: str
    markup: str


@dataclass(frozen=True)
class Gallery:
    """Small figures of one kind, side by side."""

    title: str
    caption: str
    thumbnails: tuple[Thumbnail, ...]


@dataclass(frozen=True)
class Collapsible:
    """Blocks that are hidden until the summary line is opened."""

    summary: str
    blocks: tuple[Block, ...]
    open: bool = False


Block: TypeAlias = (
    Table | Tiles | Paragraph | Code | Figure | FigureGrid | FixedFigure | Gallery | Collapsible
)


@dataclass(frozen=True)
class Section:
    """A chapter of the report."""

    title: str
    subtitle: str
    blocks: tuple[Block, ...]
