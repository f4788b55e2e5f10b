"""Tests of the test infrastructure: guarded memory, shuffled order, sanitizer runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import sanitize
from tests.conftest import shuffled
from tests.layers.sanitize import GROUPS
from tests.sanitize import WARM_UP, Finding, Group, errors_of, jobs, show
from tests.test_quick_run import ONLY_NAMED_PLUGINS

ROOT = Path(__file__).parents[1]

# Guard -----------------------------------------------------------------------------------------

STAND_IN = """
import contextlib
import pytest
import tests.guard
from cukit.memory.guard import GuardedMemory
from tests.memory.guard_device import Device, Driver

class StandIn:
    def __init__(self, seed):
        self.device = Device()
        self.memory = GuardedMemory(Driver(), self.device, seed)
        self.active = False

    @contextlib.contextmanager
    def installed(self):
        self.active = True
        yield
        self.active = False

guard = StandIn(1)
tests.guard.gpu_available = lambda: True
tests.guard.guarded_memory = lambda seed: guard

@pytest.fixture(name="guard")
def the_guard():
    return guard

@pytest.fixture
def memory():
    return guard.memory
"""

FIRST = """
import pytest
from tests.memory.guard_device import poke

kept = []

def end_of(slot):
    return slot.allocation.size if slot.allocation.address == slot.address else -1

def test_fine(memory, guard):
    assert guard.active
    memory.free(memory.allocate(100))

def test_writes_past_its_array(memory):
    slot = memory.allocate(100)
    poke(slot, end_of(slot))
    memory.free(slot)

def test_allocates_and_keeps(memory):
    kept.append(memory.allocate(200))

def test_fails_for_another_reason_too(memory):
    slot = memory.allocate(300)
    poke(slot, end_of(slot))
    memory.free(slot)
    assert False, "its own failure"

def test_overwrites_memory_of_another_test(memory):
    poke(kept[0], end_of(kept[0]))

@pytest.mark.unguarded
def test_without(guard):
    assert not guard.active

@pytest.mark.skip
def test_that_is_skipped(): ...
"""

SECOND = """
def test_faults(memory, guard):
    memory.free(memory.allocate(12345))
    guard.device.lost = True

def test_after_the_fault(): ...
"""


@pytest.fixture
def run_suite(tmp_path: Path) -> Any:
    """Run a test file with the guard on a stand-in for the GPU; return the output."""
    (tmp_path / "conftest.py").write_text(STAND_IN)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    unguarded\n")

    def run(code: str, *options: str) -> str:
        (tmp_path / "test_it.py").write_text(code)
        command = [sys.executable, "-m", "pytest", "-p", "tests.guard", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, "-rA", *options, "."],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "CUKIT_DEVICE": "cpu"} | ONLY_NAMED_PLUGINS,
            capture_output=True,
            text=True,
        )
        return done.stdout + done.stderr

    return run


def test_damage_fails_the_test_that_caused_it(run_suite: Any) -> None:
    output = run_suite(FIRST, "--guard-seed", "7")
    assert "guard: on, --guard-seed 7 repeats it" in output
    assert "3 failed, 3 passed, 1 skipped" in output
    written, both, overwritten = re.split(r"\n_{5,} (?=test_\w+ _{5,})", output)[1:]
    allocated = r"1 byte\(s\) changed[^\n]*: {} bytes at 0x\w+, allocated by test_it.py::{}\n"
    assert re.search(allocated.format(100, "test_writes_past_its_array"), written)
    assert re.search(r"test_it.py:\d+ in test_writes_past_its_array", written)
    assert "AssertionError: its own failure" in both
    assert re.search(allocated.format(300, "test_fails_for_another_reason_too"), both)
    assert re.search(allocated.format(200, "test_allocates_and_keeps"), overwritten)
    assert overwritten.startswith("test_overwrites_memory_of_another_test")


def test_a_fault_ends_the_run_in_the_test_that_caused_it(run_suite: Any) -> None:
    output = run_suite(SECOND)
    assert re.search(r"guard: on, --guard-seed \d+ repeats it", output)
    assert "1 failed" in output
    assert "passed" not in output
    assert "the GPU was lost in test_it.py::test_faults" in output
    assert "an illegal memory access was encountered" in output
    assert "12,345 bytes at 0x" in output


def test_the_guard_can_be_switched_off(run_suite: Any) -> None:
    output = run_suite(FIRST, "--guard", "off", "-k", "without or fine")
    assert "guard: off" in output
    assert "1 failed, 1 passed" in output, "one test checks that the guard is active"


# Order -----------------------------------------------------------------------------------------


def test_shuffled_keeps_files_together_and_repeats_itself() -> None:
    items: Any = [
        SimpleNamespace(path=Path(f"{file}.py"), name=f"{file}{i}")
        for file in "abcdef"
        for i in range(9)
    ]
    one, again, other = ([item.name for item in shuffled(items, seed)] for seed in (1, 1, 2))
    assert one == again != other
    assert sorted(one) == sorted(other) == [item.name for item in items]
    assert one != [item.name for item in items]
    files = [name[0] for name in one]
    assert len([1 for a, b in pairwise(files) if a != b]) == 5
    assert len({tuple(name[1] for name in one if name[0] == file) for file in "abcdef"}) == 6


# Sanitizers ------------------------------------------------------------------------------------


def test_every_family_of_kernels_has_groups() -> None:
    from cukit.registry import ops

    families = {name.split()[0] for name in sanitize.groups()}
    assert families == set(sanitize.FAMILIES)
    assert {op.family for op in ops() if op.has_kernel} <= families
    quick = {name.split()[0] for name, group in sanitize.groups().items() if group.quick}
    assert quick == families
    assert any(group.shares for group in sanitize.groups().values())


def test_racecheck_runs_marked_groups_unless_it_is_the_only_tool() -> None:
    chosen = {"a": Group(int, shares=True), "b": Group(int)}
    both = jobs(["memcheck", "racecheck"], chosen)
    assert both == [("memcheck", "a"), ("memcheck", "b"), ("racecheck", "a")]
    assert jobs(["racecheck"], chosen) == [("racecheck", "a"), ("racecheck", "b")]


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors", "0"),
        ("hm\n========= ERROR SUMMARY: 1 error\n", "1"),
        ("ERROR SUMMARY: 65472 errors\nERROR SUMMARY: 65372 errors were not printed", "65472"),
        ("RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", "0"),
        ("RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)", "2 (1 error, 1 warning)"),
        ("Traceback\nValueError: no\n", "Traceback ValueError: no"),
    ],
)
def test_findings_are_parsed(text: str, errors: str) -> None:
    assert errors_of(text) == errors


@pytest.mark.parametrize(
    ("tool", "status", "errors", "clean"),
    [
        ("memcheck", 0, "0", True),
        ("memcheck", 1, "3", False),
        ("memcheck", 0, "3", False),
        ("memcheck", 139, "0", False),
        ("memcheck", 0, "output in an unknown format", False),
        (WARM_UP, 0, "", True),
        (WARM_UP, 1, "an error", False),
    ],
)
def test_a_finding_is_shown_and_classified(capsys: Any, tool, status, errors, clean) -> None:
    assert show(Finding(tool, "layers norms", status, errors, 3.2)) is clean
    line = capsys.readouterr().out
    assert line.startswith(f"{tool:10} layers norms")
    assert ("exit status" in line) is not clean


@pytest.mark.parametrize("broken", [False, True])
def test_the_whole_run(monkeypatch, capsys, tmp_path: Path, broken: bool) -> None:
    """Groups first run without a tool; the exit status reports findings."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        bad = broken and "initcheck" in command and command[-1] == "layers rope"
        text = f"========= ERROR SUMMARY: {int(bad)} errors"
        return SimpleNamespace(stdout=text, stderr="", returncode=int(bad))

    monkeypatch.setattr(sanitize.subprocess, "run", run)
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: "/bin/sanitizer")
    asked = ["sanitize", "--group", "layers", "--logs", str(tmp_path / "logs"), "--jobs", "1"]
    monkeypatch.setattr(sys, "argv", asked)
    assert sanitize.main() == int(broken)
    output = capsys.readouterr().out
    first, checked = commands[: len(GROUPS)], commands[len(GROUPS) :]
    assert all(command[0] == sys.executable for command in first)
    assert all(command[0] == "/bin/sanitizer" for command in checked)
    assert all("--report-api-errors" in command for command in checked)
    for command in checked:
        assert ("--kernel-name-exclude" in command) == ("initcheck" in command)
    assert f"{len(checked) - broken} of {len(checked)} clean" in output
    assert len(list((tmp_path / "logs").iterdir())) == len(commands)
