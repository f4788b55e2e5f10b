"""Where commands print: tables to stdout, progress to stderr, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

WIDE = 200


def stdout() -> Console:
    """A console that does not break table rows when its output goes to a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else WIDE, soft_wrap=False)


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2))


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table in the house style; columns named in `right` are aligned to the right."""
    result = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        result.add_column(name, justify="right" if name in right else "left")
    return result


def mebibytes(num_bytes: int) -> str:
    """`"12.3 MiB"`."""
    return f"{num_bytes / 2**20:.1f} MiB"
