"""The `cukit` command: doctor, list, compile, bench, check, analyze, compare, report, replay,
distill, generate.

Bad input ends with one clear line on stderr and exit code 2; a traceback means a bug in cukit or in
a script that `cukit analyze` runs.
"""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

import cukit
from cukit.analyzer.report.numbers import printable
from cukit.commands.analyze import analyze
from cukit.commands.bench import bench
from cukit.commands.check import check
from cukit.commands.compare import compare
from cukit.commands.compile import compile_kernels
from cukit.commands.distill import distill, generate
from cukit.commands.doctor import doctor
from cukit.commands.list_ops import list_ops
from cukit.commands.replay import replay
from cukit.commands.report import report
from cukit.core.interrupts import INTERRUPTED, interruptible
from cukit.errors import ConfigError, CukitError

BAD_INPUT = 2
_LONG_WORD = re.compile(r"\S{400,}")
BROKEN_PIPE = 141
"""The exit code that shells report for a program ended by SIGPIPE."""

app = typer.Typer(
    name="cukit",
    help="CuPy raw kernels for transformers, with or without a GPU.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _help(command: Callable[..., Any]) -> str:
    """The command's docstring with one line per paragraph, which is wrapped to the terminal."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


COMMANDS: dict[str, Callable[..., Any]] = {
    "doctor": doctor,
    "list": list_ops,
    "compile": compile_kernels,
    "bench": bench,
    "check": check,
    "analyze": analyze,
    "compare": compare,
    "report": report,
    "replay": replay,
    "distill": distill,
    "generate": generate,
}
for _name, _command in COMMANDS.items():
    app.command(_name, help=_help(_command))(_command)


def _print_version(requested: bool) -> None:
    if requested:
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
    code = 0
    try:
        _check_values(arguments)
        # Not `app()`, which has its own exit codes for interrupts and broken pipes.
        command = typer.main.get_command(app)
        try:
            with command.make_context("cukit", list(arguments) or ["--help"]) as context:
                command.invoke(context)
        except typer.Exit as end:
            code = end.exit_code
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # `cukit list | head -1`
        return BROKEN_PIPE
    except (CukitError, OSError) as error:
        return _complain(str(error), BAD_INPUT)
    except MemoryError as error:
        return _complain(f"not enough memory: {error or 'allocation failed'}", BAD_INPUT)
    except Exception as error:
        # The base class of the command line's own errors differs between releases of typer;
        # all of them have format_message.
        if hasattr(error, "format_message"):
            return _complain(error.format_message(), BAD_INPUT)
        raise
    return code


def _check_values(arguments: Sequence[str]) -> None:
    """Raises ConfigError for an empty argument, such as an unset shell variable."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name, is_assignment, value = argument.partition("=")
        if not argument or (name.startswith("--") and is_assignment and not value):
            raise ConfigError(f"{name or before or 'an argument'}: expected a value, got ''")


def _complain(message: str, code: int) -> int:
    shown = _LONG_WORD.sub(lambda word: f"{word[0][:100]}...{word[0][-60:]}", printable(message))
    print(f"cukit: {shown}", file=sys.stderr)
    return code


def main() -> None:
    """Entry point of the `cukit` script."""
    # A stream that the shell closed (`>&-`) is None: discard its output.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # terminals without UTF-8
    with interruptible():
        code = run(sys.argv[1:])
        try:
            sys.stdout.flush()
        except OSError:  # already reported; a normal exit would report it twice
            os._exit(code)
        if code == INTERRUPTED:
            os._exit(code)  # do not wait for running threads
    sys.exit(code)
