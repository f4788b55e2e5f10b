"""Runs the array API's conformance suite against `ck.xp` and against NumPy's own namespace.

    git clone --recurse-submodules https://github.com/data-apis/array-api-tests
    pip install pytest-json-report ndindex hypothesis
    python -m tests.array_api.conformance array-api-tests

Prints the failing tests, and exits with 1 if a test fails for `ck.xp` that passes for NumPy. No
package index has the suite; test_conformance.py runs it if ARRAY_API_TESTS is its folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MODULES = {"cukit": "exec('import cukit; xp = cukit.xp')", "numpy": "numpy"}
ROOT = Path(__file__).parents[2]


def failures(
    suite: Path, name: str, examples: int = 10, tests: Sequence[str] = ("array_api_tests",)
) -> tuple[set[str], int]:
    """Names of the tests that fail for a namespace of MODULES, and the number that ran."""
    environment = {
        **os.environ,
        "ARRAY_API_TESTS_MODULE": MODULES[name],
        "CUKIT_DEVICE": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [
        sys.executable, "-m", "pytest", "-q", "-rf", "-W", "ignore", "-p", "no:cacheprovider",
        "--max-examples", str(examples), "--derandomize", "--disable-deadline",
        *tests,
    ]  # fmt: skip
    run = subprocess.run(
        command, cwd=suite, env=environment, capture_output=True, text=True, check=False
    )
    counts = {
        word: int(number) for number, word in re.findall(r"(\d+) (passed|failed)", run.stdout)
    }
    if not counts:
        raise RuntimeError(f"the suite did not run:\n{(run.stdout + run.stderr)[-2000:]}")
    failed = re.findall(r"^FAILED (.*?)(?: - .*)?$", run.stdout, re.MULTILINE)
    return set(failed), sum(counts.values())


def worse_than_numpy(suite: Path, ours: set[str], theirs: set[str]) -> set[str]:
    """Tests that fail for `ck.xp` and not for NumPy, even if NumPy runs them with 500 examples:
    examples are random, so special cases on which NumPy fails too may be rare."""
    worse = ours - theirs
    if worse:
        worse -= failures(suite, "numpy", 500, sorted(worse))[0]
    return worse


def main(folder: str) -> int:
    """Compares both namespaces."""
    suite = Path(folder)
    found = {name: failures(suite, name) for name in MODULES}
    for name, (failed, total) in found.items():
        print(f"{name}: {total - len(failed)} of {total} pass")
        for test in sorted(failed):
            print("   ", test)
    worse = worse_than_numpy(suite, found["cukit"][0], found["numpy"][0])
    print("worse than NumPy:", *sorted(worse) or ["nothing"])
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
