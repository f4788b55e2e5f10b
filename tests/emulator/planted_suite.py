"""The suite of planted bugs: small CUDA kernels with a bug that -DBROKEN=1 enables.

A file in `planted/<class>/` is plain CUDA C++ with one kernel, named like the file. With `BROKEN=0`
it compiles to the clean twin of the broken kernel. Its leading comment describes the bug and, in
lines `// key: value`, the launch and the expected outcome. `arg` and `result` are Python
expressions, `launch` and `options` keyword arguments; all may use `np` and `BROKEN` (0 or 1):

    launch   default: grid=1, block=64, shared=0 (dynamic bytes)
    arg      one line per argument, in order: an array, a NumPy scalar or None
    options  of the emulator, e.g. arch="sm_80"
    result   optional: the last array after the clean twin has run
    report   a regular expression that the error about the broken twin matches; if there are several
             lines, it matches all. Without one there is no broken twin: the program is legal and
             must not be reported.
    seeds    a number n, default 1: at least one run with a seed below n must report the bug. A seed
             selects the order of threads.
    missed   the reason why the broken twin is not reported, if that is known

The report of a broken twin names file and line of every source line ending in `// <- reported`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cukit
from cukit.core.kernel import KernelSpec, load_kernel
from cukit.errors import CukitError

FOLDER = Path(__file__).parent / "planted"

_DECLARATION = re.compile(r"// (launch|arg|options|result|report|seeds|missed): (.*)")
_MARK = "// <- reported"


@dataclass(frozen=True)
class Outcome:
    """error: what the launch raised, as text, or None. result: the last array after it."""

    error: str | None
    result: np.ndarray[Any, Any] | None


@dataclass(frozen=True)
class Planted:
    """One file of the suite."""

    path: Path
    declared: dict[str, list[str]] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.kind}/{self.path.stem}"

    @property
    def kind(self) -> str:
        """The class of the bug: the folder's name."""
        return self.path.parent.name

    @property
    def reports(self) -> list[str]:
        """Regular expressions that the broken twin's report matches; empty for a legal program."""
        return self.declared["report"]

    @property
    def seeds(self) -> range:
        """The broken twin is reported with at least one of these seeds."""
        return range(int(self._one("seeds", "1")))

    @property
    def missed(self) -> bool:
        """True if the broken twin is known not to be reported."""
        return bool(self.declared["missed"])

    def lines(self) -> list[int]:
        """Lines that the report names."""
        lines = self.path.read_text().splitlines()
        return [number for number, line in enumerate(lines, 1) if line.endswith(_MARK)]

    def expected(self) -> np.ndarray[Any, Any] | None:
        """The last array after the clean twin has run, if declared."""
        text = self._one("result", "None")
        value = _evaluate(text, 0)
        return None if value is None else np.asarray(value)

    def launch(self, broken: bool) -> tuple[KernelSpec, tuple[int, ...], tuple[Any, ...]]:
        """Returns the kernel, the grid and the arguments of a twin."""
        launch = self._keywords("launch", broken)
        grid = launch.get("grid", 1)
        spec = KernelSpec(
            str(self.path),
            self.path.stem,
            (("BROKEN", int(broken)),),
            launch.get("block", 64),
            launch.get("shared", 0),
        )
        args = tuple(_evaluate(text, broken) for text in self.declared["arg"])
        return spec, grid if isinstance(grid, tuple) else (grid,), args

    def run(self, broken: bool, **options: Any) -> Outcome:
        """Launches a twin in the emulator; `options` override those of the file."""
        spec, grid, args = self.launch(broken)
        try:
            with cukit.backend("emulator", **{**self._keywords("options", broken), **options}):
                load_kernel(spec)(grid, args)
        except CukitError as error:
            return Outcome(str(error), None)
        arrays = [each for each in args if isinstance(each, np.ndarray)]
        return Outcome(None, arrays[-1] if arrays else None)

    def _one(self, key: str, default: str) -> str:
        return (self.declared[key] or [default])[0]

    def _keywords(self, key: str, broken: bool) -> dict[str, Any]:
        values: dict[str, Any] = _evaluate(f"dict({self._one(key, '')})", broken)
        return values


def _evaluate(text: str, broken: bool) -> Any:
    return eval(text, {"np": np, "BROKEN": int(broken)})


def read(path: Path) -> Planted:
    """Reads the declaration of a file."""
    declared: defaultdict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        match = _DECLARATION.fullmatch(line)
        if match:
            declared[match[1]].append(match[2])
    return Planted(path, declared)


def suite() -> list[Planted]:
    """All files, in order of their names."""
    return [read(path) for path in sorted(FOLDER.glob("*/*.cu"))]
