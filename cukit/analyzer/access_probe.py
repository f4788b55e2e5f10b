"""Measures the bandwidth that strided loads reach on this GPU.

Memory is transferred in sectors of 32 bytes: a thread that loads 4 bytes while its neighbours load
from other sectors causes a transfer of 32. The resulting table gives the bandwidth on this GPU for
each width of accesses and distance between adjacent threads. Advice on a kernel's accesses cites
its rates.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cukit.analyzer.schema import AccessPoint
from cukit.analyzer.timing import Timer, measure
from cukit.core.device import Device, current_device, require_cupy
from cukit.core.kernel import KernelSpec, load_kernel

THREADS = 256
BLOCKS_PER_SM = 8
STRIDES = (1, 2, 4, 8, 16, 32)
WIDTHS_BYTES = (4, 8, 16)
SECTOR_BYTES = 32

SPAN_FACTOR = 8
"""The words are spread over a buffer this many times the size of L2."""


def probe_spec(width_bytes: int) -> KernelSpec:
    """The probe that loads `width_bytes` at a time."""
    defines = (("WORDS", width_bytes // 4), ("THREADS", THREADS))
    return KernelSpec("analyzer/access_probe.cu", "access_probe", defines, THREADS)


def sector_fraction(width_bytes: int, stride: int) -> float:
    """The fraction of the loaded sectors' bytes that threads request."""
    apart = width_bytes * stride
    return width_bytes / min(apart, max(SECTOR_BYTES, width_bytes))


def num_loads(words: Any, width_bytes: int, stride: int) -> int:
    """The number of loads in one launch, each of `width_bytes`."""
    return int(words.size * 4 // width_bytes // stride)


def launch(words: Any, sums: Any, width_bytes: int, stride: int) -> None:
    """Runs the probe over all of `words` [float32].

    sums: float32, one element per thread; its size determines the grid.
    """
    count = num_loads(words, width_bytes, stride)
    grid = (sums.size // THREADS,)
    kernel = load_kernel(probe_spec(width_bytes))
    kernel(grid, (words, sums, np.int64(count), np.int32(stride)))


def probe_accesses(timer: Timer, device: Device | None = None) -> tuple[AccessPoint, ...]:
    """The table for this GPU: every width and stride, in about a second."""
    device = device or current_device()
    cupy = require_cupy("probing memory accesses")
    words = cupy.arange(SPAN_FACTOR * device.l2_bytes // 4, dtype=cupy.float32)
    sums = cupy.empty(device.num_sms * BLOCKS_PER_SM * THREADS, cupy.float32)
    rates: dict[tuple[int, int], float] = {}
    for width in WIDTHS_BYTES:
        calls = {str(stride): partial(launch, words, sums, width, stride) for stride in STRIDES}
        timings = measure(calls, timer, rounds=2, max_samples=10, pause_s=0.01)
        for stride in STRIDES:
            loaded = num_loads(words, width, stride) * width
            rates[width, stride] = loaded / timings[str(stride)].median_us / 1e3
    best = max(rates.values())
    return tuple(
        AccessPoint(width, stride, gbps, gbps / best, sector_fraction(width, stride))
        for (width, stride), gbps in rates.items()
    )
