"""How kernels that touch every element once split a tensor over blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from cukit.core.compiler import MacroValue
from cukit.core.kernel import KernelSpec

_BYTES_PER_THREAD = 64
"""What a thread asks for before it uses any of it: enough requests in flight at full occupancy."""
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
    operands_read: int,
    *,
    threads: int = 256,
    vecs_per_thread: int | None = None,
) -> ElementwiseConfig:
    """Blocks of `threads` threads, as many as it takes.

    size: elements of one operand; operands_read: how many operands of that size the kernel reads.
    The last two may be given to try another variant.
    """
    if vecs_per_thread is None:
        wanted = _BYTES_PER_THREAD // (vec * itemsize * operands_read)
        vecs_per_thread = min(_MOST_VECS_PER_THREAD, max(1, wanted))
    num_vecs = -(-size // vec)
    vecs_per_block = threads * vecs_per_thread
    # A gated activation counts the vectors of both halves.
    index = index_type(2 * num_vecs + vecs_per_block)
    return ElementwiseConfig(threads, vec, vecs_per_thread, index, -(-num_vecs // vecs_per_block))


def index_type(bound: int) -> str:
    """The INDEX macro of a kernel whose indices stay below `bound`."""
    return "uint32" if bound <= _MOST_INDEX_32 else "uint64"
