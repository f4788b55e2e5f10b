"""Runs the kernels of every family under compute-sanitizer, on small shapes.

    python -m tests.sanitize                                     # all groups, all tools
    python -m tests.sanitize --quick                             # a few groups of each family
    python -m tests.sanitize --tool racecheck --group "attention sm90"

Groups of kernels are defined in `tests/<family>/sanitize.py`. Every group first runs without a
tool, which fills the kernel cache; then each tool runs each group in a separate process. Arrays are
allocated individually by the driver, not by a pool, so that memcheck detects overruns.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

FAMILIES = (
    "layers", "distill", "gemm", "moe", "quantization", "memory", "analyzer",
    "attention", "sampling", "sequence", "graph_memory",
)  # fmt: skip
TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")
WARM_UP = "no tool"

# initcheck does not track memory written by cp.async.bulk, so kernels that read this memory and
# copies of it to the host are not checked. The guard of the test suite covers both: it fills memory
# with NaN.
BULK_READERS = ("flash_attention_backward_finish",)
OPTIONS = {
    "initcheck": (
        *("--check-api-memory-access", "no"),
        *("--kernel-name-exclude", ",".join(f"kns={name}" for name in BULK_READERS)),
    )
}

# One BLAS thread per process, because several processes share the cores.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUKIT_QUIET": "1"}


class Group(NamedTuple):
    """Calls of ops on the GPU, made in one process."""

    run: Callable[[], None]
    shares: bool = False
    """Also run racecheck, which is slow: for kernels whose threads communicate through shared
    memory."""
    quick: bool = False


class Finding(NamedTuple):
    """The result of a tool for a group."""

    tool: str
    group: str
    status: int
    errors: str
    """The result of `errors_of`; empty after a run without a tool that succeeded."""
    seconds: float


def groups(families: Sequence[str] = FAMILIES) -> dict[str, Group]:
    """Return the groups by name; names begin with the family."""
    return {
        f"{family} {name}": group
        for family in families
        for name, group in import_module(f"tests.{family}.sanitize").GROUPS.items()
    }


def run_group(group: Group) -> None:
    """Run a group in this process, without a pool."""
    import cupy

    from tests.attention import checks

    cupy.cuda.set_allocator(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "poison_pool", lambda _: None)  # no pool to fill
        group.run()
    cupy.cuda.Device().synchronize()


def find_sanitizer() -> str:
    """Return the path of compute-sanitizer, from PATH or the CUDA toolkit."""
    found = shutil.which("compute-sanitizer")
    if found:
        return found
    for folder in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        path = Path(folder or "/", "bin", "compute-sanitizer")
        if path.is_file():
            return str(path)
    sys.exit("compute-sanitizer was not found: put it on PATH or set CUDA_HOME")


def errors_of(text: str) -> str:
    """The number of findings: "0", "3", "2 (1 error, 1 warning)"; else the end of the output."""
    races = re.findall(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((.*?)\)", text)
    plain = re.findall(r"ERROR SUMMARY: (\d+) errors?", text)
    if races:
        return races[-1][0] if races[-1][0] == "0" else "{} ({})".format(*races[-1])
    return plain[0] if plain else " ".join(text.split())[-100:]


def sanitize(sanitizer: str, job: tuple[str, str], *, limit_s: float, logs: Path | None) -> Finding:
    """Run a group under a tool, in a separate process."""
    tool, group = job
    command = [sys.executable, "-m", "tests.sanitize", "--run", group]
    if tool != WARM_UP:
        options = ["--tool", tool, "--report-api-errors", "no", "--error-exitcode", "1"]
        command = [sanitizer, *options, *OPTIONS.get(tool, ()), *command]
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env=os.environ | ENVIRONMENT,
        )
        text, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired:
        text, status = f"stopped after {limit_s:.0f} s", 124
    seconds = time.perf_counter() - start
    if logs is not None:
        (logs / re.sub(r"[ /]+", "-", f"{tool} {group}.log")).write_text(text)
    errors = errors_of(text) if tool != WARM_UP or status else ""
    return Finding(tool, group, status, errors, seconds)


def jobs(tools: list[str], chosen: dict[str, Group]) -> list[tuple[str, str]]:
    """Return the (tool, group) pairs to run. racecheck runs for groups with `shares`, or for all if
    it is the only tool."""
    alone = tools == ["racecheck"]
    return [
        (tool, name)
        for tool in tools
        for name, group in chosen.items()
        if tool != "racecheck" or alone or group.shares
    ]


def show(finding: Finding) -> bool:
    """Print a line of the table; return True if the run succeeded without findings."""
    tool, group, status, errors, seconds = finding
    clean = status == 0 and errors in ("", "0")
    print(f"{tool:10} {group:44} {errors or '-':>6} {seconds:5.0f} s", end="")
    print("" if clean else f"   exit status {status}", flush=True)
    return clean


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--group", action="append", help="the name of a group, or its prefix")
    parser.add_argument("--quick", action="store_true", help="memcheck, a few groups per family")
    parser.add_argument("--jobs", type=int, default=min(10, os.cpu_count() or 1))
    parser.add_argument("--limit", type=float, default=300, help="seconds per process")
    parser.add_argument("--logs", type=Path, help="folder for the output of the tools")
    parser.add_argument("--list", action="store_true", help="print the groups and exit")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        run_group(groups(asked.run.split()[:1])[asked.run])
        return 0
    every = groups()
    starts = tuple(asked.group or [""])
    chosen = {
        name: group
        for name, group in every.items()
        if name.startswith(starts) and (group.quick or not asked.quick)
    }
    if asked.list:
        print("\n".join(chosen))
        return 0
    if not chosen:
        parser.error(f"no group named {', '.join(starts)}")
    tools = asked.tool or (["memcheck"] if asked.quick else list(TOOLS))
    run = partial(sanitize, find_sanitizer(), limit_s=asked.limit, logs=asked.logs)
    if asked.logs is not None:
        asked.logs.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    print(f"{'tool':10} {'group':44} {'errors':>6} {'time':>7}", flush=True)
    with ThreadPoolExecutor(asked.jobs) as pool:
        passes = [[(WARM_UP, name) for name in chosen], jobs(tools, chosen)]
        warm, clean = (
            [show(each.result()) for each in as_completed([pool.submit(run, job) for job in work])]
            for work in passes
        )
    seconds = time.perf_counter() - start
    print(f"{sum(clean)} of {len(clean)} clean, {seconds:.0f} s")
    return int(not all((*warm, *clean)))


if __name__ == "__main__":
    sys.exit(main())
