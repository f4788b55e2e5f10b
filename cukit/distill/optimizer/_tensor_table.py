"""Tables on the GPU for kernels that process many tensors in one launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cukit.core.arrays import ACCESS_BYTES, Array, address_of, namespace
from cukit.core.kernel import KernelSpec

CHUNK = 16384
"""Elements of a tensor per block."""

_MAX_CACHED = 64


@dataclass(frozen=True)
class TensorTable:
    """The tensors' descriptors, and the tensor of each block."""

    tensors: Array
    """int64 [num_tensors, ...]: addresses, number of elements, first block, whether aligned."""
    tensor_of_block: Array
    """int32 [num_blocks]."""

    @property
    def num_blocks(self) -> int:
        return int(self.tensor_of_block.size)


def build_table(arrays: Sequence[tuple[Array, ...]]) -> TensorTable:
    """Builds the table. arrays: per tensor, its arrays (such as parameter, gradient and moments) of
    equal size, in the order of the kernel's descriptor."""
    pointers = np.array([[address_of(array) for array in row] for row in arrays], np.int64)
    size = np.array([row[0].size for row in arrays], np.int64)
    blocks = -(-size // CHUNK)
    first_block = np.cumsum(blocks) - blocks
    aligned = (pointers % ACCESS_BYTES == 0).all(axis=1)
    descriptors = np.column_stack([pointers, size, first_block, aligned]).astype(np.int64)
    tensor_of_block = np.repeat(np.arange(size.size, dtype=np.int32), blocks)
    xp = namespace(arrays[0][0])
    return TensorTable(xp.asarray(descriptors), xp.asarray(tensor_of_block))


class TableCache:
    """The tables of an op, one per kernel variant, cached by the arrays' addresses."""

    def __init__(self) -> None:
        self._tables: dict[Hashable, list[tuple[KernelSpec, TensorTable]]] = {}

    def tables(
        self,
        key: Hashable,
        grouped: Callable[[], Mapping[KernelSpec, Sequence[tuple[Array, ...]]]],
    ) -> list[tuple[KernelSpec, TensorTable]]:
        """The tables of `key`. If `key` is new, `grouped` returns the arrays of each tensor by
        variant, as for :func:`build_table`, after checking them."""
        tables = self._tables.get(key)
        if tables is None:
            tables = [(spec, build_table(rows)) for spec, rows in grouped().items()]
            if len(self._tables) >= _MAX_CACHED:
                self._tables.clear()
            self._tables[key] = tables
        return tables
