"""Launch configurations of elementwise kernels, which read each element once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from cukit.core.compiler import MacroValue
from cukit.core.kernel import KernelSpec

_BYTES_PER_OPERAND = 32
"""Bytes in flight per thread and operand. More bytes take registers and reduce occupancy; one
16-byte access per thread, or blocks of 256 threads, are 1 to 5 % slower on an H200."""
_MAX_VECS_PER_THREAD = 8
_MAX_INDEX_32 = 2**32


@dataclass(frozen=True)
class ElementwiseConfig:
    """`threads` threads per block, each with `vecs_per_thread` accesses of `vec` elements per
    operand."""

    threads: int
    vec: int
    vecs_per_thread: int
    index: str
    num_blocks: int

    def spec(self, source: str, entry: str, *defines: tuple[str, MacroValue]) -> KernelSpec:
        """The kernel variant of `entry` for this configuration."""
        macros = (
            *defines,
            ("THREADS", self.threads),
            ("VEC", self.vec),
            ("VECS_PER_THREAD", self.vecs_per_thread),
            ("INDEX", self.index),
        )
        return KernelSpec(f"layers/{source}.cu", entry, macros, self.threads)


@cache
def plan_elementwise(
    size: int,
    itemsize: int,
    vec: int,
    *,
    threads: int = 128,
    vecs_per_thread: int | None = None,
) -> ElementwiseConfig:
    """The launch configuration for operands of `size` elements.

    threads, vecs_per_thread: for tuning.
    """
    if vecs_per_thread is None:
        vecs_per_thread = min(_MAX_VECS_PER_THREAD, _BYTES_PER_OPERAND // (vec * itemsize))
    num_vecs = -(-size // vec)
    vecs_per_block = threads * vecs_per_thread
    # A gated activation indexes the vectors of both halves.
    index = index_type(2 * num_vecs + vecs_per_block)
    return ElementwiseConfig(threads, vec, vecs_per_thread, index, -(-num_vecs // vecs_per_block))


def index_type(bound: int) -> str:
    """The INDEX macro of a kernel whose indices are below `bound`."""
    return "uint32" if bound <= _MAX_INDEX_32 else "uint64"
