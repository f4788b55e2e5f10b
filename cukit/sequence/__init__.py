"""Operators over sequences: recurrences whose state decays."""

from cukit.reference.sequence import Scan, ScanGradients
from cukit.sequence.gated_scan import gated_scan, gated_scan_step
from cukit.sequence.gated_scan_backward import gated_scan_backward

__all__ = ["Scan", "ScanGradients", "gated_scan", "gated_scan_backward", "gated_scan_step"]
