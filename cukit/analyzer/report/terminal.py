"""A report on a terminal: its text and tables, without figures."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from cukit.analyzer.report.layout import (
    Block,
    Cell,
    Code,
    Collapsible,
    Index,
    Paragraph,
    Section,
    Table,
    Tiles,
)

TONES = {"good": "green", "bad": "red", "quiet": "dim"}

TEXT_WIDTH = 160

FEW_ROWS = 40
"""Longer tables are printed as one line per group if they have an index, and omitted in folds."""


def as_text(title: str, sections: Iterable[Section]) -> str:
    """The output of :func:`print_report`, without colours."""
    console = Console(file=io.StringIO(), width=TEXT_WIDTH, no_color=True, force_terminal=False)
    with console.capture() as captured:
        print_report(console, title, sections)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def print_report(
    console: Console, title: str, sections: Iterable[Section], *, tables: bool = True
) -> None:
    """Prints every section; without `tables`, only paragraphs and tiles."""
    console.print(f"[bold]{escape(title)}[/]")
    for section in sections:
        console.print()
        console.rule(f"[bold]{escape(section.title)}[/]", align="left")
        console.print(Text(section.subtitle, style="dim"))
        for block in section.blocks:
            if tables or isinstance(block, Paragraph | Tiles):
                _print(console, block)


def _print(console: Console, block: Block, *, folded: bool = False) -> None:
    if isinstance(block, Paragraph):
        console.print(
            Padding(
                Text(block.text, style="bold" if block.lead else ""), (1, 0, 0, 0), expand=False
            )
        )
    elif isinstance(block, Tiles):
        console.print()
        for tile in block.tiles:
            console.print(
                Text.assemble((f"{tile.value:>12}  ", TONES.get(tile.tone, "bold")), tile.label)
            )
    elif isinstance(block, Table) and block.index is not None and len(block.rows) > FEW_ROWS:
        console.print(Padding(_groups(block, block.index), (1, 0, 0, 0), expand=False))
    elif isinstance(block, Table):
        if folded and len(block.rows) > FEW_ROWS:
            console.print(Text(f"  {len(block.rows)} rows: see the page", style="dim"))
        else:
            console.print(Padding(_table(block), (1, 0, 0, 0), expand=False))
    elif isinstance(block, Code):
        console.print(Padding(Text(block.title, style="bold"), (1, 0, 0, 0), expand=False))
        console.print(Padding(Text(block.text), (0, 0, 0, 2), expand=False))
    elif isinstance(block, Collapsible) and any(
        isinstance(part, Table | Code) for part in block.blocks
    ):
        console.print(Padding(Text(block.summary, style="bold"), (1, 0, 0, 0), expand=False))
        for part in block.blocks:
            _print(console, part, folded=True)


def _groups(table: Table, index: Index) -> RichTable:
    """A line for each group of rows: its number of rows, and the range of each numeric column."""
    found = _empty(table.title)
    found.add_column(index.facets[0])
    found.add_column(index.noun, justify="right")
    numeric = [number for number, column in enumerate(table.columns) if column.numeric]
    for number in numeric:
        found.add_column(Text(table.columns[number].title), justify="right")
    for name, rows in index.groups().items():
        ranges = [_range([table.rows[row][number] for row in rows]) for number in numeric]
        found.add_row(Text(name), str(len(rows)), *ranges)
    return found


def _range(cells: Sequence[Cell]) -> Text:
    known = [(cell.value, cell.text) for cell in cells if cell.value is not None]
    if not known:
        return Text("")
    low, high = min(known), max(known)
    return Text(low[1] if low == high else f"{low[1]} - {high[1]}")


def _empty(title: str) -> RichTable:
    # Titles are Text objects: rich would interpret brackets in a string as markup.
    return RichTable(
        box=None,
        header_style="bold",
        pad_edge=False,
        title=Text(title) if title else None,
        title_justify="left",
    )


def _table(table: Table) -> RichTable:
    found = _empty(table.title)
    for column in table.columns:
        found.add_column(Text(column.title), justify="right" if column.numeric else "left")
    for number, row in enumerate(table.rows):
        cells = [Text(_words(cell), style=TONES.get(cell.tone, "")) for cell in row]
        found.add_row(*cells, style="bold" if number in table.emphasis else "")
    return found


def _words(cell: Cell) -> str:
    return f"{cell.text} {cell.note}".rstrip()
