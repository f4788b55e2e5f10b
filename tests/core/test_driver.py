"""The GPU extra is selected by the CUDA version of the driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cukit.core import driver
from cukit.core.driver import Driver, parse_kernel_module, parse_nvidia_smi

BANNER = "| NVIDIA-SMI 580.159.04   Driver Version: 580.159.04   CUDA Version: 13.0     |"
MODULE = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)
"""


def test_reads_the_banner_of_nvidia_smi() -> None:
    assert parse_nvidia_smi(BANNER) == Driver("580.159.04", 13)
    assert parse_nvidia_smi("NVIDIA-SMI has failed") == Driver(None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MODULE, Driver("550.54.15", 12)),
        (MODULE.replace("550.54.15", "580.65.06"), Driver("580.65.06", 13)),
        (MODULE.replace("550.54.15", "470.82.01"), Driver("470.82.01", None)),
        ("", Driver(None, None)),
    ],
)
def test_reads_the_kernel_module(text: str, expected: Driver) -> None:
    assert parse_kernel_module(text) == expected


@pytest.mark.parametrize(
    ("cuda", "extra"), [(None, ""), (11, ""), (12, "cuda12"), (13, "cuda13"), (14, "cuda13")]
)
def test_selects_the_newest_extra_that_the_driver_supports(cuda: int | None, extra: str) -> None:
    assert Driver("1.0", cuda).extra == extra


def test_the_users_choice_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKIT_EXTRA", "cuda12")
    assert driver.choose_extra()[0] == "cuda12"
    monkeypatch.setenv("CUKIT_EXTRA", "none")
    assert driver.choose_extra()[0] == ""


def test_runs_without_installed_packages() -> None:
    """As the Makefile calls it: isolated, without site-packages."""
    answer = subprocess.run(
        [sys.executable, "-I", "-S", driver.__file__],
        env={"CUKIT_EXTRA": "cuda13"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout == "cuda13\n"
    assert "CUKIT_EXTRA=cuda13" in answer.stderr


def test_every_printed_extra_exists() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for extra in driver.EXTRAS.values():
        assert f"\n{extra} = [" in text
