"""How kernels that touch every element once split a tensor over blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from cukit.core.compiler import MacroValue
from cukit.core.kernel import KernelSpec

_BYTES_PER_OPERAND = 32
"""What a thread asks of each operand before it uses any of it. More takes registers, and with them
occupancy; one access of 16 bytes, or blocks of 256 threads, are 1 to 5 % slower on an H200."""
_MOST_VECS_PER_THREAD = 8
_MOST_INDEX_32 = 2**32


@dataclass(frozen=True)
class ElementwiseConfig:
    """`threads` threads a block, each `vecs_per_thread` accesses of `vec` elements per operand."""

    threads: int
    vec: int
    vecs_per_thread: int
    index: str
    num_blocks: int

    def spec(self, source: str, entry: str, *defines: tuple[str, MacroValue]) -> KernelSpec:
        """The variant of `entry` that this configuration launches."""
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
    """Blocks of `threads` threads, as many as it takes.

    size: elements of one operand. The last two may be given to try another variant.
    """
    if vecs_per_thread is None:
        vecs_per_thread = min(_MOST_VECS_PER_THREAD, _BYTES_PER_OPERAND // (vec * itemsize))
    num_vecs = -(-size // vec)
    vecs_per_block = threads * vecs_per_thread
    # A gated activation counts the vectors of both halves.
    index = index_type(2 * num_vecs + vecs_per_block)
    return ElementwiseConfig(threads, vec, vecs_per_thread, index, -(-num_vecs // vecs_per_block))


def index_type(bound: int) -> str:
    """The INDEX macro of a kernel whose indices stay below `bound`."""
    return "uint32" if bound <= _MOST_INDEX_32 else "uint64"
