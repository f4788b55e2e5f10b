"""Reports of results: text for the terminal, an HTML page, JSON, or a trace.

from cukit.analyzer.report import generate_report
generate_report(["results.json", "runs/distill/report.json"], ["report.html"])
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cukit.analyzer.report import html
from cukit.analyzer.report.documents import SCHEMA, VERSION, Document, Source, read_documents
from cukit.analyzer.report.layout import Section
from cukit.analyzer.report.numbers import printable
from cukit.analyzer.report.terminal import as_text
from cukit.analyzer.report.trace import MAX_BYTES, spans_of, trace_json
from cukit.core.files import write_text
from cukit.errors import ConfigError, CukitError, DataError

__all__ = ["DEFAULT_TITLE", "Report", "Source", "generate_report"]

TRACE_SUFFIX = ".trace.json"

DEFAULT_TITLE = "cukit report"


@dataclass(frozen=True)
class Report:
    """Documents with a title, ready to be written in any format."""

    documents: tuple[Document, ...]
    title: str = DEFAULT_TITLE

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """One chapter per document, numbered if titles repeat.

        Raises DataError for a damaged document.
        """
        found = [document.section(number) for number, document in enumerate(self.documents, 1)]
        titles = [section.title for section in found]
        return tuple(
            replace(section, title=f"{section.title} {titles[: number + 1].count(section.title)}")
            if titles.count(section.title) > 1
            else section
            for number, section in enumerate(found)
        )

    def to_dict(self) -> dict[str, Any]:
        """The report's documents, unchanged and JSON-ready, for generating the report again."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "title": self.title,
            "documents": [
                {"kind": d.kind, "source": d.source, "content": dict(d.content)}
                for d in self.documents
            ],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def to_text(self) -> str:
        """Text and tables, as printed by `cukit report`."""
        return as_text(self.title, self.sections)

    def to_html(self) -> str:
        """One self-contained page. Needs the extra `report`."""
        sources = ", ".join(dict.fromkeys(document.source for document in self.documents))
        return html.render(self.title, f"Made from {sources}", self.sections)

    def to_trace(self, max_bytes: int = MAX_BYTES) -> str:
        """Trace events for Perfetto. Raises ConfigError if no document has times of single ops."""
        spans = spans_of(self.documents)
        if not spans:
            raise ConfigError(
                "trace: these results have no times of single ops or launches; use an analysis "
                "with traced launches or report.json of `cukit distill`"
            )
        return trace_json(spans, max_bytes)

    def write(self, path: Path) -> None:
        """Writes the report in the format of the suffix; see `content_for`."""
        _write(path, self.content_for(path))

    def content_for(self, path: Path) -> str:
        """The report in the suffix's format: .html, .txt, .json or .trace.json; or ConfigError."""
        check_suffix(path)
        if path.name.endswith(TRACE_SUFFIX):
            return self.to_trace()
        if path.suffix == ".json":
            return self.to_json()
        if path.suffix == ".txt":
            return self.to_text()
        return self.to_html()


def check_suffix(path: Path) -> None:
    """Raises ConfigError for a suffix without a format."""
    if path.suffix not in (".html", ".txt", ".json"):
        raise ConfigError(
            f"{path}: the suffix of a report must be .html, .txt, .json or {TRACE_SUFFIX}"
        )


def generate_report(
    results: Sequence[Source], outputs: Sequence[Path | str] = (), *, title: str = DEFAULT_TITLE
) -> Report:
    """Reads results of any kind and writes a report of all of them.

    results: files, their contents, or AnalysisReports; see cukit/analyzer/report/documents.py.
    outputs: files to write, each in the format of its suffix.
    Raises DataError for unknown or damaged results, ConfigError for an unknown suffix,
    MissingDependencyError for HTML without Jinja2.
    """
    read = [Path(source) for source in results if isinstance(source, (Path, str))]
    for output in map(Path, outputs):
        check_suffix(output)
        if any(_same_file(output, source) for source in read):
            raise ConfigError(f"{output}: is one of the results that the report is made from")
    report = Report(read_documents(results), printable(title))
    # All formats are generated before the first is written: if one fails, nothing is written.
    try:
        contents = [(Path(output), report.content_for(Path(output))) for output in outputs]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        if isinstance(error, CukitError):
            raise
        sources = ", ".join(dict.fromkeys(document.source for document in report.documents))
        raise DataError(f"damaged numbers in {sources}: {error!r}") from error
    for output, content in contents:
        _write(output, content)
    return report


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, content)


def _same_file(a: Path, b: Path) -> bool:
    return a.exists() and b.exists() and a.samefile(b)
