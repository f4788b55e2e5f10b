"""The inputs of a report: results files, recognised by their content.

benchmarks     {"environment", "records"}                 `cukit bench`, `python -m profiling.run`
kernels        {"kernels", "errors"}                      `cukit compile --json`
analysis       {"schema_version", "environment", "analyses"}     `cukit analyze`, KernelAnalyzer
distillation   {"models", "milliseconds_per_step_by_op", ...}    report.json of `cukit distill`
memory         {"segments", "device_traces"}              `cukit.memory.snapshot`, as JSON
report         {"schema": "cukit report", "version", "documents"}    an earlier report's JSON
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cukit.analyzer.json_file import read_json
from cukit.analyzer.report.benchmarks import BenchmarkResults
from cukit.analyzer.report.layout import Section
from cukit.analyzer.report.numbers import all_printable, printable
from cukit.analyzer.report.section_analysis import analysis_section
from cukit.analyzer.report.section_benchmarks import benchmark_section
from cukit.analyzer.report.section_distillation import distillation_section
from cukit.analyzer.report.section_kernels import kernel_section
from cukit.analyzer.schema import AnalysisReport
from cukit.analyzer.schema_json import from_json
from cukit.errors import DataError

SCHEMA = "cukit report"
VERSION = 1
"""Increased when a reader of the previous version would misread the file."""

KEYS = {
    "benchmarks": ("environment", "records"),
    "analysis": ("schema_version", "environment", "analyses"),
    "distillation": ("models", "milliseconds_per_step_by_op", "verdict", "settings", "corpus"),
    "kernels": ("kernels", "errors"),
    "memory": ("segments", "device_traces"),
}
"""The keys that identify each kind of document."""


@dataclass(frozen=True)
class Document:
    """One set of results as JSON, and its source.

    The content is kept unchanged; chapters are made from its printable text.
    """

    kind: str
    source: str
    content: Mapping[str, Any]

    def section(self, number: int = 1) -> Section:
        """The document's chapter, the `number`-th of its report.

        Raises DataError if something is missing or malformed.
        """
        content = all_printable(self.content)
        try:
            if self.kind == "benchmarks":
                records = tuple(content["records"])
                found = BenchmarkResults(content["environment"], records)
                return benchmark_section(found, f"cases-{number}")
            if self.kind == "analysis":
                return analysis_section(self.analysis())
            if self.kind == "distillation":
                return distillation_section(content)
            if self.kind == "memory":
                # Imported on first use: the pool is a large package, and few reports need it.
                from cukit.analyzer.report.section_memory import memory_section

                return memory_section(content)
            return kernel_section(content, f"variants-{number}")
        except DataError as error:
            raise DataError(f"{self.source}: {error}") from None
        except (
            KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError
        ) as error:  # fmt: skip
            raise DataError(f"{self.source}: damaged {self.kind}: {error!r}") from error

    def analysis(self) -> AnalysisReport:
        """The content of an analysis, typed."""
        return from_json(json.dumps(all_printable(self.content)))


Source = Path | str | Mapping[str, Any] | AnalysisReport
"""A file, its content, or an AnalysisReport."""


def read_documents(sources: Sequence[Source]) -> tuple[Document, ...]:
    """The documents of all `sources`, in order. Raises DataError, which names the source."""
    return tuple(document for source in sources for document in _read(source))


def _read(source: Source) -> list[Document]:
    if isinstance(source, AnalysisReport):
        return _recognise(json.loads(json.dumps(dataclasses.asdict(source))), "analysis")
    if isinstance(source, Mapping):
        return _recognise(source, "results")
    path = Path(source)
    return _recognise(read_json(path), str(path))


def _recognise(content: Any, source: str) -> list[Document]:
    if isinstance(content, Mapping):
        if content.get("schema") == SCHEMA:
            return _reopen(content, source)
        for kind, keys in KEYS.items():
            if all(key in content for key in keys):
                return [Document(kind, printable(source), content)]
    raise DataError(
        f"{source}: not a kind of results that a report can show: benchmark results, "
        "`cukit compile --json`, an analysis, report.json of `cukit distill`, or a snapshot of a "
        "memory pool"
    )


def _reopen(content: Mapping[str, Any], source: str) -> list[Document]:
    if content.get("version") != VERSION:
        raise DataError(
            f"{source}: report version {content.get('version')}; this cukit reads {VERSION}"
        )
    try:
        return [
            Document(d["kind"], printable(d["source"]), d["content"]) for d in content["documents"]
        ]
    except (KeyError, TypeError) as error:
        raise DataError(f"{source}: damaged report: {error!r}") from None
