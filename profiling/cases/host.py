"""What one op call costs the host, beside a bare launch of the very same compiled kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cukit.core.compiler import compile_kernel
from cukit.core.device import current_device
from cukit.core.kernel import NULL
from cukit.layers import rms_norm
from cukit.layers.rms_norm import plan_rms_norm
from cukit.reference import norms
from profiling.case import Call, Case, PeerMissing, Workload, itemsize
from profiling.data import array_module, normal

EPS = 1e-6


def cases(small: bool = False) -> list[Case]:
    """One row: the kernel is over at once, and the host is all there is."""
    return [launch_case(1, 1024, "bfloat16")]


def launch_case(tokens: int, hidden: int, dtype: str) -> Case:
    """rms_norm into a given output, into a new one, and as a launch with nothing around it."""

    def build() -> Workload:
        x, weight = normal((tokens, hidden), dtype), normal((hidden,), dtype)
        out = normal((tokens, hidden), dtype)
        return Workload(
            arms={
                "cukit": lambda: partial(rms_norm, x, weight, EPS, out=out),
                "cukit, new output": lambda: partial(rms_norm, x, weight, EPS),
                "cupy.RawKernel": lambda: _bare_launch(x, weight, out),
            },
            expected=partial(norms.rms_norm, x, weight, EPS),
        )

    return Case("host", "rms_norm", f"{tokens}x{hidden}", dtype, build, clock="host")


def _bare_launch(x: Any, weight: Any, out: Any) -> Call:
    """CuPy's own launch: no checks, no plan, arguments at hand."""
    xp = array_module()
    if xp.__name__ != "cupy":
        raise PeerMissing("no GPU to launch on")
    (rows, cols), dtype = x.shape, x.dtype.name
    vec = 16 // itemsize(dtype)
    config = plan_rms_norm(rows, cols, dtype, itemsize(dtype), vec, False, current_device())
    spec = config.spec()
    compiled = compile_kernel(spec, current_device().compile_arch)
    kernel = xp.RawModule(path=str(compiled.path)).get_function(spec.entry)
    scalars = (np.int32(rows), np.int32(cols), np.float32(EPS))
    arguments = (x, NULL, weight, out, NULL, *scalars)

    def call() -> Any:
        kernel((config.num_blocks,), (spec.threads,), arguments)
        return out

    return call
