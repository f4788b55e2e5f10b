"""`cukit replay`: replays an allocation log on several memory pools."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cukit.analyzer.report import numbers
from cukit.analyzer.results import write
from cukit.commands._console import print_json, stdout, table
from cukit.errors import ConfigError
from cukit.memory.log import write_log
from cukit.memory.replay.mixes import make_log
from cukit.memory.replay.pools import POOLS
from cukit.memory.replay.processes import PoolMissing, Request, replay_apart
from cukit.memory.replay.replay import ReplayResult, Script

TIGHT = "tight"
_MAX_BYTES = 2**63
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])i?)?B?", re.IGNORECASE)


def replay(
    log: Annotated[
        str,
        typer.Argument(
            help="A log with RMM's columns (.csv, .csv.gz), or a synthetic mix: random-N-M (N "
            "allocations of at most M MiB), serving, streams or torture."
        ),
    ],
    pools: Annotated[
        str, typer.Option(help="Pools to run, in order, separated by commas.")
    ] = ",".join(POOLS),
    limit: Annotated[
        str | None,
        typer.Option(
            help="Memory limit of a pool: bytes, a size such as 12GiB, or tight (1.05 times the "
            "log's peak of live bytes, plus one page per stream)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of a synthetic mix.")] = 0,
    write_to: Annotated[
        Path | None, typer.Option("--write", help="Write the mix as a log to this file.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option("--export", help="Write the results as JSON to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Replay an allocation log on memory pools, and compare their memory use and times.

    Each pool runs in its own process. Without a GPU only cukit's pool runs, on simulated pages.
    Exit code 1 if cukit's pool does not complete the log.
    """
    names = [name.strip() for name in pools.split(",") if name.strip()]
    if unknown := [name for name in names if name not in POOLS]:
        raise ConfigError(f"no pool is called {unknown[0]!r}: expected {', '.join(POOLS)}")
    if not names:
        raise ConfigError(f"--pools is empty: expected some of {', '.join(POOLS)}")
    request = Request(log, limit_of(limit), seed)
    script = request.script()
    if write_to is not None:
        write_log(write_to, make_log(log, seed))
    results: list[ReplayResult] = []
    missing: dict[str, str] = {}
    for name in names:
        try:
            results += replay_apart(name, [request])
        except PoolMissing as reason:
            missing[name] = str(reason)
    facts = _facts(log, script, results, missing)
    if export is not None:
        write(export, facts)
    if as_json:
        print_json(facts)
    else:
        _show(log, script, results, missing)
    ours = [result for result in results if result.pool == "cukit"]
    raise typer.Exit(1 if ours and not ours[0].completed else 0)


def limit_of(text: str | None) -> int | str | None:
    """The bytes of a size such as `"12GiB"`; "tight" and None are returned unchanged."""
    if text is None or text == TIGHT:
        return text
    found = _SIZE.fullmatch(text.strip())
    size = 0.0
    if found is not None:
        power = " KMGT".index(found[2].upper()) if found[2] else 0
        size = min(float(found[1]) * 1024**power, _MAX_BYTES)
    if not 1 <= size < _MAX_BYTES:
        raise ConfigError(
            f"--limit: expected bytes, a size such as 12GiB, or tight; got {text[:40]!r}"
        )
    return int(size)


def _facts(
    log: str, script: Script, results: list[ReplayResult], missing: dict[str, str]
) -> dict[str, Any]:
    return {
        "log": log,
        "num_steps": len(script.steps),
        "num_blocks": script.num_blocks,
        "num_streams": script.num_streams,
        "peak_live_bytes": script.peak_live_bytes,
        "tight_limit_bytes": script.tight_limit,
        "results": [asdict(result) for result in results],
        "missing": missing,
    }


def _show(log: str, script: Script, results: list[ReplayResult], missing: dict[str, str]) -> None:
    console = stdout()
    console.print(
        f"{log}: {script.num_blocks:,} allocations on {script.num_streams} stream(s), at most "
        f"{numbers.num_bytes(script.peak_live_bytes)} live at once",
        markup=False,
        highlight=False,
    )
    if results:
        right = (
            "peak held", "x peak live", "fragmentation", "alloc mean us", "p99 us", "free mean us"
        )  # fmt: skip
        rows = table("pool", "completed", *right, right=right)
        for result in results:
            rows.add_row(
                result.pool,
                "[green]yes[/]" if result.completed else "[bold red]no[/]",
                numbers.num_bytes(result.peak_reserved_bytes),
                f"{result.overhead:.3f}",
                numbers.percent(result.fragmentation),
                f"{result.allocate.mean_us:.2f}",
                f"{result.allocate.p99_us:.2f}",
                f"{result.free.mean_us:.2f}",
            )
        console.print(rows)
    for result in results:
        if result.failure:
            console.print(f"{result.pool}: {result.failure}", markup=False, highlight=False)
    for name, reason in missing.items():
        console.print(f"{name}: not available, {reason}", markup=False, highlight=False)
