"""Where commands print: tables to stdout, progress to stderr, JSON for programs.

What is printed may come from files of others: control characters never reach the terminal.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Table

from cukit.analyzer.report.numbers import printable

T = TypeVar("T")

WIDE = 200

FIRST_LINE_SECONDS, NEXT_LINE_SECONDS = 3.0, 15.0
"""When progress is told of where every line stays: what takes less says nothing."""


class PrintableConsole(Console):
    """Writes no control characters but its own, whatever it is given."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def stdout() -> Console:
    """A console that does not break table rows when its output goes to a file or a pipe."""
    return PrintableConsole(width=None if sys.stdout.isatty() else WIDE, soft_wrap=False)


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2))


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table in the house style; columns named in `right` are aligned to the right."""
    result = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        result.add_column(name, justify="right" if name in right else "left")
    return result


def tracked(
    results: Iterable[T], total: int, doing: str, *, quiet: bool = False
) -> Generator[T, None, None]:
    """`results` as they come, with progress on stderr and the time that the rest will take.

    A bar on a terminal, a line now and then elsewhere. The estimate takes what is left to be like
    what is done.
    """
    console = PrintableConsole(stderr=True)
    if quiet:
        yield from results
    elif console.is_terminal:
        with _bar(console) as bar:
            yield from bar.track(results, total=total, description=doing)
    else:
        yield from _with_lines(results, total, doing)


def _bar(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        # One estimate from all that is done: work comes in no order.
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, speed_estimate_period=3600.0)


def _with_lines(results: Iterable[T], total: int, doing: str) -> Generator[T, None, None]:
    started = time.monotonic()
    due = started + FIRST_LINE_SECONDS
    for done, result in enumerate(results, start=1):
        now = time.monotonic()
        if now >= due and done < total:
            left = (now - started) / done * (total - done)
            print(f"{doing}: {done} of {total}, {_about(left)} left", file=sys.stderr, flush=True)
            due = now + NEXT_LINE_SECONDS
        yield result


def _about(seconds: float) -> str:
    """`"about 40 s"`, `"about 3 min"`."""
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"


def mebibytes(num_bytes: int) -> str:
    """`"12.3 MiB"`."""
    return f"{num_bytes / 2**20:.1f} MiB"
