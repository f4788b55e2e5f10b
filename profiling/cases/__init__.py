"""Benchmark cases, one module per family. How to add one: `profiling.case`."""
