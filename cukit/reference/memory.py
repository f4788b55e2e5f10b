"""Copies within one memory, one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Array = Any


def batched_copy(memory: Array, moves: Iterable[tuple[int, int, int]]) -> Array:
    """`memory[d : d + n] = memory[s : s + n]` for each `(d, s, n)` in turn, in place."""
    for destination, source, size in moves:
        memory[destination : destination + size] = memory[source : source + size].copy()
    return memory
