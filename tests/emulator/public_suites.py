"""Runs public suites of programs with and without data races in the emulator.

    python -m tests.emulator.public_suites scor ScoR/microbenchmarks/src
    python -m tests.emulator.public_suites indigo CUDA

The code of the suites is not part of this repository. ScoR (github.com/csl-iisc/ScoR) is a folder
of programs with one kernel, whose names state whether there is a race. Indigo
(github.com/burtscher/IndigoSuite) generates its programs: in `Generators`,
`python generate_CUDA_codes.py PATH/TO/NAME.idg ../copyright.txt CUDA`, once for each NAME in
`CUDA_sources`. Their names list their bugs. Prints false reports and missed bugs, then the
number of programs by kind and report.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cukit
from cukit.errors import CukitError, EmulatorError

RACES = ("atomicBug", "guardBug", "raceBug", "syncBug")
"""Bugs of Indigo that are races. `boundsBug` is an access outside an array."""

SCOR_EXTENTS = ("NBLOCKS", "TPERBLK")
"""The macros with the grid and block size of a program of ScoR."""

OPTIONS = {"global_races": True, "patience": 2.0}


class Program(NamedTuple):
    """kind: "race", "bounds" or "clean"."""

    name: str
    kind: str
    path: Path


def scor(folder: Path) -> Iterator[Program]:
    """The microbenchmarks of ScoR."""
    for path in sorted(folder.glob("*.cu")):
        yield Program(path.stem, "clean" if path.stem.startswith("norace") else "race", path)


def run_scor(path: Path, **settings: Any) -> None:
    """Run a program of ScoR with the grid given by its macros."""
    text = path.read_text()
    grid, block = (int(re.findall(rf"#define {name} +(\d+)", text)[0]) for name in SCOR_EXTENTS)
    data = np.zeros(64, np.uint32)
    cukit.check_kernel(path, "kmain", grid=grid, block=block, args=[data], **settings)


def indigo(folder: Path) -> Iterator[Program]:
    """The generated programs of Indigo."""
    for path in sorted(folder.rglob("*.cu")):
        bugs = [part for part in path.stem.split("_") if part.endswith("Bug")]
        kind = "race" if set(bugs) & set(RACES) else "bounds" if bugs else "clean"
        yield Program(path.stem, kind, path)


def run_indigo(path: Path, seed: int, **settings: Any) -> None:
    """Run a program of Indigo on one small graph per seed: a ring with a hub, edges in both
    directions, neighbours in random order, and a vertex without edges at either end."""
    vertices = 14
    ring = range(1, vertices - 1)
    edges = {(i, i % (vertices - 2) + 1) for i in ring} | {(1, i) for i in ring[1:]}
    generator = np.random.default_rng(seed + 1)
    both = np.array(sorted(edges | {(b, a) for a, b in edges}), np.int32)
    both = both[np.lexsort((generator.random(len(both)), both[:, 0]))]
    first = np.searchsorted(both[:, 0], np.arange(vertices + 1)).astype(np.int32)
    neighbours = np.ascontiguousarray(both[:, 1])
    data = [
        generator.integers(0, high, len(both)).astype(np.int32) for high in (vertices, len(both))
    ]
    for each in data:
        each[0] = 0  # as in Indigo's program
    text = re.sub(r'#include "indigo_cuda\.h"', "", path.read_text())
    args = [first, neighbours, *data, np.int32(vertices)]
    launch = {"grid": vertices + 2, "block": 64, "args": args, "seed": seed}
    cukit.check_kernel(text, "test_kernel", **launch, **settings)


SUITES: dict[str, tuple[Callable[[Path], Iterator[Program]], Callable[..., None]]] = {
    "indigo": (indigo, run_indigo),
    "scor": (scor, run_scor),
}


def first_report(suite: str, seeds: int, program: Program) -> str:
    """The start of the first report; "" without a report; "!" and the reason if it did not run."""
    for seed in range(seeds):
        try:
            SUITES[suite][1](program.path, seed=seed, **OPTIONS)
        except EmulatorError as error:
            return str(error).partition(": ")[2].partition("\n")[0]
        except CukitError as error:
            return "! " + str(error).replace("\n", " ")[:300]
    return ""


def main() -> int:
    """Print the programs whose outcome differs from their names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=1, help="number of thread orders")
    parser.add_argument(
        "--only", default="", help="programs whose names match a regular expression"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    os.environ.setdefault("CUKIT_QUIET", "1")
    every = SUITES[arguments.suite][0](arguments.folder)
    programs = [program for program in every if re.search(arguments.only, program.name)]
    counts: Counter[tuple[str, str]] = Counter()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        found = pool.map(
            partial(first_report, arguments.suite, arguments.seeds), programs, chunksize=4
        )
        for program, report in zip(programs, found, strict=True):
            what = (
                "did not run" if report.startswith("!")
                else "race" if report.startswith("race") else "other" if report else "nothing"
            )  # fmt: skip
            counts[program.kind, what] += 1
            if (program.kind == "clean") != (what == "nothing") or what == "did not run":
                print(f"{program.kind} {program.name}: {report or 'nothing reported'}", flush=True)
    for (kind, what), count in sorted(counts.items()):
        print(f"{kind}: {what} {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
