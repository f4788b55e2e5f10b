"""What a report is made of, before it becomes HTML or lines on a terminal.

A section is a list of blocks. Tables keep the number behind every cell, so that pages sort by it
and tests compare it with the data; the terminal leaves figures out.
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
    """A table's cell: what is read, and the number behind it."""

    text: str
    value: Number = None
    tone: str = ""
    """"good", "bad", "quiet", "code", "prose" (may break into lines) or nothing."""


def cell(value: T | None, write: Callable[[T], str], tone: str = "") -> Cell:
    """The cell of a number, which stays empty where nothing was measured."""
    return Cell("") if value is None else Cell(write(value), value, tone)


@dataclass(frozen=True)
class Column:
    """A table's column; `numeric` ones are aligned to the right."""

    title: str
    numeric: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under columns. `emphasis` are the numbers of rows in bold."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    emphasis: tuple[int, ...] = ()

    def without_empty_columns(self) -> Table:
        """The same table, where columns that say nothing in any row are gone."""
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
    """One figure that matters, large."""

    value: str
    label: str
    tone: str = ""


@dataclass(frozen=True)
class Tiles:
    """A row of tiles."""

    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Paragraph:
    """Prose. `lead` for the sentence that carries the section."""

    text: str
    lead: bool = False


@dataclass(frozen=True)
class Code:
    """Text as it is, in a monospaced font."""

    text: str
    title: str = ""


@dataclass(frozen=True)
class Figure:
    """A drawing with a caption below and the names of its series above."""

    title: str
    draw: Draw
    caption: str = ""
    legend: tuple[tuple[int, str], ...] = ()
    """(number of the series, its name)."""


@dataclass(frozen=True)
class Picture:
    """A drawing of one width, with its own title and colours; narrow screens scroll it."""

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
class Fold:
    """Blocks behind a line that opens them."""

    summary: str
    blocks: tuple[Block, ...]
    open: bool = False


Block: TypeAlias = Table | Tiles | Paragraph | Code | Figure | Picture | Gallery | Fold


@dataclass(frozen=True)
class Section:
    """A chapter of the report."""

    title: str
    subtitle: str
    blocks: tuple[Block, ...]
