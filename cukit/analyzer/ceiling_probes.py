"""Two kernels that reach the peak rates of a GPU: one copies memory, the other multiplies and adds.

Their rates are the ceilings with which other kernels are compared. The time of the multiply-add
kernel depends only on its number of rounds, so it also calibrates timers (analyzer/overhead.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, load_kernel

COPY_LOADS = 2
COPY_SPEC = KernelSpec(
    "analyzer/copy.cu", "copy", (("THREADS", 512), ("LOADS", COPY_LOADS)), threads=512
)
"""512 threads of two loads: the fastest of 87 variants on an H200 (profiling/notes/analyzer.md)."""

FMA_CHAINS = 16
FMA_SPEC = KernelSpec(
    "analyzer/fma_rate.cu", "fma_rate", (("THREADS", 256), ("CHAINS", FMA_CHAINS)), threads=256
)
FMA_STEPS = 8
"""Multiply-adds of each chain in a round."""

WORD_BYTES = 16


def copy_grid(num_bytes: int) -> tuple[int]:
    """The grid that copies `num_bytes`."""
    per_block = COPY_SPEC.threads * COPY_LOADS * WORD_BYTES
    return (-(-num_bytes // per_block),)


def launch_copy(target: Any, source: Any) -> None:
    """Copies `source` to `target`: contiguous, 16-byte aligned, a multiple of 16 bytes long."""
    words = np.int64(source.nbytes // WORD_BYTES)
    load_kernel(COPY_SPEC)(copy_grid(source.nbytes), (source, target, words))


def fma_threads(device: Device) -> int:
    """The number of threads that `device` can hold at once."""
    return device.num_sms * device.max_threads_per_sm


def launch_fma(out: Any, rounds: int) -> float:
    """Runs multiply-adds on every SM; returns the FLOPs of the launch.

    out: float32, one element per thread; its size determines the grid.
    """
    grid = (out.size // FMA_SPEC.threads,)
    arguments = (out, np.float32(0.99), np.float32(0.5), np.int32(rounds))
    load_kernel(FMA_SPEC)(grid, arguments)
    return 2.0 * FMA_STEPS * FMA_CHAINS * rounds * int(out.size)
