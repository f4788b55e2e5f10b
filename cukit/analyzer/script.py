"""Runs a user's script, or one function of it, so that its kernels can be traced.

    python -m cukit.analyzer.script FILE.py[:function]

runs it and nothing else: the command that `cukit analyze --counters` starts under ncu.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

from cukit.core.files import check_file
from cukit.errors import DataError


class Script:
    """`FILE.py` or `FILE.py:name`.

    `load` imports the file of a function, so that kernels launched on import can be excluded from a
    trace of the call. Raises DataError if the file or the name does not exist.
    """

    def __init__(self, target: str) -> None:
        path, _, name = target.partition(":")
        self.path = Path(path)
        self.name = name or None
        check_file(self.path)

    def load(self) -> Any:
        """The named function; without a name, a function that runs the file as a program."""
        folder = str(self.path.resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        if self.name is None:
            return self._run_as_program
        spec = importlib.util.spec_from_file_location(self.path.stem, self.path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # as an import does: dataclasses and pickle use it
        spec.loader.exec_module(module)
        try:
            return getattr(module, self.name)
        except AttributeError:
            public = ", ".join(n for n in vars(module) if not n.startswith("_")) or "nothing"
            raise DataError(f"{self.path} has no {self.name!r}; known: {public}") from None

    def _run_as_program(self) -> None:
        """Runs the file like `python FILE.py`: without arguments, as `__main__`."""
        before = sys.argv
        sys.argv = [str(self.path)]
        try:
            runpy.run_path(str(self.path), run_name="__main__")
        finally:
            sys.argv = before


if __name__ == "__main__":
    Script(sys.argv[1]).load()()
