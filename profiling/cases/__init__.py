"""Benchmark cases, one module a family. `profiling.case` shows how to add one."""
