"""Output of the commands: tables and JSON on stdout, progress on stderr.

Printed text may come from untrusted files, so control characters never reach the terminal.
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
"""Seconds until the first progress line and between later ones, if stderr is not a terminal."""


class PrintableConsole(Console):
    """A console that replaces control characters in the text it prints."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def stdout() -> Console:
    """A console for stdout; WIDE columns wide, so that few rows wrap, if it is a file or a pipe."""
    return PrintableConsole(width=None if sys.stdout.isatty() else WIDE, soft_wrap=False)


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2))


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table; columns named in `right` are right-aligned."""
    result = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        result.add_column(name, justify="right" if name in right else "left")
    return result


def tracked(
    results: Iterable[T], total: int, doing: str, *, quiet: bool = False
) -> Generator[T, None, None]:
    """Yields `results` as they come, with progress and the estimated time left on stderr.

    A bar on a terminal, occasional lines otherwise. The estimate assumes that the remaining items
    take as long as the finished ones.
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
        # The estimate uses all finished items, since their costs vary.
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
