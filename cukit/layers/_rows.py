"""How kernels that hold a row in registers split it over the threads of a block."""

from __future__ import annotations

from dataclasses import dataclass

from cukit.errors import ArrayShapeError

_MOST_THREADS = 1024
_MOST_REGISTERS = 32
"""32-bit registers of a thread that may hold its share of one row; more would spill."""


@dataclass(frozen=True)
class RowSplit:
    """`threads` threads, each holding `vecs_per_thread` accesses of `vec` elements."""

    threads: int
    vec: int
    vecs_per_thread: int

    def defines(self) -> tuple[tuple[str, int], ...]:
        """The macros that the row kernels share."""
        return (
            ("THREADS", self.threads),
            ("VEC", self.vec),
            ("VECS_PER_THREAD", self.vecs_per_thread),
        )


def split_row(op: str, cols: int, itemsize: int, vec: int, vecs_per_thread: int = 2) -> RowSplit:
    """A split with about `vecs_per_thread` accesses a thread in flight, more for very long rows.

    cols: row length in elements, a multiple of `vec`. Raises ArrayShapeError where a row does not
    fit the registers of one block.
    """
    num_vecs = max(1, cols // vec)
    threads = -(-num_vecs // vecs_per_thread)
    threads = min(_MOST_THREADS, max(32, -(-threads // 32) * 32))
    per_thread = -(-num_vecs // threads)
    registers = per_thread * max(1, vec * itemsize // 4)
    if registers > _MOST_REGISTERS:
        longest = _MOST_REGISTERS // max(1, vec * itemsize // 4) * vec * _MOST_THREADS
        raise ArrayShapeError(
            f"{op}: the last axis has {cols} elements; with accesses of {vec} elements the kernel "
            f"takes up to {longest}"
        )
    return RowSplit(threads, vec, per_thread)
