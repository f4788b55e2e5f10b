"""Measures and explains kernels: the user's own, CuPy's, and cukit's.

:class:`KernelAnalyzer` for one kernel, :class:`KernelBenchmark` for many implementations of one op,
`cukit.analyzer.report` for what comes out of both.
"""
