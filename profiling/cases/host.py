"""Host time of an op call, compared with a bare launch of the same compiled kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cukit.attention import PagedAttention, paged_attention
from cukit.core.compiler import compile_kernel
from cukit.core.device import current_device
from cukit.core.kernel import NULL
from cukit.layers import rms_norm
from cukit.layers.rms_norm import plan_rms_norm
from cukit.reference import norms
from cukit.reference import paged_attention as paged_reference
from profiling.case import Call, Case, PeerMissing, Workload, itemsize
from profiling.data import array_module, normal

EPS = 1e-6


def cases(small: bool = False) -> list[Case]:
    """Tiny kernels, so that host time dominates. The cases are the same for `small`."""
    return [launch_case(1, 1024, "bfloat16"), paged_case(4, 32, "bfloat16")]


def launch_case(tokens: int, hidden: int, dtype: str) -> Case:
    """rms_norm with `out`, with a new output, and as a bare launch."""

    def build() -> Workload:
        x, weight = normal((tokens, hidden), dtype), normal((hidden,), dtype)
        out = normal((tokens, hidden), dtype)
        return Workload(
            impls={
                "cukit": lambda: partial(rms_norm, x, weight, EPS, out=out),
                "cukit, new output": lambda: partial(rms_norm, x, weight, EPS),
                "cupy.RawKernel": lambda: _bare_launch(x, weight, out),
            },
            expected=partial(norms.rms_norm, x, weight, EPS),
        )

    return Case("host", "rms_norm", f"{tokens}x{hidden}", dtype, build, clock="host")


def paged_case(batch: int, keys: int, dtype: str) -> Case:
    """Attention of one layer in a decode step: a call, and a run after an earlier plan."""

    def build() -> Workload:
        xp = array_module()
        q = normal((batch, 1, 8, 64), dtype)
        caches = [normal((batch * keys // 16, 16, 2, 64), dtype) for _ in range(2)]
        table = xp.arange(batch * keys // 16, dtype=np.int32).reshape(batch, -1)
        lengths = xp.full(batch, keys, np.int32)
        out = normal(q.shape, dtype)
        arguments = (q, *caches, table, lengths)

        def planned() -> Call:
            steps = PagedAttention(
                caches[:1], caches[1:], num_heads_q=8, max_batch=batch, max_blocks=table.shape[1]
            )
            steps.plan(table, lengths)
            return partial(steps.run, q, out=out)

        return Workload(
            impls={
                "cukit": lambda: partial(paged_attention, *arguments, out=out),
                "cukit, planned": planned,
            },
            expected=partial(paged_reference.paged_attention, *arguments),
        )

    return Case("host", "paged_attention", f"{batch}x{keys}", dtype, build, clock="host")


def _bare_launch(x: Any, weight: Any, out: Any) -> Call:
    """A launch by CuPy of the same compiled kernel: no checks, no plan, prepared arguments."""
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
