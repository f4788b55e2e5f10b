"""Sequence operators: gated linear recurrences, short causal convolutions, scans and sorts."""

from cukit.reference.convolution import ConvGradients
from cukit.reference.sequence import Scan, ScanGradients
from cukit.sequence.causal_conv import causal_conv, causal_conv_backward, causal_conv_step
from cukit.sequence.gated_scan import gated_scan, gated_scan_step
from cukit.sequence.gated_scan_backward import gated_scan_backward
from cukit.sequence.primitives import (
    histogram,
    parallel_scan,
    parallel_sort,
    strided_reduction,
)

__all__ = [
    "ConvGradients",
    "Scan",
    "ScanGradients",
    "causal_conv",
    "causal_conv_backward",
    "causal_conv_step",
    "gated_scan",
    "gated_scan_backward",
    "gated_scan_step",
    "histogram",
    "parallel_scan",
    "parallel_sort",
    "strided_reduction",
]
