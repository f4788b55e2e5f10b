"""`cukit compare`: compares two results files, case by case."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from cukit.analyzer.comparison import CaseComparison, Comparison, compare_results, read_cases
from cukit.analyzer.json_file import read_json
from cukit.analyzer.results import OURS
from cukit.analyzer.statistics import TOLERANCE, Verdict
from cukit.commands._console import print_json, stdout, table
from cukit.errors import ConfigError, DataError

COLOURS = {
    Verdict.SAME: "dim",
    Verdict.FASTER: "green",
    Verdict.SLOWER: "bold red",
    Verdict.UNCERTAIN: "yellow",
}


def compare(
    base: Annotated[Path, typer.Argument(help="Earlier results.")],
    new: Annotated[Path, typer.Argument(help="Results to compare with them.")],
    tolerance: Annotated[
        float,
        typer.Option(
            min=0.0, help="Smaller relative differences are ignored; at least 0.1 for host times."
        ),
    ] = TOLERANCE,
    impl: Annotated[str, typer.Option(help="The implementation to compare.")] = OURS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare two results files of `cukit bench` or `cukit analyze`, case by case.

    A case is SLOWER or FASTER if the whole range of the ratio of times (new/base) is beyond the
    tolerance, UNCERTAIN if more samples are needed to decide. Exit code 1 if any case is slower, or
    is wrong and was right before; else 0.
    """
    if not math.isfinite(tolerance):
        raise ConfigError(f"--tolerance: expected a finite number, got {tolerance}")
    found = compare_results(_read(base), _read(new), tolerance=tolerance, impl=impl)
    if as_json:
        print_json(_facts(found))
    else:
        _show(found)
    raise typer.Exit(1 if found.regressed else 0)


def _read(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("environment"), dict):
        raise DataError(f"{path}: neither results of `cukit bench` nor an analysis")
    try:
        read_cases(content)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    return content


def _verdict(case: CaseComparison) -> str:
    if case.base.correct and not case.new.correct:
        return "WRONG"
    return case.difference.verdict.value


def _facts(found: Comparison) -> dict[str, Any]:
    cases = [
        {
            "case": case.name,
            "verdict": _verdict(case),
            "base_us": case.base.estimate.median_us,
            "new_us": case.new.estimate.median_us,
            "ratio": case.difference.ratio,
            "ratio_range": [case.difference.low, case.difference.high],
        }
        for case in found.cases
    ]
    return {
        "regressed": found.regressed,
        "cases": cases,
        "only_in_base": list(found.only_in_base),
        "only_in_new": list(found.only_in_new),
        "notes": list(found.notes),
    }


def _show(found: Comparison) -> None:
    console = stdout()
    numbers = ("base us", "new us", "new/base", "range")
    result = table("case", *numbers, "", right=numbers)
    for case in found.cases:
        difference, verdict = case.difference, _verdict(case)
        colour = COLOURS[Verdict.SLOWER if verdict == "WRONG" else difference.verdict]
        result.add_row(
            escape(case.name),
            f"{case.base.estimate.median_us:.2f}",
            f"{case.new.estimate.median_us:.2f}",
            f"{difference.ratio:.3f}",
            f"{difference.low:.3f} to {difference.high:.3f}",
            f"[{colour}]{verdict}[/]",
        )
    console.print(result)
    for name in found.only_in_base:
        console.print(f"only in base: {name}", markup=False)
    for name in found.only_in_new:
        console.print(f"only in new: {name}", markup=False)
    for note in found.notes:
        console.print(note, markup=False)
    verdicts = [_verdict(case) for case in found.cases]
    counted = (f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
    console.print(", ".join(counted))
