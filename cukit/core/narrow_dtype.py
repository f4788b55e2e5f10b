"""Element types of quantised arrays: FP8, INT8 and INT4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cukit.errors import ArrayDtypeError

_INT8: np.dtype[Any] = np.dtype(np.int8)
_UINT8: np.dtype[Any] = np.dtype(np.uint8)


@dataclass(frozen=True)
class NarrowDtype:
    """The element type of a QuantizedArray.

    name: `"float8_e4m3"` (finite only: the `fn` variant), `"float8_e5m2"`, `"int8"` or `"int4"`.
    bits: bits per code, a divisor of 8. Codes of fewer than 8 bits are packed along the last axis,
        the first in the lowest bits.
    most: largest magnitude that is representable with both signs (7 for int4, whose range is
        -8 to 7).
    integer: whether codes are two's-complement integers, which may have zero points.
    """

    name: str
    bits: int
    most: float
    integer: bool = False

    @property
    def storage_dtype(self) -> np.dtype[Any]:
        """dtype of the storage: int8 for int8 codes, else uint8."""
        return _INT8 if self.integer and self.bits == 8 else _UINT8

    def storage_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """`shape` with the last extent in bytes, rounded up."""
        return (*shape[:-1], -(-shape[-1] * self.bits // 8))

    def __repr__(self) -> str:
        return f"cukit.{self.name}"


float8_e4m3 = NarrowDtype("float8_e4m3", 8, 448.0)
float8_e5m2 = NarrowDtype("float8_e5m2", 8, 57344.0)
int8 = NarrowDtype("int8", 8, 127.0, integer=True)
int4 = NarrowDtype("int4", 4, 7.0, integer=True)
NARROW_DTYPES = (float8_e4m3, float8_e5m2, int8, int4)


def check_narrow_dtype(op: str, name: str, value: Any) -> None:
    """Raises ArrayDtypeError unless `value` is one of NARROW_DTYPES."""
    if not isinstance(value, NarrowDtype) or value not in NARROW_DTYPES:
        names = ", ".join(each.name for each in NARROW_DTYPES)
        raise ArrayDtypeError(
            f"{op}: {name} must be {names}, got {getattr(value, 'name', repr(value))}"
        )
