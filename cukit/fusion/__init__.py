"""Replaces sequences of array operations in a function with fused kernels."""

from cukit.fusion.optimize import FusionReport, Optimized, optimize

__all__ = ["FusionReport", "Optimized", "optimize"]
