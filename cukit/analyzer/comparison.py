"""Compares two results files, case by case: SAME, FASTER, SLOWER or UNCERTAIN. Pure functions.

Either file was written by `cukit bench --out`, or is an analysis. The rule is
:func:`cukit.analyzer.statistics.compare`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cukit.analyzer.results import OURS
from cukit.analyzer.statistics import (
    TOLERANCE,
    Difference,
    Estimate,
    Verdict,
    compare,
    estimate,
    split,
)
from cukit.analyzer.timing import EnqueueTimer, GpuTimer, HostTimer
from cukit.errors import DataError

HOST_TIMERS = (EnqueueTimer.name, HostTimer.name)
HOST_TOLERANCE = 0.1
"""Host times of the same code in two processes differ by up to this fraction, because memory layout
and CPU core are the same for all samples of a process."""

Cases = dict[str, "Case"]


@dataclass(frozen=True)
class Case:
    """The time of one case in a file."""

    estimate: Estimate
    correct: bool
    timer: str = GpuTimer.name


@dataclass(frozen=True)
class CaseComparison:
    """One case in both files."""

    name: str
    base: Case
    new: Case
    difference: Difference

    @property
    def regressed(self) -> bool:
        """Whether the case is slower, or wrong where it was correct."""
        return self.difference.verdict is Verdict.SLOWER or (
            self.base.correct and not self.new.correct
        )


@dataclass(frozen=True)
class Comparison:
    """The comparison of two files."""

    cases: tuple[CaseComparison, ...]
    only_in_base: tuple[str, ...]
    only_in_new: tuple[str, ...]
    notes: tuple[str, ...]
    """Skipped records, and differences between drivers, versions and clocks of the two runs."""

    @property
    def regressed(self) -> bool:
        """Whether any case regressed."""
        return any(case.regressed for case in self.cases)


def compare_results(
    base: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    tolerance: float = TOLERANCE,
    impl: str = OURS,
) -> Comparison:
    """Every case in both files, in the order of `new`.

    impl: the implementation to compare, if a file has several for a case.
    Raises DataError for other content, for different GPUs, or if no case is in both.
    """
    machines = [_gpu(content) for content in (base, new)]
    if machines[0] != machines[1]:
        raise DataError(f"measured on different machines: {machines[0]} and {machines[1]}")
    before, after = read_cases(base, impl), read_cases(new, impl)
    common = [name for name in after if name in before]
    if not common:
        raise DataError(f"the files have no case of {impl!r} in common")
    return Comparison(
        cases=tuple(
            CaseComparison(
                name,
                before[name],
                after[name],
                compare(
                    before[name].estimate,
                    after[name].estimate,
                    max(tolerance, HOST_TOLERANCE)
                    if after[name].timer in HOST_TIMERS
                    else tolerance,
                ),
            )
            for name in common
        ),
        only_in_base=tuple(name for name in before if name not in after),
        only_in_new=tuple(name for name in after if name not in before),
        notes=_notes(base, new),
    )


def read_cases(content: Mapping[str, Any], impl: str = OURS) -> Cases:
    """The times in a results file or an analysis, by name. Raises DataError for anything else.

    Records without `range_us` (from older versions, or replays of memory pools) are skipped.
    """
    try:
        if "records" in content:
            records = (record for record in content["records"] if record["impl"] == impl)
            return {
                _record_name(record): _record_case(record)
                for record in records
                if "range_us" in record
            }
        if "analyses" in content:
            return {
                analysis["name"]: Case(_cold(analysis["cold"]), correct=True)
                for analysis in content["analyses"]
                if analysis["cold"] is not None
            }
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"damaged results: {error!r}") from None
    raise DataError("neither results of `cukit bench` nor an analysis")


def _record_name(record: Mapping[str, Any]) -> str:
    return f"{record['family']}/{record['op']} {record['case']} {record['dtype']}"


def _record_case(record: Mapping[str, Any]) -> Case:
    median = float(record["median_us"])
    low, high = (float(value) for value in record["range_us"])
    if not (0 < low <= high and median > 0):
        raise ValueError(f"{_record_name(record)} took {median} us, {low} to {high}")
    timer = str(record.get("timer", GpuTimer.name))
    return Case(Estimate(median, low, high), bool(record["correct"]), timer)


def _cold(times: Mapping[str, Any]) -> Estimate:
    if times.get("samples_us"):
        found = estimate(split(times["samples_us"], times.get("round_sizes", ())))
    else:
        found = Estimate(times["median_us"], times["ci_low_us"], times["ci_high_us"])
    # The timer's overhead was measured in each run, and shifts all samples of a run.
    shift = times.get("overhead_uncertainty_us", 0.0)
    low = max(found.low_us - shift, 0.5 * found.low_us)  # keeps the time positive
    return Estimate(found.median_us, low, found.high_us + shift)


def _gpu(content: Mapping[str, Any]) -> str:
    environment = content.get("environment")
    if not isinstance(environment, Mapping):
        raise DataError("neither results of `cukit bench` nor an analysis")
    return str(environment.get("gpu"))


def _notes(base: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """Notes on records that cannot be compared, and on differing drivers, versions and clocks."""
    notes = []
    for name, content in (("base", base), ("new", new)):
        unranged = [r for r in content.get("records", ()) if "range_us" not in r]
        if unranged:
            notes.append(
                f"{len(unranged)} records of {name} have no range_us and are skipped, the first: "
                f"{_record_name(unranged[0])}"
            )
    before, after = base["environment"], new["environment"]
    for key in ("driver", "cuda"):
        if before.get(key) != after.get(key):
            notes.append(f"{key}: {before.get(key)} -> {after.get(key)}")
    versions = before.get("versions", {}), after.get("versions", {})
    for name in sorted({*versions[0], *versions[1]}):
        if versions[0].get(name) != versions[1].get(name):
            notes.append(f"{name}: {versions[0].get(name)} -> {versions[1].get(name)}")
    clocks = [e.get("clocks", {}).get("sm_under_load_mhz") for e in (before, after)]
    if all(clocks) and abs(clocks[1] / clocks[0] - 1) > TOLERANCE:
        notes.append(f"SM clock under load: {clocks[0]:.0f} -> {clocks[1]:.0f} MHz")
    return tuple(notes)
