"""Ctrl-C while NVRTC compiles: NVRTC's own handler would end the process with code 4."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

COMPILE = """
import os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from cukit.core.compiler import compile_kernel
from cukit.core.device import typical_device
from cukit.registry import get_op

specs = get_op("flash_attention").specs(typical_device("sm_80"))
compile_kernel(specs[0], "sm_80")  # loads NVRTC
delay, threads = float(sys.argv[1]), int(sys.argv[2])
threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda spec: compile_kernel(spec, "sm_86"), specs[:threads]))
    for spec in specs:
        compile_kernel(spec, "sm_90")
    time.sleep(60)
except KeyboardInterrupt:
    print("KeyboardInterrupt")
"""


@pytest.mark.parametrize(
    ("delay", "threads"),
    [
        (0.2, 1),
        *(pytest.param(delay, threads, marks=pytest.mark.slow)
          for delay in (0.1, 0.4, 3.0) for threads in (1, 4)),
    ],
)  # fmt: skip
def test_keyboard_interrupt_is_raised_when_the_compiler_returns(
    delay: float, threads: int, kernel_cache: Path
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", COMPILE, str(delay), str(threads)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (0, "KeyboardInterrupt\n"), result.stderr
