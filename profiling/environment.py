"""The machine of a run: GPU, versions, clocks, and measured ceilings."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cukit.analyzer.machine import results_environment
from cukit.analyzer.timing import Timer
from cukit.core.device import gpu_available
from profiling.data import array_module, normal

GEMM_SIZE = 4096

NVIDIA_SMI = ("nvidia-smi", "--id=0", "--format=csv,noheader,nounits")

CLOCK_FIELDS = {
    "clocks.sm": "sm_under_load_mhz",
    "clocks.max.sm": "sm_max_mhz",
    "clocks.mem": "memory_mhz",
    "power.limit": "power_limit_w",
}


def describe(timer: Timer) -> dict[str, Any]:
    """Return the environment that is stored with the results, to interpret and reproduce them."""
    environment = results_environment(timer) | {"commit": _commit()}
    return environment | {"clocks": _clocks(_gemm())} if gpu_available() else environment


def _gemm() -> Callable[[], Any]:
    """Return a large bfloat16 matrix product by cuBLAS, to load the GPU."""
    from cukit.gemm import matmul

    a = normal((GEMM_SIZE, GEMM_SIZE), "bfloat16")
    b = normal((GEMM_SIZE, GEMM_SIZE), "bfloat16")
    out = array_module().empty_like(a)
    return lambda: matmul(a, b, out=out)


def _clocks(gemm: Callable[[], Any]) -> dict[str, Any]:
    """Return clocks and power limit, queried while matrix products run on the GPU."""
    command = [*NVIDIA_SMI, f"--query-gpu={','.join(CLOCK_FIELDS)}"]
    try:
        query = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    except OSError:
        return {}
    synchronize = array_module().cuda.Device().synchronize
    while query.poll() is None:
        for _ in range(50):
            gemm()
        synchronize()
    values = query.communicate()[0].strip().split(", ")
    if len(values) != len(CLOCK_FIELDS):
        return {}
    return {name: _number(text) for name, text in zip(CLOCK_FIELDS.values(), values, strict=True)}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _commit() -> str:
    """Return the current commit, with "+" if files are modified; $CUKIT_COMMIT overrides it."""
    if stated := os.environ.get("CUKIT_COMMIT"):
        return stated
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
