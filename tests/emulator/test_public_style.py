"""Kernels in the styles of public code run unmodified, give the expected results, and are not
reported. Fourteen files with host code and CUDA's headers and libraries, each compiled once."""

from __future__ import annotations

import functools
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

FEWEST_KERNELS = 100


@functools.cache
def program(name: str) -> Program:
    instances = sorted({case.entry for case in cases(name) if "<" in case.entry})
    return Program(source_of(SOURCES / f"{name}.cu"), Settings(), instances)


def copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def launch(of: Program, case: Case, settings: Settings) -> None:
    for name, value in case.constants.items():
        of.variable(name)[:] = value.view(np.uint8)
    kernel = of.kernel(case.entry, case.block, case.shared_bytes, case.grid)
    given = [copied(value) for value in case.args]
    args = [as_argument(v, size) for v, size in zip(given, kernel.parameter_bytes, strict=True)]
    kernel.launch(case.grid, tuple(args), settings, of.variables())
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


def test_there_are_enough_planted_bugs() -> None:
    sources = [path.stem for path in SOURCES.glob("*.cu")]
    assert sorted(sources) == sorted(FILES)
    launched = {case.entry for name in FILES for case in cases(name)}
    assert len(launched) >= FEWEST_KERNELS
