"""What every reference needs to know of an array: its namespace, and the dtype to compute in."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def array_namespace(x: Any) -> Any:
    """`numpy` or `cupy`, whichever `x` belongs to. CuPy is never imported for this."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(x, cupy.ndarray) else np


def working_dtype(x: Any) -> Any:
    """float64 for float64 input, else float32: what references compute in."""
    return np.float64 if x.dtype == np.float64 else np.float32
