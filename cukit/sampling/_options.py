"""Sampling options: each is a number for all requests or an array with one value per request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cukit.core.arrays import Array, adopt, check_array, float32, float64, int32, int64
from cukit.core.kernel import NULL
from cukit.core.scalars import check_integer, check_number

FLOATS = (
    "temperature", "top_p", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
ORDER = (
    "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "step",
)  # fmt: skip
"""Order of the kernel's arguments."""
DEFAULTS: Mapping[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": 0,
    "step": 0,
}
"""Values of options that are None."""
_LARGEST = float(np.finfo(np.float32).max)
_MIN_TEMPERATURE = float(np.finfo(np.float32).tiny)
"""Smaller temperatures are treated as 0, because the kernel flushes subnormal numbers."""
_RANGES: Mapping[str, dict[str, float]] = {
    "temperature": {"least": 0, "most": _LARGEST},
    "top_p": {"least": 0, "most": 1},
    "min_p": {"least": 0, "most": 1},
    "repetition_penalty": {"above": 0, "most": _LARGEST},
    "presence_penalty": {"least": -_LARGEST, "most": _LARGEST},
    "frequency_penalty": {"least": -_LARGEST, "most": _LARGEST},
}


class RequestOptions:
    """The options of a call: checks numbers and adopts arrays."""

    def __init__(self, op: str, given: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = {}
        for name, value in given.items():
            self.values[name] = _adopted(op, name, value)

    @property
    def arrays(self) -> list[Array]:
        """The options that are arrays."""
        return [value for value in self.values.values() if hasattr(value, "shape")]

    def check_shapes(self, op: str, batch: int) -> None:
        """Raises ArrayError unless each array has one value per request."""
        for name, value in self.values.items():
            if hasattr(value, "shape"):
                check_array(op, name, value, dtypes=_dtypes(name), shape=(batch,))

    def is_number(self, name: str) -> bool:
        """Whether the option is a number, the same for all requests."""
        return not hasattr(self.values.get(name), "shape")

    def pointers(self) -> list[Array | None]:
        """Kernel arguments: the arrays, NULL for numbers."""
        return [
            value if hasattr(value := self.values.get(name), "shape") else NULL for name in ORDER
        ]

    def number(self, name: str) -> Any:
        """The value of an option; its default if it is an array or None."""
        value = self.values.get(name)
        return DEFAULTS[name] if value is None or hasattr(value, "shape") else value


def _dtypes(name: str) -> tuple[Any, ...]:
    if name in FLOATS:
        return (float32, float64)
    return (int32,) if name == "top_k" else (int64,)


def _adopted(op: str, name: str, value: Any) -> Any:
    if value is None and name not in ("temperature", "seed", "step"):
        return None
    if getattr(value, "ndim", 0) or hasattr(value, "__dlpack__"):
        (value,) = adopt(op, value)
        if value.ndim:
            return value
        value = value.item()
    if name in FLOATS:
        check_number(op, name, value, **_RANGES[name])
        return 0.0 if name == "temperature" and value < _MIN_TEMPERATURE else float(value)
    if name == "top_k":
        check_integer(op, name, value, least=1)
        return min(int(value), 2**31 - 1)
    check_integer(op, name, value, least=-(2**63), most=2**63 - 1)
    return int(value)
