"""`cukit report`: shows results of any kind as an HTML page, text, JSON or a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cukit.analyzer.report import DEFAULT_TITLE, Source, check_suffix, generate_report
from cukit.analyzer.report.terminal import print_report
from cukit.commands._console import stdout
from cukit.commands.compile import build, devices, facts, variants
from cukit.errors import ConfigError


def report(
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Files of `cukit bench`, `cukit distill` (report.json), `cukit compile --json`, "
            "analyses, snapshots of a memory pool, or earlier reports. Without any, every kernel "
            "is compiled and analysed."
        ),
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            help="A file to write: .html, .txt, .json or .trace.json (for ui.perfetto.dev). "
            "May be repeated.",
        ),
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the report.")] = DEFAULT_TITLE,
    arch: Annotated[
        str | None, typer.Option(help="Without results: architectures, as for `cukit compile`.")
    ] = None,
    op: Annotated[
        list[str] | None, typer.Option(help="Without results: only this op; may be repeated.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only the names of written files.")
    ] = False,
) -> None:
    """Make a report of measured results or, without any, of the compiled kernels.

    Needs no GPU. The HTML page is one self-contained file; its tables can be sorted and searched.
    With --output the terminal shows only the key figures, otherwise the tables, too.
    """
    if results and (arch or op):
        raise ConfigError(
            "--arch and --op choose kernels to compile; with results they have no effect"
        )
    for path in output or ():
        check_suffix(path)  # fail before minutes of compiling
    sources: list[Source] = list(results or [])
    if not sources:
        sources.append(facts(*build(variants(devices(arch), op), quiet=quiet)))
    made = generate_report(sources, output or (), title=title)
    console = stdout()
    if not quiet:
        print_report(console, made.title, made.sections, tables=not output)
        console.print()
    for path in output or ():
        console.print(f"wrote {path}", markup=False, highlight=False)
