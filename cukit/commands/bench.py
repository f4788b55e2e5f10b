"""`cukit bench`: the benchmark cases of the repository, on this machine's GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cukit.errors import MissingDependencyError


def bench(
    family: Annotated[str | None, typer.Option(help="Only this family's cases.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this op; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="Results file to merge into.")] = None,
    small: Annotated[bool, typer.Option(help="Tiny sizes; runs without a GPU.")] = False,
    peers: Annotated[bool, typer.Option(help="Time torch and the like beside ours.")] = True,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the cases and stop.")] = False,
) -> None:
    """Time kernels beside their peers: cold L2, medians, every result checked."""
    try:
        from profiling.run import main
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the benchmark cases live in cukit's repository, not in the package ({error}); "
            "run this from a clone"
        ) from None
    arguments = [f"--family={family}"] if family else []
    arguments += [f"--only={op}" for op in only or ()]
    arguments += [f"--out={out}"] if out else []
    arguments += ["--small"] if small else []
    arguments += [] if peers else ["--no-peers"]
    arguments += ["--list"] if list_cases else []
    raise typer.Exit(main(arguments))
