"""Helpers of the references: array namespace, working dtype, sigmoid, check of indices."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cukit.errors import ArrayError

Array = Any


def array_namespace(array: Array) -> Any:
    """`cupy` for a CuPy array, else `numpy`. Does not import CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(array, cupy.ndarray) else np


def working_dtype(*arrays: Array | None) -> Any:
    """float64 if any argument is float64, else float32."""
    wide = any(array is not None and array.dtype == np.float64 for array in arrays)
    return np.float64 if wide else np.float32


def upcast(dtype: Any, *arrays: Array | None) -> tuple[Any, ...]:
    """The arrays converted to `dtype`; arrays of this dtype are not copied, None stays None."""
    return tuple(None if a is None else a.astype(dtype, copy=False) for a in arrays)


def sigmoid(x: Array) -> Array:
    """The logistic function. If exp(-x) overflows to infinity, the result is correctly 0."""
    with np.errstate(over="ignore"):
        return 1 / (1 + array_namespace(x).exp(-x))


def check_range(op: str, name: str, index: Array, extent: int) -> None:
    """Raises ArrayError for an index outside [0, extent), including negative ones."""
    if index.size and (int(index.min()) < 0 or int(index.max()) >= extent):
        raise ArrayError(
            f"{op}: {name} must be 0 to {extent - 1}, got {int(index.min())} to {int(index.max())}"
        )
