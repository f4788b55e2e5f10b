"""Imports inside cukit.memory go one way, without circles."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import cukit.memory

FOLDER = Path(cukit.memory.__file__).parent
PACKAGE = "cukit.memory"

BELOW: dict[str, set[str]] = {
    "slot_grid": set(),
    "batched_copy": {"slot_grid"},
    "uninterrupted": set(),
    "providers": {"batched_copy", "slot_grid"},
    "bookkeeping": {"batched_copy", "providers", "slot_grid"},
    "pool": {"batched_copy", "bookkeeping", "providers", "slot_grid", "uninterrupted"},
}
"""What each of these may import; the tools next to them may import all."""


def _name(path: Path) -> str:
    parts = path.relative_to(FOLDER).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {_name(path): path for path in FOLDER.rglob("*.py")}


def _imports(path: Path) -> set[str]:
    """Modules of the package that a module imports, inside functions and for typing too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}."):
            module = (node.module or "").removeprefix(f"{PACKAGE}.")
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                found.add(inner if inner in MODULES else module)
    return found


GRAPH = {name: _imports(path) for name, path in MODULES.items() if name}


def test_modules_import_one_another_without_circles() -> None:
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_rooms_import_only_what_is_below_them() -> None:
    for name, imported in GRAPH.items():
        room = name.partition(".")[0]
        if room in BELOW:
            rooms = {other.partition(".")[0] for other in imported} - {room}
            assert rooms <= BELOW[room], f"{name} imports {rooms - BELOW[room]}"


def test_no_module_imports_the_package_itself() -> None:
    """`from cukit.memory import X` inside the package would import everything."""
    for name, path in MODULES.items():
        if name:
            for node in ast.walk(ast.parse(path.read_text())):
                assert not (isinstance(node, ast.ImportFrom) and node.module == PACKAGE), name
