"""A stub of the CUPTI trace."""

from __future__ import annotations

from collections.abc import Sequence

from cukit.analyzer.cupti import KernelRecord


class StubTrace:
    """A context manager like KernelTrace, whose `records` are given in advance."""

    def __init__(self, records: Sequence[KernelRecord]) -> None:
        self.records = list(records)

    def __enter__(self) -> StubTrace:
        return self

    def __exit__(self, *exception: object) -> None:
        pass
