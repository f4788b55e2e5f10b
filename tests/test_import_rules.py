"""Import rules between the packages of cukit.

Layers, bottom up: errors; core and the references; op families, which import no other family
except quantization, gemm and, in some cases, layers or attention; models; the distillation loop,
the analyzer and the commands. The folders of a package also import one way. Imports inside
functions count too.
"""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cukit"
KERNELS = ROOT / "kernels_cu"
LONG_FILE = 500

BASE = {"errors"}
OPS = BASE | {"core", "reference", "registry", "gemm", "quantization"}
MODELS = OPS | {
    "layers", "attention", "moe", "array_api", "sampling", "sequence", "graph_memory"
}  # fmt: skip
LOOP = MODELS | {"models", "distill", "distributed", "memory"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "core": BASE,
    "reference": BASE,
    "registry": BASE | {"core"},
    "array_api": OPS,
    "layers": OPS,
    "attention": OPS | {"layers"},
    "gemm": OPS,
    "moe": OPS | {"layers"},
    "sampling": OPS,
    "sequence": OPS,
    "graph_memory": OPS | {"attention"},
    "quantization": OPS,
    "distributed": BASE | {"core"},
    "distill/losses": OPS | {"attention", "distributed"},
    "distill/optimizer": OPS,
    "fusion": BASE | {"core", "registry", "attention", "gemm", "layers"},
    "models": MODELS,
    "distill": LOOP,
    "emulator": BASE | {"core"},
    "memory": BASE | {"core", "reference", "registry"},
    "kv_cache": OPS | {"attention", "memory"},
    "analyzer": BASE | {"core", "registry", "memory"},
    "torch": LOOP | {"cukit", "fusion"},
    "commands": LOOP | {"analyzer", "cukit", "emulator"},
    "cli": BASE | {"core", "cukit", "commands", "analyzer"},
    "__main__": {"cli"},
    "_start": {"core"},
    "__init__": MODELS
    | {"_start", "distill", "distributed", "emulator", "fusion", "kv_cache", "memory", "models"},
}

FOLDERS: dict[str, dict[str, set[str]]] = {
    "distill": {
        "losses": set(),
        "optimizer": set(),
        "training": {"losses", "optimizer"},
        "run": {"losses", "optimizer", "training"},
    },
    "attention": {
        "flash": set(),
        "paged": {"flash"},
        "divergence": {"flash"},
    },
    "gemm": {
        "dense": set(),
        "quantized": {"dense"},
        "grouped": {"dense", "quantized"},
        "dispatch": {"dense", "quantized"},
        "sparse": {"dispatch"},
    },
    "memory": {
        "slot_grid": set(),
        "batched_copy": {"slot_grid"},
        "uninterrupted": set(),
        "providers": {"batched_copy", "slot_grid"},
        "bookkeeping": {"batched_copy", "providers", "slot_grid"},
        "pool": {"batched_copy", "bookkeeping", "providers", "slot_grid", "uninterrupted"},
    },
}
"""The parts of its own package that a folder or module may import; without an entry, all."""

MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted([*KERNELS.rglob("*.cu"), *KERNELS.rglob("*.cuh")])


def imports(path: Path) -> set[str]:
    """Return the first component below `cukit` of every import from the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            module = node.module or ""
            names = (
                [f"cukit.{alias.name}" for alias in node.names] if module == "cukit" else [module]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            if top == "cukit":
                part = rest.partition(".")[0]
                known = (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file()
                found.add(part if part and known else "cukit")
    return found


def layer(path: Path) -> str:
    """Return the row of MAY_IMPORT for a module."""
    family, *inside = path.relative_to(PACKAGE).with_suffix("").parts
    own = f"{family}/{inside[0]}" if inside else family
    return own if own in MAY_IMPORT else family


def family_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_module_imports_only_lower_layers(path: Path) -> None:
    own = layer(path)
    assert own in MAY_IMPORT, f"{name(path)}: add its permitted imports to MAY_IMPORT"
    forbidden = imports(path) - MAY_IMPORT[own] - {family_of(path)}
    assert not forbidden, f"{name(path)} may not import {', '.join(sorted(forbidden))}"


def module_imports(path: Path) -> set[Path]:
    """The modules of the package that a module imports, in functions and for typing too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {ROOT / f"{each.replace('.', '/')}.py" for each in names}
    return found & set(MODULES) - {path}


def test_modules_do_not_import_one_another_in_cycles() -> None:
    """Removing modules without remaining imports, repeatedly, empties the graph."""
    left = {path: module_imports(path) for path in MODULES}
    while leaves := [path for path, needs in left.items() if not needs & left.keys()]:
        for path in leaves:
            del left[path]
    assert not left, f"in or above a cycle: {', '.join(sorted(map(name, left)))}"


def test_private_modules_are_imported_within_their_family_only() -> None:
    private = {path for path in MODULES if path.stem.startswith("_") and path.stem != "__init__"}
    private = {path for path in private if path.parent != PACKAGE}
    for path in MODULES:
        imported = module_imports(path) & private
        foreign = [name(each) for each in imported if family_of(each) != family_of(path)]
        assert not foreign, f"{name(path)} imports {', '.join(sorted(foreign))}"


@pytest.mark.parametrize("family", FOLDERS)
def test_folders_of_a_package_import_one_way(family: str) -> None:
    package = PACKAGE / family
    for path in package.rglob("*.py"):
        own = path.relative_to(package).with_suffix("").parts[0]
        imported = {
            other.relative_to(package).with_suffix("").parts[0]
            for other in module_imports(path)
            if other.is_relative_to(package)
        }
        forbidden = imported - FOLDERS[family].get(own, imported) - {own}
        assert not forbidden, f"{name(path)} may not import {', '.join(sorted(forbidden))}"


@pytest.mark.parametrize("family", FOLDERS)
def test_modules_do_not_import_their_own_package(family: str) -> None:
    """`from cukit.memory import X` inside `cukit.memory` would import all of it."""
    for path in set((PACKAGE / family).rglob("*.py")) - {PACKAGE / family / "__init__.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            own = isinstance(node, ast.ImportFrom) and node.module == f"cukit.{family}"
            assert not own, name(path)


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_optional_packages_are_never_required(path: Path) -> None:
    """CuPy, torch and other optional packages are imported inside functions. Exception: torch in
    `cukit.torch`, which no other module imports."""
    optional = {"cupy", "cupyx", "cupy_backends", "cuda", "torch", "jinja2", "matplotlib", "pynvml"}
    if layer(path) == "torch":
        optional -= {"torch"}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            assert (module or "").partition(".")[0] not in optional, f"{name(path)}:{node.lineno}"


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_kernel_sources_include_only_common_and_their_own_family(path: Path) -> None:
    family = path.relative_to(KERNELS).parts[0]
    for include in includes(path):
        assert include.partition("/")[0] in ("common", family), f"{name(path)} includes {include}"


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.cu")), ids=name)
def test_platform_comes_first(path: Path) -> None:
    """common/platform.cuh, which switches between CUDA and the CPU, is the first include."""
    first = path
    while first != KERNELS / "common/platform.cuh":
        assert includes(first), f"{name(path)} reads {name(first)} before common/platform.cuh"
        first = KERNELS / includes(first)[0]


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_assembly_is_only_in_common_ptx(path: Path) -> None:
    if "ptx" not in path.relative_to(KERNELS).parts:
        code = re.sub(r"//.*", "", path.read_text())
        assert not re.search(r"\basm\b", code), f"{name(path)}: asm belongs in common/ptx/"


def test_long_files_are_named() -> None:
    """A warning only: a long file is acceptable if it has one responsibility."""
    for path in [*MODULES, *SOURCES]:
        lines = path.read_text().count("\n")
        if lines > LONG_FILE:
            warnings.warn(f"{name(path)} has {lines} lines", stacklevel=1)
