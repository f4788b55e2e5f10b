"""`cukit bench`: runs the repository's benchmark cases on this machine's GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cukit.errors import ConfigError, MissingDependencyError


def bench(
    target: Annotated[
        str | None, typer.Argument(help="Only this family, or only this op.", show_default=False)
    ] = None,
    family: Annotated[str | None, typer.Option(help="Only this family's cases.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this op; may be repeated.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "--export", help="Results file to merge into.")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="Tiny sizes; needs no GPU.")] = False,
    peers: Annotated[
        str | None, typer.Option(help="Peers to time, separated by commas: torch,liger.")
    ] = None,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Time cukit alone.")] = False,
    list_cases: Annotated[bool, typer.Option("--list", help="Print the cases and exit.")] = False,
) -> None:
    """Time kernels and their peers: cold L2, median times, every result checked."""
    try:
        from profiling import run
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"the benchmark cases are in cukit's repository, not in the package ({error}); "
            "run this from a clone"
        ) from None
    families = run.families()
    if family is not None and family not in families:
        raise ConfigError(f"no family {family[:60]!r}; expected one of {', '.join(families)}")
    chosen = list(only or ())
    if target in families:
        if family not in (None, target):
            raise ConfigError(f"two families, {target} and --family {family}: give one")
        family = target
    elif target is not None:
        chosen.append(target)
    arguments = [f"--family={family}"] if family else []
    arguments += [f"--only={op}" for op in chosen]
    arguments += [f"--out={out}"] if out else []
    arguments += ["--small"] if small else []
    arguments += [f"--peers={peers}"] if peers else []
    arguments += ["--no-peers"] if no_peers else []
    arguments += ["--list"] if list_cases else []
    raise typer.Exit(run.bench(arguments))
