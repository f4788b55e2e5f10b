"""Contents of uninitialised memory."""

from __future__ import annotations

from typing import Any

import numpy as np


def poison(array: np.ndarray[Any, Any]) -> None:
    """Sets all bits of a new array, NaN in every float format, so that unwritten elements stand
    out. Arrays of objects are left unchanged."""
    if not array.dtype.hasobject:
        np.asarray(array).ravel(order="K").view(np.uint8).fill(0xFF)
