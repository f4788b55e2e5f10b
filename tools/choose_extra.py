"""Prints which extra of cukit fits this machine's NVIDIA driver: cuda12, cuda13 or nothing.

    python tools/choose_extra.py

Asks `nvidia-smi` for the newest CUDA that the driver runs, and the kernel module's version where
there is no nvidia-smi. Runs on the standard library alone, since it decides what to install.
$CUKIT_EXTRA overrides the answer ("none" for no GPU extra). The reason goes to stderr.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

KERNEL_MODULE = Path("/proc/driver/nvidia/version")

# First driver branch that runs each CUDA major version, newest first.
DRIVER_BRANCHES = ((580, 13), (525, 12))

EXTRAS = {12: "cuda12", 13: "cuda13"}


def cuda_of_nvidia_smi(output: str) -> int | None:
    """Major CUDA version in the banner of `nvidia-smi`."""
    match = re.search(r"CUDA Version:\s*(\d+)\.", output)
    return int(match[1]) if match else None


def cuda_of_kernel_module(text: str) -> int | None:
    """Major CUDA version that the driver named in /proc/driver/nvidia/version runs."""
    match = re.search(r"NVRM version:.*?\s(\d{3})\.\d+", text)
    if match is None:
        return None
    branch = int(match[1])
    return next((cuda for first, cuda in DRIVER_BRANCHES if branch >= first), None)


def extra_for(cuda: int) -> str:
    """The extra for a driver that runs CUDA up to major version `cuda`; "" if it is too old."""
    return EXTRAS.get(min(cuda, max(EXTRAS)), "")


def choose() -> tuple[str, str]:
    """(extra, reason)."""
    if chosen := os.environ.get("CUKIT_EXTRA"):
        return ("" if chosen == "none" else chosen), f"CUKIT_EXTRA={chosen}"
    try:
        banner = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        banner = ""
    cuda = cuda_of_nvidia_smi(banner)
    if cuda is None and KERNEL_MODULE.is_file():
        cuda = cuda_of_kernel_module(KERNEL_MODULE.read_text())
    if cuda is None:
        return "", "no NVIDIA driver found: NumPy does the work"
    extra = extra_for(cuda)
    if not extra:
        return "", f"the driver runs CUDA {cuda}, which is older than 12: NumPy does the work"
    return extra, f"the driver runs CUDA {cuda}"


def main() -> None:
    """Print the extra on stdout and the reason on stderr."""
    extra, reason = choose()
    print(f"GPU extra: {extra or 'none'} ({reason})", file=sys.stderr)
    print(extra)


if __name__ == "__main__":
    main()
