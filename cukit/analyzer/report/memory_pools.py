"""Comparison of memory pools: the records of profiling/memory_pool.py as table and bars."""

from __future__ import annotations

from collections.abc import Sequence

from cukit.analyzer.report import numbers, svg
from cukit.analyzer.report.bars import Bar, Group, Mark, bar_chart
from cukit.analyzer.report.layout import Block, Cell, Column, Figure, Paragraph, Table, cell
from cukit.analyzer.results import OURS, Record

TITLES = {
    "cupy": "CuPy",
    "cupy-async": "CuPy async",
    "rmm": "RMM",
    "torch": "PyTorch",
    "torch-expandable": "PyTorch, expandable",
}

TIGHT_PERCENT = 5.0
"""A tight limit is the log's peak of live bytes plus this."""

HELD = "Memory held beyond what is live"


def pools_in(records: Sequence[Record]) -> list[str]:
    """All pools, cukit's first."""
    found = dict.fromkeys(record["impl"] for record in records)
    return sorted(found, key=lambda pool: pool != OURS)


def pool_title(pool: str) -> str:
    """The displayed name of a pool."""
    return TITLES.get(pool, pool)


def by_case(records: Sequence[Record], op: str) -> dict[str, dict[str, Record]]:
    """Case -> pool -> record."""
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        if record["op"] == op:
            found.setdefault(record["case"], {})[record["impl"]] = record
    return found


def overhead(record: Record) -> float:
    """Peak of bytes held over peak of bytes live."""
    return float(record["peak_reserved_bytes"] / record["peak_live_bytes"])


def replayed_on(records: Sequence[Record]) -> list[str]:
    """The pools on which logs were replayed."""
    return pools_in([record for record in records if record["op"] == "replay"])


def pool_blocks(records: Sequence[Record]) -> list[Block]:
    """Verdict, bars and table of the memory each pool held for each log; empty without replays."""
    free, tight = by_case(records, "replay"), by_case(records, "replay_tight")
    if not free:
        return []
    pools = replayed_on(records)
    done = {
        pool: sum(found[pool]["completed"] for found in tight.values() if pool in found)
        for pool in pools
    }
    verdict = ", ".join(f"{pool_title(pool)} {done[pool]}" for pool in pools)
    rows = []
    for case, found in free.items():
        live = next(iter(found.values()))["peak_live_bytes"]
        cells = [
            cell(overhead(found[pool]) if pool in found else None, lambda value: f"{value:.3f}")
            for pool in pools
        ]
        rows.append((Cell(case), cell(live, numbers.num_bytes), *cells))
    names = [Column(pool_title(pool), numeric=True) for pool in pools]
    columns = (Column("log"), Column("peak live", numeric=True), *names)
    return [
        Paragraph(
            f"Of {len(tight)} allocation logs, replayed with {TIGHT_PERCENT:.0f}% more memory than "
            f"the log needs, these complete: {verdict}."
        ),
        Figure(
            HELD,
            lambda width: draw_held(records, width),
            "Without a limit; the notes name pools that fail with one. Shorter is better.",
            tuple((svg.colour(number), pool_title(pool)) for number, pool in enumerate(pools)),
        ),
        Table(columns, tuple(rows), "Peak of bytes held over peak of bytes live"),
    ]


def draw_held(records: Sequence[Record], width: float) -> str:
    """One group of bars per log, one bar per pool: percent more than the live bytes."""
    tight = by_case(records, "replay_tight")
    pools = replayed_on(records)
    groups = []
    for case, found in by_case(records, "replay").items():
        bars = []
        for number, pool in enumerate(pools):
            if (record := found.get(pool)) is None:
                continue
            more = 100 * (overhead(record) - 1)
            limited = tight.get(case, {}).get(pool)
            failed = limited is not None and not limited["completed"]
            note = f"+{more:.0f}%" + (f", fails within {TIGHT_PERCENT:.0f}%" if failed else "")
            bars.append(Bar(number, more, note, f"{pool_title(pool)} on {case}: {note}"))
        live = next(iter(found.values()))["peak_live_bytes"]
        groups.append(Group(case, f"{numbers.num_bytes(live)} live", tuple(bars)))
    return bar_chart(
        groups,
        title=f"{HELD}, by pool and log",
        unit="% more than the peak of live bytes",
        width=width,
        mark=Mark(TIGHT_PERCENT, "tight limit"),
    )
