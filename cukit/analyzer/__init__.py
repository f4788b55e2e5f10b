"""Measures and explains kernels: the user's own, CuPy's, and cukit's.

:class:`KernelAnalyzer` for one kernel, :class:`KernelBenchmark` for implementations side by side,
`cukit.analyzer.report` for what comes out of both.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cukit.analyzer.benchmark import KernelBenchmark
    from cukit.analyzer.kernel_analyzer import KernelAnalyzer

__all__ = ["KernelAnalyzer", "KernelBenchmark"]

_HOMES = {"KernelAnalyzer": "kernel_analyzer", "KernelBenchmark": "benchmark"}


def __getattr__(name: str) -> Any:
    # On first use: most commands need one small module of this package and not all of it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
