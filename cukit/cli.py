"""The `cukit` command: doctor, list, compile, bench, analyze, compare, report, replay, distill,
generate.

Bad input ends with one clear line on stderr and exit code 2; a traceback means a defect of ours.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import cukit
from cukit.analyzer.report.numbers import printable
from cukit.commands.analyze import analyze
from cukit.commands.bench import bench
from cukit.commands.compare import compare
from cukit.commands.compile import compile_kernels
from cukit.commands.distill import distill, generate
from cukit.commands.doctor import doctor
from cukit.commands.list_ops import list_ops
from cukit.commands.replay import replay
from cukit.commands.report import report
from cukit.errors import CukitError

BAD_INPUT = 2
INTERRUPTED = 130

app = typer.Typer(
    name="cukit",
    help="CuPy raw kernels for transformers, with or without a GPU.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("doctor")(doctor)
app.command("list")(list_ops)
app.command("compile")(compile_kernels)
app.command("bench")(bench)
app.command("analyze")(analyze)
app.command("compare")(compare)
app.command("report")(report)
app.command("replay")(replay)
app.command("distill")(distill)
app.command("generate")(generate)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(cukit.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """CuPy raw kernels for transformers, with or without a GPU."""


def run(arguments: Sequence[str]) -> int:
    """Runs one command line; returns its exit code."""
    try:
        code = app(args=list(arguments) or ["--help"], standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", INTERRUPTED)
    except (CukitError, OSError) as error:
        return _complain(str(error), BAD_INPUT)
    except Exception as error:
        # Which exceptions the command line's own errors derive from differs between releases of
        # typer; that they format themselves does not.
        if hasattr(error, "format_message"):
            return _complain(error.format_message(), BAD_INPUT)
        raise
    return code if isinstance(code, int) else 0


def _complain(message: str, code: int) -> int:
    print(f"cukit: {printable(message)}", file=sys.stderr)
    return code


def main() -> None:
    """Entry point of the `cukit` script."""
    sys.exit(run(sys.argv[1:]))
