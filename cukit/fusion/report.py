"""Helpers for the reports of both `optimize` functions: array functions and PyTorch models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TOLERANCES = {"float64": 1e-5, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
"""Largest accepted difference between two outputs, relative to the largest magnitude in the output:
two roundings, sums in another order, and a margin; float64 may be computed partly in float32."""
WHOLE_TOLERANCE = 4.0
"""Factor for a whole function or model, where the errors of many replacements add up."""


def call_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a sample: a tuple, a dictionary, or one argument."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, (tuple, list)):
        return tuple(sample), {}
    return (sample,), {}


def table(rows: Sequence[Sequence[str]], note: str) -> str:
    """A table with left-aligned columns, followed by `note`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, note] if note else lines)


def time_cell(microseconds: float | None) -> str:
    """A time, or "-" if none was measured (no GPU)."""
    return "-" if microseconds is None else f"{microseconds:.1f}"
