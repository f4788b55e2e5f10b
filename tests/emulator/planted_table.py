"""The emulator's recall and false alarms on the suite: `python -m tests.emulator.planted_table`.

Prints this table and one for compute-sanitizer, and writes both into docs/emulator.md, between
their markers.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from profiling.tables import MARKS
from tests.emulator.planted_sanitizer import RESULTS, TOOLS
from tests.emulator.planted_suite import Planted, suite

DOCUMENT = Path(__file__).parents[2] / "docs" / "emulator.md"
TABLE, SANITIZER_TABLE = "planted", "planted_sanitizer"

SEEDS = 8
"""Number of thread orders in which clean twins and legal programs run, every second one in late
mode. Broken twins run in the default order, and with these seeds, without late mode, until one run
reports the bug."""


@dataclass
class Row:
    """Numbers of programs of one class.

    pairs: with a bug. by_default, with_seeds: of these, reported by the default run, or with any
    seed. clean: without a bug. alarms: of these, reported by any run.
    """

    pairs: int = 0
    by_default: int = 0
    with_seeds: int = 0
    clean: int = 0
    alarms: int = 0

    def add(self, other: Row) -> None:
        """Adds the numbers of another row."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def cells(self, name: str) -> list[str]:
        """The cells of the table's row."""
        found = [f"{self.by_default}", f"{self.with_seeds}"] if self.pairs else ["", ""]
        return [name, str(self.pairs or ""), *found, str(self.clean), str(self.alarms)]


def reported(planted: Planted, **options: object) -> bool:
    """True if the report on the broken twin matches all expressions of the file."""
    text = planted.run(True, **options).error
    return text is not None and all(re.search(each, text) for each in planted.reports)


def judge(planted: Planted) -> Row:
    """Runs the twins of one file; see SEEDS."""
    row = Row(pairs=int(bool(planted.reports)), clean=1)
    if planted.reports:
        row.by_default = int(reported(planted))
        row.with_seeds = int(any(reported(planted, seed=seed) for seed in range(SEEDS)))
    orders = ({"seed": seed, "late": seed % 2 == 1} for seed in range(SEEDS))
    row.alarms = int(any(planted.run(False, **order).error is not None for order in orders))
    return row


def markdown(header: list[str], lines: list[list[str]]) -> str:
    """A table whose first column is text."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table(rows: dict[str, Row]) -> str:
    """The rows by class, and their sum, as Markdown."""
    total = Row()
    for row in rows.values():
        total.add(row)
    header = ["class", "pairs", "reported", "with other seeds too", "without a bug", "reported"]
    lines = [row.cells(f"`{name}`") for name, row in sorted(rows.items())]
    return markdown(header, [*lines, total.cells("all")])


def sanitizer_table() -> str:
    """The findings of compute-sanitizer for the same programs on the GPU, as Markdown.

    Columns: the broken twins that each tool reported; those that any tool reported or that ended
    with a driver error; programs without a bug that any tool reported, or that failed or hung.
    """
    record = json.loads(RESULTS.read_text())
    outcomes: dict[str, dict[str, str]] = record["outcomes"]
    names = sorted(set().union(*outcomes.values()))
    kinds = sorted({name.split("-")[0] for name in names})

    def cells(title: str, chosen: list[str]) -> list[str]:
        broken = [name for name in chosen if name.endswith("-1")]
        clean = [name for name in chosen if name.endswith("-0")]

        def count(some: list[str], tools: Iterable[str], *what: str) -> str:
            return str(sum(any(outcomes[t].get(name) in what for t in tools) for name in some))

        return [
            title,
            str(len(broken) or ""),
            *(count(broken, [tool], "reported") if broken else "" for tool in TOOLS),
            count(broken, TOOLS, "reported", "failed") if broken else "",
            str(len(clean)),
            count(clean, TOOLS, "reported", "failed", "hangs"),
        ]

    header = ["class", "pairs", *TOOLS, "any, or it failed", "without a bug", "reported, hangs"]
    lines = [
        cells(f"`{kind}`", [name for name in names if name.startswith(f"{kind}-")])
        for kind in kinds
    ]
    return markdown(header, [*lines, cells("all", names)])


def main() -> int:
    """Runs the suite, prints the tables and writes them into the document."""
    os.environ.setdefault("CUKIT_QUIET", "1")
    rows: defaultdict[str, Row] = defaultdict(Row)
    for planted in suite():
        rows[planted.kind].add(judge(planted))
    tables = {TABLE: table(rows)}
    if RESULTS.exists():
        tables[SANITIZER_TABLE] = sanitizer_table()
    print(*tables.values(), sep="\n", end="")
    document = DOCUMENT.read_text()
    DOCUMENT.write_text(
        MARKS.sub(lambda m: m[1] + tables[m[2]] + m[3] if m[2] in tables else m[0], document)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
