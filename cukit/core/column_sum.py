"""Second stage of gradients summed over rows: reduces the partial sums of the thread blocks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cukit.core.arrays import Array, empty
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel

_COLUMNS_PER_BLOCK = 32


def column_sum_spec(dtype: str) -> KernelSpec:
    """The kernel variant whose output has `dtype`."""
    return KernelSpec(
        "common/column_sum.cu", "column_sum", (("DTYPE", dtype), ("THREADS", 512)), threads=512
    )


def column_sum(partial: Array, dtype: npt.DTypeLike) -> Array:
    """Sum over the rows of `partial`, float32 [rows, cols], as `dtype` [cols]."""
    out = empty(partial, partial.shape[1:], dtype)
    _prepare(partial, out)(partial, out)
    return out


@launch_plan
def _prepare(partial: Array, out: Array) -> Launch:
    rows, cols = partial.shape
    kernel = load_kernel(column_sum_spec(out.dtype.name))
    grid = (-(-cols // _COLUMNS_PER_BLOCK),)
    return Launch(kernel, grid, (np.int32(rows), np.int32(cols)))
