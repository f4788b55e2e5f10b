"""A pytest plugin: `pytest --cukit-emulate` runs a CuPy project's tests without a GPU.

The kernels that the project passes to CuPy are compiled for the CPU, and every access is checked
(`cukit.emulate_cupy`). An error in a kernel fails the test that launched it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("cukit", "CUDA kernels on the CPU")
    group.addoption(
        "--cukit-emulate",
        action="store_true",
        help="run CuPy's kernels in cukit's emulator, without a GPU, with every access checked",
    )
    group.addoption(
        "--cukit-seed",
        type=int,
        default=0,
        help="0: run threads in order; any other number: another order",
    )
    group.addoption("--cukit-arch", default="sm_90", help="the GPU architecture to emulate")
    group.addoption(
        "--cukit-global-races",
        action="store_true",
        help="detect races in global memory too; slower",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Installs the stand-in before any test module runs `from cupy import RawKernel`."""
    if config.getoption("--cukit-emulate"):
        from cukit.emulator.cupy_stand_in import emulate_cupy

        options: dict[str, Any] = {
            "seed": config.getoption("--cukit-seed"),
            "arch": config.getoption("--cukit-arch"),
        }
        if config.getoption("--cukit-global-races"):
            options["global_races"] = True
        emulation = contextlib.ExitStack()
        emulation.enter_context(emulate_cupy(**options))
        config.add_cleanup(emulation.close)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Reports that kernels are emulated."""
    if not config.getoption("--cukit-emulate"):
        return None
    return f"cukit: CuPy's kernels are emulated, as {config.getoption('--cukit-arch')}"
