"""Replaces sequences of array operations in a function with fused kernels."""

from cukit.fusion.optimize import Optimized, optimize
from cukit.fusion.report import FusionReport

__all__ = ["FusionReport", "Optimized", "optimize"]
