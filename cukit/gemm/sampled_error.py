"""How much a product loses in a coarser arithmetic, from some of its rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cukit.core.arrays import Array, bfloat16, namespace

_ROWS = 8
_COLUMNS = 256


def _tf32(x: Array) -> Array:
    """The 10 bits of mantissa that tensor cores keep: the others are cut off."""
    bits = x.view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32)


_ROUNDINGS: Mapping[str, Callable[[Array], Array]] = {
    "tf32": _tf32,
    "bfloat16": lambda x: x.astype(bfloat16).astype(np.float32),
}


def sampled_error(
    a: Array, b: Array, precision: str, *, transpose_a: bool, transpose_b: bool
) -> float:
    """The largest ||row - exact row|| / ||exact row|| of some rows of `op(a) @ op(b)`.

    a, b: float32, as `matmul` takes them. Eight rows and 256 columns, evenly spread, are multiplied
    in float64, once with the operands rounded as `precision` does. Synchronises with the device.
    NaN where a sampled row is not finite.
    """
    left = a.reshape(-1, a.shape[-1])
    right = b.reshape(-1, b.shape[-1])
    rows = _some((left.T if transpose_a else left), _ROWS)
    columns = _some((right if transpose_b else right.T), _COLUMNS)
    xp: Any = namespace(a)
    rounding = _ROUNDINGS[precision]
    with np.errstate(invalid="ignore", over="ignore"):
        exact = rows.astype(np.float64) @ columns.T.astype(np.float64)
        coarse = rounding(rows).astype(np.float64) @ rounding(columns).T.astype(np.float64)
        lost = xp.sqrt(((coarse - exact) ** 2).sum(axis=1))
        whole = xp.sqrt((exact**2).sum(axis=1))
        ratios = xp.where(lost == 0, 0.0, lost / whole)
    return float(ratios.max()) if ratios.size else 0.0


def _some(matrix: Array, most: int) -> Array:
    """At most so many rows, evenly spread, C-contiguous."""
    count = min(most, matrix.shape[0])
    chosen = np.linspace(0, max(matrix.shape[0] - 1, 0), count).astype(np.int64)
    return namespace(matrix).ascontiguousarray(matrix[chosen])
