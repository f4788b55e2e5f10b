"""Kernels in the styles of public code run unmodified, give the expected results, and cause no
error reports. Their files also contain host code and include headers of CUDA and its libraries."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cukit.emulator.check import source_of
from cukit.emulator.program import Program, as_argument
from cukit.emulator.settings import Settings
from tests.emulator.public_style_cases import FILES, Case, cases

pytestmark = pytest.mark.emulator

SOURCES = Path(__file__).parent / "public_style"
QUICK = ("norms", "asynchronous", "inline_ptx", "programs")

COMPILED_ONLY = {"estimate_pi", "matmul_struct", "setup_states", "uniform_numbers"}
"""Kernels that are compiled but not launched, so they have no case."""

KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(")


@functools.cache
def program(name: str) -> Program:
    instances = sorted({case.entry for case in cases(name) if "<" in case.entry})
    return Program(source_of(SOURCES / f"{name}.cu"), Settings(), instances)


def copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def launch(compiled: Program, case: Case, settings: Settings) -> None:
    for name, value in case.constants.items():
        compiled.variable(name)[:] = value.view(np.uint8)
    kernel = compiled.kernel(case.entry, case.block, case.shared_bytes, case.grid)
    given = [copied(value) for value in case.args]
    args = [as_argument(v, size) for v, size in zip(given, kernel.parameter_bytes, strict=True)]
    kernel.launch(case.grid, tuple(args), settings, compiled.variables())
    for index, expected in case.expected.items():
        got, want = given[index], np.asarray(expected)
        assert got.size == want.size, case.entry
        exact = got.dtype.kind in "iub"
        np.testing.assert_allclose(
            got.astype(np.float64 if not exact else got.dtype).ravel(),
            want.astype(np.float64 if not exact else got.dtype).ravel(),
            rtol=0 if exact else case.rtol,
            atol=0 if exact else case.rtol,
            err_msg=case.entry,
        )


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FILES]
)
def test_public_styles_run_unmodified(name: str) -> None:
    for case in cases(name):
        for seed in (0, 1):
            launch(program(name), case, Settings(seed=seed))


def test_every_kernel_has_a_case() -> None:
    assert {path.stem for path in SOURCES.glob("*.cu")} == set(FILES)
    text = "".join((SOURCES / f"{name}.cu").read_text() for name in FILES)
    declared = set(KERNEL.findall(text))
    entries = {case.entry for name in FILES for case in cases(name)}
    launched = {entry.partition("<")[0].rpartition("::")[2] for entry in entries}
    assert launched == declared - COMPILED_ONLY
