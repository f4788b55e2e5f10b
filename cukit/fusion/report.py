"""Tolerances and reports of `cukit.optimize` and `cukit.torch.optimize`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOLERANCES = {"float64": 1e-5, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
"""Largest accepted difference between two outputs, relative to the largest output: covers two
roundings and a different summation order, with a margin. float64 is looser than its precision
because kernels may compute parts in float32."""
WHOLE_TOLERANCE = 4.0
"""Multiplies the tolerance for a whole function or model: errors of replacements add up."""


@dataclass(frozen=True)
class FusionReport:
    """The result of one candidate replacement.

    op: cukit's op. operations: number of operations it replaces. shape: shape of the op's result.
    error: largest difference of the results, divided by the largest result. tolerance: largest
    accepted error. Both are NaN if the op rejected its inputs. before_us, after_us: median times,
    None if not measured. outcome: "fused", "fused for the CUDA graph" (not faster by itself),
    "would fuse", or why the original is kept.
    """

    op: str
    operations: int
    shape: tuple[int, ...]
    error: float
    tolerance: float
    before_us: float | None
    after_us: float | None
    outcome: str


def call_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Splits a sample (a dict, a tuple or list, or one argument) into args and kwargs."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, (tuple, list)):
        return tuple(sample), {}
    return (sample,), {}


def table(rows: Sequence[Sequence[str]], note: str) -> str:
    """The rows in left-aligned columns, then the note, if any."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, note] if note else lines)


def time_cell(microseconds: float | None) -> str:
    """A time in microseconds; "-" if it was not measured."""
    return "-" if microseconds is None else f"{microseconds:.1f}"
