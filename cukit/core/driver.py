"""Selects the cukit extra (`cuda12`, `cuda13`) that fits the NVIDIA driver of this machine.

    python -I cukit/core/driver.py

prints `cuda12`, `cuda13` or an empty line, and the reason on stderr. It runs before any package is
installed and therefore uses the standard library only. $CUKIT_EXTRA overrides the result ("none"
for no GPU).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

KERNEL_MODULE = Path("/proc/driver/nvidia/version")

# First driver branch that supports each CUDA major version, newest first.
DRIVER_BRANCHES = ((580, 13), (525, 12))

EXTRAS = {12: "cuda12", 13: "cuda13"}


@dataclass(frozen=True)
class Driver:
    """Versions of the NVIDIA driver."""

    version: str | None
    """e.g. "580.159.04"; None if there is no driver."""
    cuda: int | None
    """Newest CUDA major version that it supports."""

    @property
    def extra(self) -> str:
        """The cukit extra for this driver; "" without a driver or if it is too old."""
        return "" if self.cuda is None else EXTRAS.get(min(self.cuda, max(EXTRAS)), "")

    def __str__(self) -> str:
        if self.version is None:
            return "no NVIDIA driver found"
        return f"driver {self.version} supports CUDA {self.cuda or '< 12'}"


def find_driver() -> Driver:
    """Reads the versions from `nvidia-smi`, or from the kernel module without nvidia-smi."""
    try:
        banner = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        banner = ""
    driver = parse_nvidia_smi(banner)
    if driver.version is None and KERNEL_MODULE.is_file():
        driver = parse_kernel_module(KERNEL_MODULE.read_text())
    return driver


def parse_nvidia_smi(banner: str) -> Driver:
    """The versions in the banner of `nvidia-smi`."""
    version = re.search(r"Driver Version:\s*([\d.]+)", banner)
    cuda = re.search(r"CUDA Version:\s*(\d+)\.", banner)
    return Driver(version[1] if version else None, int(cuda[1]) if cuda else None)


def parse_kernel_module(text: str) -> Driver:
    """The version in /proc/driver/nvidia/version, and the CUDA version of its branch."""
    match = re.search(r"NVRM version:.*?\s((\d{3})\.[\d.]+)", text)
    if match is None:
        return Driver(None, None)
    branch = int(match[2])
    return Driver(match[1], next((cuda for low, cuda in DRIVER_BRANCHES if branch >= low), None))


def choose_extra() -> tuple[str, str]:
    """(extra, reason)."""
    if chosen := os.environ.get("CUKIT_EXTRA"):
        return ("" if chosen == "none" else chosen), f"CUKIT_EXTRA={chosen}"
    driver = find_driver()
    return driver.extra, str(driver)


if __name__ == "__main__":
    extra, reason = choose_extra()
    print(f"{reason}: {extra or 'no GPU extra, ops run on NumPy'}", file=sys.stderr)
    print(extra)
