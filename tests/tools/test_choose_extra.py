"""The GPU extra follows the driver."""

from __future__ import annotations

import pytest

from tools import choose_extra

BANNER = "| NVIDIA-SMI 580.159.04   Driver Version: 580.159.04   CUDA Version: 13.0     |"
MODULE = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)
"""


def test_reads_the_banner_of_nvidia_smi() -> None:
    assert choose_extra.cuda_of_nvidia_smi(BANNER) == 13
    assert choose_extra.cuda_of_nvidia_smi("NVIDIA-SMI has failed") is None


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        (MODULE, 12),
        (MODULE.replace("550.54.15", "580.65.06"), 13),
        (MODULE.replace("550.54.15", "470.82.01"), None),
        ("", None),
    ],
)
def test_reads_the_kernel_module(text: str, cuda: int | None) -> None:
    assert choose_extra.cuda_of_kernel_module(text) == cuda


@pytest.mark.parametrize(
    ("cuda", "extra"), [(11, ""), (12, "cuda12"), (13, "cuda13"), (14, "cuda13")]
)
def test_takes_the_newest_extra_that_the_driver_runs(cuda: int, extra: str) -> None:
    assert choose_extra.extra_for(cuda) == extra


def test_the_user_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKIT_EXTRA", "cuda12")
    assert choose_extra.choose()[0] == "cuda12"
    monkeypatch.setenv("CUKIT_EXTRA", "none")
    assert choose_extra.choose()[0] == ""


def test_every_answer_is_an_extra_of_the_package() -> None:
    from pathlib import Path

    text = Path("pyproject.toml").read_text()
    for extra in choose_extra.EXTRAS.values():
        assert f"\n{extra} = [" in text
