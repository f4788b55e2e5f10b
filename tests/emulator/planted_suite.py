"""The suite of planted bugs: small CUDA kernels with a mistake that -DBROKEN=1 plants.

A file of `planted/<class>/` is plain CUDA C++ with one kernel that is called like the file.
`BROKEN=0` makes the clean twin of the broken one. Its leading comment says what it is about and, in
lines `// key: value`, how it is launched and what is expected. Values are Python; `np` and `BROKEN`
(0 or 1) are known:

    launch   grid=1, block=64, shared=0 (dynamic bytes); what is left out has these values
    arg      one line an argument, in order: an array, a NumPy scalar or None
    options  of the emulator, e.g. arch="sm_80"
    result   optional: what the clean twin leaves in the last array
    report   what the error about the broken twin says, a regular expression; every line has to
             match. Without one there is no broken twin: a legal program that must not be reported.
    seeds    a number: the mistake depends on the order of threads, and has to be found with one of
             this many seeds. Without it, the default mode has to find it.
    missed   why the broken twin is not reported, where it is known not to be

The report on a broken twin names file and line of every source line that ends in `// <- reported`.
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
        """The class of mistakes: the folder."""
        return self.path.parent.name

    @property
    def reports(self) -> list[str]:
        """Expressions that the report on the broken twin matches; empty for a legal program."""
        return self.declared["report"]

    @property
    def seeds(self) -> range:
        """With one of them the broken twin is reported."""
        return range(int(self._one("seeds", "1")))

    @property
    def missed(self) -> bool:
        """Whether the broken twin is known not to be reported."""
        return bool(self.declared["missed"])

    def lines(self) -> list[int]:
        """Lines that the report names."""
        lines = self.path.read_text().splitlines()
        return [number for number, line in enumerate(lines, 1) if line.endswith(_MARK)]

    def expected(self) -> np.ndarray[Any, Any] | None:
        """What the clean twin leaves in the last array, where declared."""
        text = self._one("result", "None")
        value = _evaluate(text, 0)
        return None if value is None else np.asarray(value)

    def launch(self, broken: bool) -> tuple[KernelSpec, tuple[int, ...], tuple[Any, ...]]:
        """A twin: the kernel, its grid and its arguments."""
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
        """Launches a twin in the emulator; `options` come before those of the file."""
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
    """The declaration of a file."""
    declared: defaultdict[str, list[str]] = defaultdict(list)
    for line in path.read_text().splitlines():
        match = _DECLARATION.fullmatch(line)
        if match:
            declared[match[1]].append(match[2])
    return Planted(path, declared)


def suite() -> list[Planted]:
    """All files, in order of their names."""
    return [read(path) for path in sorted(FOLDER.glob("*/*.cu"))]
