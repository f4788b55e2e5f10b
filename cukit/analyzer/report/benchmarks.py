"""Benchmark results in the form that reports use: cases, implementations, speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from cukit.analyzer import peaks
from cukit.analyzer.report import numbers
from cukit.analyzer.results import OURS, Record

TITLES = {"torch-eager": "torch", "torch-compile": "torch.compile", "liger": "Liger"}

MEMORY_POOLS = "memory_pool"
"""The family of memory-pool records, which compare memory held and are not cases."""

EQUAL = 0.03
"""Relative differences below this count as equal in summaries."""


def impl_title(impl: str) -> str:
    """The displayed name of an implementation."""
    return TITLES.get(impl, impl)


def is_ours(impl: str) -> bool:
    """Whether it is cukit or a variant of it, such as a deterministic one."""
    return impl.startswith(OURS)


@dataclass(frozen=True)
class Case:
    """One benchmark case with a record for each implementation."""

    records: tuple[Record, ...]
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return str(self.records[0]["family"])

    @property
    def op(self) -> str:
        return str(self.records[0]["op"])

    @property
    def name(self) -> str:
        return str(self.records[0]["case"])

    @property
    def dtype(self) -> str:
        return str(self.records[0]["dtype"])

    @cached_property
    def floor_us(self) -> float | None:
        """The lower bound on the time: the larger of bytes and FLOPs over the machine's ceilings.

        Computed from the declared work for FP8 and int8, since older files use the BF16 peak for
        every precision; else taken from the file.
        """
        first = self.records[0]
        written = float(first["floor_us"]) if first.get("floor_us") else None
        precision = peaks.precision_of(self.dtype, self.name)
        if not first.get("tflops") or precision not in ("fp8", "int8"):
            return written
        median = first["median_us"]
        return peaks.floor_us(
            self.environment,
            precision,
            flops=1e6 * first["tflops"] * median,
            bytes_moved=1e3 * (first.get("gbps") or 0.0) * median,
        )

    @property
    def ours(self) -> Record | None:
        """cukit's record, or None if there is none or its result was wrong."""
        return next((r for r in self.records if r["impl"] == OURS and r["correct"]), None)

    @property
    def fastest_peer(self) -> Record | None:
        """The fastest correct implementation other than cukit."""
        peers = [r for r in self.records if not is_ours(r["impl"]) and r["correct"]]
        return min(peers, key=lambda record: float(record["median_us"]), default=None)

    @property
    def speed(self) -> float | None:
        """cukit's speed over that of the fastest peer: above 1, cukit is faster."""
        ours, peer = self.ours, self.fastest_peer
        return peer["median_us"] / ours["median_us"] if ours and peer else None

    def share_of_floor(self, record: Record) -> float | None:
        """The floor divided by the time of a record: 1 is the highest possible speed."""
        return self.floor_us / record["median_us"] if self.floor_us else None


@dataclass(frozen=True)
class BenchmarkResults:
    """The content of one results file: `{"environment": {...}, "records": [...]}`."""

    environment: dict[str, Any]
    records: tuple[Record, ...]
    source: str = ""

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """All cases, in the order of the file."""
        groups: dict[tuple[str, ...], list[Record]] = {}
        for record in self.records:
            if record["family"] == MEMORY_POOLS:
                continue
            key = tuple(str(record[name]) for name in ("family", "op", "case", "dtype"))
            groups.setdefault(key, []).append(record)
        return tuple(Case(tuple(group), self.environment) for group in groups.values())

    @property
    def memory_pools(self) -> tuple[Record, ...]:
        """The records of memory pools."""
        return tuple(r for r in self.records if r["family"] == MEMORY_POOLS)

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(case.family for case in self.cases))

    def impls_of(self, family: str) -> tuple[str, ...]:
        """Every implementation in a family: cukit first, then its variants."""
        found = dict.fromkeys(r["impl"] for case in self.of_family(family) for r in case.records)
        return tuple(sorted(found, key=lambda impl: (impl != OURS, not is_ours(impl))))

    def of_family(self, family: str) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if case.family == family)

    def ceiling(self, name: str) -> float | None:
        """A measured ceiling of the machine: "copy_gbps" or "bf16_gemm_tflops"."""
        value = self.environment.get("ceilings", {}).get(name)
        return float(value) if value else None

    @property
    def machine(self) -> str:
        """GPU, driver, CUDA, clocks, software, date: what readers need to assess the figures."""
        found = self.environment
        parts = [str(found.get("gpu") or "unknown device")]
        parts += [f"driver {found['driver']}"] if found.get("driver") else []
        parts += [f"CUDA {found['cuda']}"] if found.get("cuda") else []
        parts += [f"{name} {version}" for name, version in found.get("versions", {}).items()]
        clocks = found.get("clocks", {})
        if clocks.get("sm_under_load_mhz") and clocks.get("sm_max_mhz"):
            held, limit = clocks["sm_under_load_mhz"], clocks["sm_max_mhz"]
            parts.append(f"SM clock under load {held:.0f} of {limit:.0f} MHz")
        if copy := self.ceiling("copy_gbps"):
            parts.append(f"measured copy {numbers.gbps(copy)}")
        if gemm := self.ceiling("bf16_gemm_tflops"):
            parts.append(f"measured bf16 matrix product {gemm:.0f} TFLOP/s")
        parts += [f"commit {found['commit']}"] if found.get("commit") else []
        parts += [str(found["date"])] if found.get("date") else []
        return " · ".join(parts)

    @property
    def verdict(self) -> str:
        """In how many cases cukit is faster than, equal to and slower than the fastest peer."""
        speeds = [case.speed for case in self.cases if case.speed is not None]
        if not speeds:
            return f"{len(self.cases)} cases, none with both cukit and a peer."
        faster = sum(speed > 1 + EQUAL for speed in speeds)
        slower = sum(speed < 1 - EQUAL for speed in speeds)
        return (
            f"Compared with the fastest peer in {len(speeds)} cases, cukit is faster in {faster}, "
            f"within {EQUAL:.0%} in {len(speeds) - faster - slower} and slower in {slower}."
        )


def largest_cases(cases: Sequence[Case]) -> list[Case]:
    """One case per op: the one with the most work, among cases with a floor and a cukit record.

    Cases with a peer take precedence.
    """

    def rank(case: Case) -> tuple[bool, float]:
        # Floors follow from rounded rates: equal work may differ in the last digits.
        return case.fastest_peer is not None, float(f"{case.floor_us or 0.0:.3g}")

    largest: dict[tuple[str, str], Case] = {}
    for case in cases:
        if case.ours is None or case.floor_us is None:
            continue
        best = largest.get((case.family, case.op))
        if best is None or rank(case) > rank(best):
            largest[case.family, case.op] = case
    return list(largest.values())
