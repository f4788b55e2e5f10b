"""Measures and explains kernels: your own, CuPy's and cukit's.

:class:`KernelAnalyzer` analyses one kernel, :class:`KernelBenchmark` compares implementations, and
`cukit.analyzer.report` turns the results of both into reports.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cukit.analyzer.benchmark import KernelBenchmark
    from cukit.analyzer.kernel_analyzer import KernelAnalyzer

__all__ = ["KernelAnalyzer", "KernelBenchmark"]

_MODULES = {"KernelAnalyzer": "kernel_analyzer", "KernelBenchmark": "benchmark"}


def __getattr__(name: str) -> Any:
    # Imported on first use: most commands need only one small module of this package.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
