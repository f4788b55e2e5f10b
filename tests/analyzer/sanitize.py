"""Groups for `tests.sanitize`: kernels that measure the GPU."""

from __future__ import annotations

import numpy as np

from cukit.analyzer.access_probe import STRIDES, THREADS, WIDTHS_BYTES, launch
from cukit.analyzer.ceiling_probes import FMA_SPEC, launch_copy, launch_fma
from cukit.analyzer.timing import SPIN
from cukit.core.kernel import load_kernel
from tests.sanitize import Group


def probes() -> None:
    import cupy

    load_kernel(SPIN)((1,), (np.int64(1000),))
    source = cupy.zeros(1 << 20, cupy.uint8)
    launch_copy(cupy.empty_like(source), source)
    launch_fma(cupy.empty(4 * FMA_SPEC.threads, cupy.float32), 2)
    words, sums = cupy.zeros(1 << 18, cupy.float32), cupy.empty(4 * THREADS, cupy.float32)
    for width in WIDTHS_BYTES:
        for stride in STRIDES:
            launch(words, sums, width, stride)


GROUPS = {"probes": Group(probes, quick=True)}
