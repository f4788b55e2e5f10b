"""The quick run covers every parameter value with few cases; the slow run has all others."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.quick_run import cover, pytest_report_header

ROOT = Path(__file__).parents[1]

ONLY_NAMED_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Other plugins would import cukit and hypothesis, which takes longer than the tests."""

SUITE = """
import pytest
from tests.quick_run import emulated, possible

KERNELS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("emulator", "gpu")]
place = pytest.mark.parametrize("device", ["cpu", *KERNELS])

@place
@pytest.mark.parametrize("dtype", ["half", "single"])
@pytest.mark.parametrize("shape", [(1, 3), (5, 7), (70000, 1)])
@pytest.mark.parametrize(("bias", "mask"), [(0, 1), (1, 0), (1, 1)])
@emulated(lambda dtype: dtype == "half")
@possible(lambda bias, shape: bias or shape != (1, 3))
def test_grid(device, dtype, shape, bias, mask):
    pass

@place
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_marked(device, size):
    pass

@place
def test_third(device):
    pass

@place
def test_fourth(device):
    pass

@place
def test_fifth(device):
    pass
"""


def outcomes(path: Path, *arguments: str) -> dict[str, str]:
    """Return the outcome of each selected case of SUITE."""
    path.write_text(SUITE)
    plugins = ["-p", "tests.quick_run", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins]
    settings = {
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
        "PYTEST_ADDOPTS": "",
    } | ONLY_NAMED_PLUGINS
    done = subprocess.run(
        [*command, "-c", str(ROOT / "pyproject.toml"), "-v", *arguments, str(path)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    words = (line.split() for line in done.stdout.splitlines() if "::" in line)
    return {name.partition("::")[2]: outcome for name, outcome, *_ in words}


def test_cases_with_every_value_are_quick_and_the_rest_is_slow(tmp_path: Path) -> None:
    everything = outcomes(tmp_path / "test_suite.py")
    quick = outcomes(tmp_path / "test_suite.py", "-m", "not slow")
    slow = outcomes(tmp_path / "test_suite.py", "-m", "slow")
    assert {**quick, **slow} == everything
    assert not quick.keys() & slow.keys()
    assert len(everything) == 3 * 18 + 3 * 2 + 3 * 3

    def grid(of: dict[str, str], device: str) -> set[tuple[str, ...]]:
        """Return the parameters that ran: bias, mask, shape, dtype."""
        names = [name for name, outcome in of.items() if outcome == "PASSED" and "grid" in name]
        cases = (tuple(name.partition("[")[2].rstrip("]").split("-")) for name in names)
        return {each[:-1] for each in cases if each[-1] == device}

    for device, dtypes, shapes in (
        ("cpu", {"half", "single"}, {"shape0", "shape1", "shape2"}),
        ("emulator", {"half"}, {"shape0", "shape1"}),
        ("gpu", {"half", "single"}, {"shape0", "shape1", "shape2"}),
    ):
        ran, whole = grid(quick, device), grid(everything, device)
        assert ran < whole
        pairs = {("0", "1"), ("1", "0"), ("1", "1")}
        if device == "emulator":
            assert len(ran) == 1
        for cases in (whole,) if device == "emulator" else (ran, whole):
            assert {case[:2] for case in cases} == pairs
            assert {case[2] for case in cases} == shapes
            assert {case[3] for case in cases} == dtypes
    assert {name for name in slow if "grid" not in name} == {
        *(f"test_marked[2-{device}]" for device in ("cpu", "emulator", "gpu")),
        "test_fourth[emulator]",
        "test_fifth[emulator]",
    }


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "cases: all"),
        ("gpu", "cases: all"),
        ("not slow and not gpu", "cases: quick"),
        ("slow and gpu", "cases: slow"),
    ],
)
def test_the_report_header_names_the_selection(expression: str, message: str) -> None:
    config = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
    assert pytest_report_header(config).startswith(message)


def test_few_cases_cover_a_grid_and_balance_its_values() -> None:
    axes = [[("size", n) for n in range(6)], [("dtype", n) for n in range(3)], [("bias", 0)]]
    cases = list(itertools.product(*axes))
    chosen = [cases[index] for index in sorted(cover(cases))]
    assert len(chosen) == 6
    assert sorted(case[1][1] for case in chosen) == [0, 0, 1, 1, 2, 2]


@given(st.lists(st.lists(st.integers(0, 12), max_size=5, unique=True), max_size=40))
def test_a_cover_has_every_property_and_no_redundant_case(cases: list[list[int]]) -> None:
    chosen = cover(cases)
    properties = {each for case in cases for each in case}
    assert {each for index in chosen for each in cases[index]} == properties
    assert len(chosen) <= len(properties)
