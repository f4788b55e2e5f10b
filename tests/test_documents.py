"""README and docs: examples run, links and paths exist, tables match the measured results."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import cukit
from cukit.analyzer.results import read
from profiling.tables import DOCUMENTS, MARKS, PUBLISHED, update

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
page_by_name = pytest.mark.parametrize(
    "page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix()
)


FIGURE = re.compile(r"\d+(?:\.\d+)?")


def assert_alike(printed: str, promised: str) -> None:
    """Check that words are equal, and numbers within 20%: losses depend on the training text, which
    is the source of Python's standard library."""
    assert FIGURE.sub("#", printed) == FIGURE.sub("#", promised)
    for one, other in zip(FIGURE.findall(printed), FIGURE.findall(promised), strict=True):
        assert float(one) == pytest.approx(float(other), rel=0.2, abs=1e-6)


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_readmes_examples_print_their_comments(code: str, tmp_path: Path) -> None:
    """Each example runs in a separate process, on the CPU, from another folder."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env=os.environ | {"CUKIT_DEVICE": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    promised = re.findall(r"^ *# (.*)", code, re.MULTILINE)
    assert promised, "every example prints something"
    for line, promise in zip(result.stdout.splitlines(), promised, strict=True):
        start, shortened, _ = promise.partition("...")
        assert_alike(line[: len(start)] if shortened else line, start)


def test_there_is_an_example_for_each_surface() -> None:
    assert len(EXAMPLES) == 7


CHECKS = (ROOT / "docs" / "check_your_kernel.md").read_text()


@pytest.mark.emulator
def test_checks_of_your_kernel_print_the_documented_output(tmp_path: Path) -> None:
    """Write the page's sources to files, and run its commands and programs in their folder."""
    for name, source in re.findall(r"```cuda\n// (\S+)\n(.*?)```", CHECKS, re.DOTALL):
        (tmp_path / name).write_text(f"// {name}\n{source}")
    blocks = re.findall(r"```(console|python)\n(.*?)```", CHECKS, re.DOTALL)
    assert len(blocks) == 3
    for kind, block in blocks:
        if kind == "console":
            command, *promised = block.splitlines()
            arguments = ["-m", *shlex.split(command.removeprefix("$ "))]
        else:
            arguments = ["-W", "error", "-c", block]
            promised = re.findall(r"^ *# (.*)", block, re.MULTILINE)
        result = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "CUKIT_EMULATOR_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        printed = [line.strip() for line in result.stdout.splitlines()]
        assert printed == [line.strip() for line in promised], result.stderr


@page_by_name
def test_link_targets_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@page_by_name
def test_paths_in_the_text_exist(page: Path) -> None:
    roots = "cukit|kernels_cu|tests|profiling|docs"
    for path in re.findall(rf"`((?:{roots})/[\w./]+)`", page.read_text()):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_the_layout_section_is_complete() -> None:
    block = re.search(r"## Layout\n\n```\n(.*?)```", README, re.DOTALL)
    assert block is not None
    inside = set(re.findall(r"^  ([\w.]+)/?", block[1], re.MULTILINE))
    folders = {p.name for p in (ROOT / "cukit").iterdir() if (p / "__init__.py").exists()}
    files = {name for name in inside if name.endswith(".py")}
    assert inside - files == folders
    assert all((ROOT / "cukit" / name).is_file() for name in files)
    for top in re.findall(r"^(\w+)/", block[1], re.MULTILINE):
        assert (ROOT / top).is_dir(), top


def test_equivalents_of_familiar_names_exist() -> None:
    table = README.partition("## Names you may know")[2]
    ours = "\n".join(row.split(" | ")[1] for row in table.splitlines() if " | " in row)
    names = re.findall(r"`((?:ck|cukit)\.[\w.]+)", ours)
    assert len(names) > 10
    for name in names:
        module, _, attribute = name.replace("ck.", "cukit.", 1).rpartition(".")
        if module == "cukit.torch" and importlib.util.find_spec("torch") is None:
            continue
        assert hasattr(importlib.import_module(module), attribute), name


@page_by_name
def test_the_commands_exist(page: Path) -> None:
    from cukit.cli import app

    known = {command.name for command in app.registered_commands}
    for command in re.findall(r"(?:^|`|\$ )cukit (\w+)", page.read_text(), re.MULTILINE):
        assert command in known, f"{page.name} names `cukit {command}`"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_tables_match_the_results(name: str) -> None:
    text = (ROOT / name).read_text()
    assert MARKS.search(text), f"{name} has no table"
    assert update(text, read(PUBLISHED)) == text, "run `make tables`"


def test_public_names_are_sorted_and_exist() -> None:
    assert list(cukit.__all__) == sorted(cukit.__all__)
    assert all(hasattr(cukit, name) for name in cukit.__all__)
