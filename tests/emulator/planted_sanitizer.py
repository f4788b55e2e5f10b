"""Runs compute-sanitizer on the planted bugs: `python -m tests.emulator.planted_sanitizer`.

Needs a Hopper GPU. Compiles the correct and, if there is one, the broken twin of every program
outside planted/arch, and launches them under each tool, up to 20 programs per process. Writes
planted_sanitizer.json to this folder; planted_table.py reads it.

Programs may hang: each process has a time limit, and the programs that it did not reach run in
another process. The file is written after every process, so an interrupted run keeps its results;
`--resume` runs the programs that are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cukit.core.compiler import compile_kernel
from tests.emulator.planted_suite import Planted, suite
from tests.sanitize import TOOLS, find_sanitizer

RESULTS = Path(__file__).with_name("planted_sanitizer.json")
LAUNCHER = Path(__file__).with_name("planted_launcher.py")

ARCH = "sm_90a"
NOT_FOR_THIS_GPU = ("arch",)
"""Classes whose bugs are correct code on Hopper."""

ALONE = ("crashes", "barriers", "endless")
"""Classes whose broken twins may hang or end the process: one broken twin per process. Hanging
kernels slow down concurrent processes, so these classes run one after another, in this order."""

TOGETHER = 20
"""Programs per process in the other classes, and correct twins per process in all classes."""


def name_of(planted: Planted, broken: bool) -> str:
    """Name of the twin's files."""
    return f"{planted.kind}-{planted.path.stem}-{int(broken)}"


def prepare(folder: Path, job: tuple[Planted, bool]) -> tuple[str, str]:
    """Writes the launcher's files. Returns the twin's name, and why it cannot run, or ""."""
    planted, broken = job
    name = name_of(planted, broken)
    try:
        spec, grid, arguments = planted.launch(broken)
        cubin = compile_kernel(spec, ARCH).path.read_bytes()
    except Exception as error:
        return name, f"{type(error).__name__}: {error}".splitlines()[0]
    (folder / f"{name}.cubin").write_bytes(cubin)
    packed = [
        ("null", b"") if each is None
        else ("scalar", each.tobytes()) if isinstance(each, np.generic)
        else ("array", np.ascontiguousarray(each).tobytes())
        for each in arguments
    ]  # fmt: skip
    block = (spec.threads, 1, 1)
    launch = (spec.entry, (*grid, 1, 1)[:3], block, spec.shared_bytes, packed)
    (folder / f"{name}.pickle").write_bytes(pickle.dumps(launch))
    return name, ""


NO_FINDING = re.compile(r"COMPUTE-SANITIZER|[A-Z]+ SUMMARY|Target application|Internal|This tool")
"""Lines that a tool prints without a finding."""


def outcomes_in(text: str, late: bool) -> dict[str, str]:
    """Returns the outcome of each program that a process launched.

    A tool prints its findings before the next program is launched. `late`: the process was killed
    at its time limit.
    """
    outcomes: dict[str, str] = {}
    for part in re.split(r"^launch ", text, flags=re.MULTILINE)[1:]:
        name, _, output = part.partition("\n")
        lines = re.findall(r"^========= +(\S.*)", output, re.MULTILINE)
        found = any(not NO_FINDING.match(line) for line in lines)
        outcomes[name] = "reported" if found else "clean"
    last = next(reversed(outcomes), None)
    if last is not None and outcomes[last] == "clean" and not re.search("^done$", text, re.M):
        outcomes[last] = "hangs" if late else "failed"
    return outcomes


def run(
    sanitizer: str, folder: Path, logs: Path | None, limit_s: float, job: tuple[str, list[str]]
) -> dict[str, str]:
    """Returns the outcome of each program: "clean", "reported", "failed" or "hangs".

    Gives up after two processes that launch no program, and omits the remaining programs.
    """
    tool, names = job
    attempts = 1
    outcomes: dict[str, str] = {}
    options = ["--tool", tool, "--report-api-errors", "no"]
    while names:
        command = [sanitizer, *options, sys.executable, "-I", str(LAUNCHER), str(folder), *names]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=limit_s)
            late = False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
            late = True
        if logs is not None:
            (logs / f"{tool}-{names[0]}.log").write_text(text)
        launched = outcomes_in(text, late)
        outcomes.update(launched)
        if not launched:
            if attempts == 0:
                break
            attempts -= 1
        names = names[len(launched) :]
    return outcomes


def jobs(
    names: list[str], kinds: set[str], together: int, done: dict[str, dict[str, str]]
) -> Iterator[tuple[str, list[str]]]:
    """Yields the tool and the programs of each process, without programs already done."""
    for tool in TOOLS:
        for broken in ("0", "1"):
            chosen = [
                name
                for name in names
                if name.split("-")[0] in kinds and name.endswith(broken) and name not in done[tool]
            ]
            step = together if broken == "1" else max(together, TOGETHER)
            for i in range(0, len(chosen), step):
                yield tool, chosen[i : i + step]


def save(version: str, outcomes: dict[str, dict[str, str]]) -> None:
    """Writes RESULTS."""
    record: dict[str, Any] = {"version": version, "arch": ARCH, "outcomes": outcomes}
    RESULTS.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def found_before(version: str) -> dict[str, dict[str, str]]:
    """Returns the outcomes in RESULTS by tool, if this version of compute-sanitizer wrote them."""
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    outcomes = record.get("outcomes", {}) if record.get("version") == version else {}
    return {tool: dict(outcomes.get(tool, {})) for tool in TOOLS}


def main() -> int:
    """Runs everything; the exit status is 1 if no program could be compiled."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=25, help="seconds per process")
    parser.add_argument("--alone", type=float, default=8, help="the same for classes that may hang")
    parser.add_argument("--logs", type=Path, help="folder for the output of the tools")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--resume", action="store_true", help="run only programs without a result")
    arguments = parser.parse_args()
    if arguments.logs is not None:
        arguments.logs.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    programs = [each for each in suite() if each.kind not in NOT_FOR_THIS_GPU]
    twins = [
        (each, broken) for each in programs for broken in (False, True)[: 1 + bool(each.reports)]
    ]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with ProcessPoolExecutor(arguments.jobs) as processes:
            prepared = dict(processes.map(partial(prepare, folder), twins))
        for name, why in prepared.items():
            if why:
                print(f"{name}: {why}")
        names = [name for name, why in prepared.items() if not why]
        print(f"{len(names)} of {len(twins)} prepared, {time.perf_counter() - start:.0f} s")
        if arguments.compile_only or not names:
            return int(not names)
        sanitizer = find_sanitizer()
        banner = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout
        version = (re.search(r"[Vv]ersion:? *([\d.]+)", banner) or ["", banner.strip()])[1]
        kinds = {each.kind for each in programs}
        outcomes = found_before(version) if arguments.resume else {tool: {} for tool in TOOLS}
        for chosen, together, limit in (
            (kinds - set(ALONE), TOGETHER, arguments.limit),
            *(({kind}, 1, arguments.alone) for kind in ALONE),
        ):
            work = list(jobs(names, chosen, together, outcomes))
            call = partial(run, sanitizer, folder, arguments.logs, limit)
            with ThreadPoolExecutor(arguments.jobs) as pool:
                tools = {pool.submit(call, job): job[0] for job in work}
                for finished in as_completed(tools):
                    outcomes[tools[finished]].update(finished.result())
                    save(version, outcomes)
            print(f"{len(work)} processes, {time.perf_counter() - start:.0f} s", flush=True)
    for tool in TOOLS:
        counts = Counter((name[-1], outcome) for name, outcome in outcomes[tool].items())
        print(tool, *(
            f"{count} {'broken' if twin == '1' else 'correct'} {outcome}"
            for (twin, outcome), count in sorted(counts.items())
        ), sep=", ")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
