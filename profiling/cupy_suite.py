"""Runs parts of CuPy's own test suite with and without cukit's pool, and compares the outcomes.

    git -C CUPY archive v14.2.0 tests pyproject.toml | tar x -C SOURCES   # the installed version
    python -m profiling.cupy_suite SOURCES core_tests creation_tests --workers 16 --seconds 150

The tests are distributed over processes, each with its own pool. The run with CuPy's pool is first
and compiles the kernels, so the times are not comparable. Tests marked slow or multi_gpu are
excluded. The exit code is 1 if an outcome differs between the two runs, or a process crashed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SHARD_VARIABLE = "CUKIT_CUPY_SUITE"
"""Environment variable with the task of a process, as JSON."""

GRACE_SECONDS = 60
"""Extra time after the time limit for the running tests to finish."""

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


# In each process: a pytest plugin ------------------------------------------------------------


class Plugin:
    """Installs the pool, runs every n-th test until the time limit, and writes the outcomes."""

    def __init__(self, shard: dict[str, Any]) -> None:
        self._shard = shard
        self._log = Path(shard["log"]).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._pool: Any = None
        self._displaced = 0
        if shard["pool"] == "cukit":
            from cukit.memory import MemoryPool

            self._pool = MemoryPool()
            self._install()

    def _install(self) -> None:
        import cupy

        self._pool.install()
        self._ours = cupy.cuda.get_allocator()

    def _write(self, **entry: Any) -> None:
        self._log.write(json.dumps(entry) + "\n")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = items[self._shard["number"] :: self._shard["of"]]

    def pytest_runtest_setup(self, item: Any) -> None:
        if self._pool is None:
            return
        import cupy

        if cupy.cuda.get_allocator() is not self._ours:  # an earlier test replaced the allocator
            self._displaced += 1
            self._install()

    def pytest_runtest_logreport(self, report: Any) -> None:
        expected = hasattr(report, "wasxfail")
        if report.failed:
            outcome = "failed" if report.when == "call" else "error"
        elif report.skipped:
            outcome = "xfailed" if expected else "skipped"
        elif report.when == "call":
            outcome = "xpassed" if expected else "passed"
        else:
            return
        reason = str(report.longrepr)[-2000:] if report.failed else ""
        self._write(test=report.nodeid, outcome=outcome, reason=reason)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if time.time() > self._shard["until"]:
            self._session.shouldstop = "time is up"

    def pytest_sessionstart(self, session: Any) -> None:
        self._session = session

    def pytest_sessionfinish(self) -> None:
        if self._pool is not None:
            statistics = self._pool.statistics()
            self._write(
                allocations=statistics.num_allocations,
                pages_remapped=statistics.pages_remapped,
                displaced=self._displaced,
            )
        self._log.close()


def pytest_configure(config: Any) -> None:
    """Register the plugin: this module is a pytest plugin in the processes that `main` starts."""
    if SHARD_VARIABLE in os.environ:
        config.pluginmanager.register(
            Plugin(json.loads(os.environ[SHARD_VARIABLE])), "cukit-cupy-suite"
        )


# In the parent process ----------------------------------------------------------------


def run(pool: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all parts on one pool; return outcomes by test, and the statistics of the pools."""
    paths = [f"tests/cupy_tests/{part}" for part in options.parts]
    command = [sys.executable, "-m", "pytest", "-p", "profiling.cupy_suite", *paths]
    command += ["-q", "-m", "not slow and not multi_gpu", "-p", "no:cacheprovider"]
    command += ["--tb=short", "--no-header"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    started = time.time()
    processes = []
    for number in range(options.workers):
        shard = {
            "pool": pool,
            "number": number,
            "of": options.workers,
            "until": started + options.seconds,
            "log": str(folder / f"{pool}-{number}.jsonl"),
        }
        environment = os.environ | {
            SHARD_VARIABLE: json.dumps(shard),
            "PYTHONPATH": path,
            "CUPY_CACHE_DIR": str(folder / "kernels"),
            "OMP_NUM_THREADS": "1",
        }
        output = (folder / f"{pool}-{number}.txt").open("w")
        processes.append(
            subprocess.Popen(
                command,
                cwd=options.sources,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        )
    exit_codes = []
    for process in processes:
        left = started + options.seconds + GRACE_SECONDS - time.time()
        try:
            exit_codes.append(process.wait(max(left, 1)))
        except subprocess.TimeoutExpired:
            process.kill()
            exit_codes.append(process.wait())
    found = _read(folder, pool, options.workers)
    found["seconds"] = round(time.time() - started, 1)
    found["crashed"] = [n for n, code in enumerate(exit_codes) if code not in (0, 1, 2, 5)]
    return found


def _read(folder: Path, pool: str, workers: int) -> dict[str, Any]:
    outcomes: dict[str, str] = {}
    reasons: dict[str, str] = {}
    totals: Counter[str] = Counter()
    for number in range(workers):
        log = folder / f"{pool}-{number}.jsonl"
        for line in log.read_text().splitlines() if log.exists() else ():
            entry = json.loads(line)
            if "test" not in entry:
                totals.update(entry)
                continue
            test = entry["test"]
            # A failure of the setup or the call takes precedence over the teardown.
            if outcomes.get(test) not in ("failed", "error"):
                outcomes[test] = entry["outcome"]
                reasons[test] = entry["reason"]
    return {"outcomes": outcomes, "reasons": reasons, "pools": dict(totals)}


def compare(without: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Count the tests that ran on both pools, and list those with different outcomes."""
    common = sorted(without["outcomes"].keys() & ours["outcomes"].keys())
    differences = [
        {
            "test": test,
            "without": without["outcomes"][test],
            "with": ours["outcomes"][test],
            "reason": ours["reasons"][test] or without["reasons"][test],
        }
        for test in common
        if without["outcomes"][test] != ours["outcomes"][test]
    ]
    return {
        "tests": len(common),
        "without": dict(Counter(without["outcomes"][test] for test in common)),
        "with": dict(Counter(ours["outcomes"][test] for test in common)),
        "not_in_both": len(without["outcomes"].keys() ^ ours["outcomes"].keys()),
        "differences": differences,
        "crashed": {"without": without["crashed"], "with": ours["crashed"]},
        "pools": ours["pools"],
        "seconds": {"without": without["seconds"], "with": ours["seconds"]},
        "failed": [t for t in common if ours["outcomes"][t] in ("failed", "error")],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m profiling.cupy_suite", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("sources", type=Path, help="folder with CuPy's tests/ and pyproject.toml")
    parser.add_argument("parts", nargs="+", help="files or folders below tests/cupy_tests")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=600, help="time limit per pool")
    parser.add_argument("--out", type=Path, default=Path("cupy-suite"), help="folder for the logs")
    options = parser.parse_args(arguments)
    folder = options.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    import cupy

    print(f"CuPy {cupy.__version__}: {' '.join(options.parts)}", flush=True)
    found = {}
    for pool in ("cupy", "cukit"):
        found[pool] = run(pool, options, folder)
        print(f"{pool:<6} {len(found[pool]['outcomes'])} tests, {found[pool]['seconds']} s")
    result = {"cupy": cupy.__version__, "parts": options.parts} | compare(
        found["cupy"], found["cukit"]
    )
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    return 1 if result["differences"] or any(result["crashed"].values()) else 0


def show(result: dict[str, Any]) -> None:
    """Print the number of tests by outcome, and every difference."""
    print(f"{'':<14}" + "".join(f"{outcome:>9}" for outcome in OUTCOMES))
    for way in ("without", "with"):
        counts = "".join(f"{result[way].get(outcome, 0):>9}" for outcome in OUTCOMES)
        print(f"{way:<14}{counts}")
    print(f"ran on both pools: {result['tests']}; in one only: {result['not_in_both']}")
    print(f"pools: {result['pools']}; crashed: {result['crashed']}")
    for one in result["differences"]:
        print(
            f"{one['test']}: {one['without']} without, {one['with']} with\n{one['reason'][-600:]}"
        )


if __name__ == "__main__":
    sys.exit(main())
