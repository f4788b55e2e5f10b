"""Operands of a product in a coarser dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cukit.core.arrays import Array, bfloat16
from cukit.core.narrow_dtype import float8_e4m3
from cukit.quantization import quantize

NARROWING: Mapping[str, Callable[[Array], Any]] = {
    "bfloat16": lambda x: x.astype(bfloat16),
    float8_e4m3.name: lambda x: quantize(x, float8_e4m3),
}
"""From an operand to what is multiplied, by the arithmetic's name: an array, or for float8 a
QuantizedArray with a scale for each row."""
