"""Fused kernels in functions of arrays."""

from cukit.fusion.optimize import FusionReport, Optimized, optimize

__all__ = ["FusionReport", "Optimized", "optimize"]
