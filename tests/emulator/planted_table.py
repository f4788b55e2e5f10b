"""Recall and false alarms of the suite: `python -m tests.emulator.planted_table`.

Prints the table and writes it into docs/emulator.md, between the marks where it stands.
"""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from profiling.tables import MARKS
from tests.emulator.planted_suite import Planted, suite

DOCUMENT = Path(__file__).parents[2] / "docs" / "emulator.md"
TABLE = "planted"

SEEDS = 8
"""Orders of threads that clean twins and legal programs run in, every second one in the late mode;
broken twins that the default mode misses run with them too."""


@dataclass
class Row:
    """Numbers of one class. alarms: programs without a mistake that any run reports."""

    pairs: int = 0
    by_default: int = 0
    with_seeds: int = 0
    clean: int = 0
    alarms: int = 0

    def add(self, other: Row) -> None:
        """Sums, number by number."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def cells(self, name: str) -> list[str]:
        """The row of the table."""
        found = [f"{self.by_default}", f"{self.with_seeds}"] if self.pairs else ["", ""]
        return [name, str(self.pairs or ""), *found, str(self.clean), str(self.alarms)]


def reported(planted: Planted, **options: object) -> bool:
    """Whether the broken twin is, and for what it is."""
    text = planted.run(True, **options).error
    return text is not None and all(re.search(each, text) for each in planted.reports)


def judge(planted: Planted) -> Row:
    """Runs one file's twins in all orders."""
    row = Row(pairs=int(bool(planted.reports)), clean=1)
    if planted.reports:
        row.by_default = int(reported(planted))
        row.with_seeds = int(any(reported(planted, seed=seed) for seed in range(SEEDS)))
    orders = ({"seed": seed, "late": seed % 2 == 1} for seed in range(SEEDS))
    row.alarms = int(any(planted.run(False, **order).error is not None for order in orders))
    return row


def table(rows: dict[str, Row]) -> str:
    """The rows by class, and their sum, as Markdown."""
    total = Row()
    for row in rows.values():
        total.add(row)
    header = ["class", "pairs", "reported", "with other seeds too", "without a mistake", "reported"]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    lines += [row.cells(f"`{name}`") for name, row in sorted(rows.items())]
    lines += [total.cells("all")]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    """Runs the whole suite."""
    os.environ.setdefault("CUKIT_QUIET", "1")
    rows: defaultdict[str, Row] = defaultdict(Row)
    for planted in suite():
        rows[planted.kind].add(judge(planted))
    text = table(rows)
    print(text, end="")
    document = DOCUMENT.read_text()
    DOCUMENT.write_text(
        MARKS.sub(lambda m: m[1] + text + m[3] if m[2] == TABLE else m[0], document)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
