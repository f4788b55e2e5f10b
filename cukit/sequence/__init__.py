"""Operators over sequences: recurrences whose state decays."""

from cukit.reference.sequence import Scan
from cukit.sequence.gated_scan import gated_scan, gated_scan_step
from cukit.sequence.primitives import (
    histogram,
    parallel_scan,
    parallel_sort,
    strided_reduction,
)

__all__ = [
    "Scan",
    "gated_scan",
    "gated_scan_step",
    "histogram",
    "parallel_scan",
    "parallel_sort",
    "strided_reduction",
]
