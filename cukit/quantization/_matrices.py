"""The kernels' view of an array with one scale per block: [num_matrices, rows, cols]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cukit.core.arrays import Array, address_of
from cukit.core.narrow_dtype import NarrowDtype
from cukit.core.parameters import parameter_structs

_BLOCKED = "BlockedMatrices"
PARAMETERS = "quantization/parameters.cuh"


class Matrices(NamedTuple):
    """An array as [num_matrices, rows, cols], with blocks of [block_rows, block_cols]."""

    num_matrices: int
    rows: int
    cols: int
    block_rows: int
    block_cols: int

    @property
    def blocks_down(self) -> int:
        """Blocks along the rows axis of a matrix."""
        return -(-self.rows // self.block_rows)

    @property
    def blocks_across(self) -> int:
        """Blocks along the columns axis of a matrix."""
        return -(-self.cols // self.block_cols)

    @property
    def num_blocks(self) -> int:
        """Blocks of all matrices."""
        return self.num_matrices * self.blocks_down * self.blocks_across

    @property
    def size(self) -> int:
        """Values of all matrices."""
        return self.num_matrices * self.rows * self.cols

    def pack(
        self, dtype: NarrowDtype, scale_strides: tuple[int, int, int]
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
        """The kernels' parameters. scale_strides: as returned by :func:`scale_strides`."""
        matrix, down, across = scale_strides
        return parameter_structs(PARAMETERS)[_BLOCKED].pack(
            num_matrices=self.num_matrices, rows=self.rows, cols=self.cols,
            storage_cols=dtype.storage_shape((self.cols,))[0],
            block_rows=self.block_rows, block_cols=self.block_cols,
            blocks_down=self.blocks_down, blocks_across=self.blocks_across,
            num_blocks=self.num_blocks, scale_matrix=matrix, scale_down=down, scale_across=across,
        )  # fmt: skip


def matrices_of(shape: Sequence[int], block: Sequence[int]) -> Matrices | None:
    """The matrices of an array of `shape`, without empty axes, that has a scale for each `block`.

    Blocks may extend along the last axis, along the last two, or along the last axis and all of the
    leading ones. Returns None for other blocks.
    """
    shape, block = list(shape), list(block)
    # [tokens, heads, channels] with blocks along tokens is [tokens, heads * channels] with blocks
    # along its rows. Rows of codes may be joined only if no row ends within a byte.
    while len(shape) > 2 and block[-1] == block[-2] == 1 and shape[-1] % 2 == 0:
        shape[-2:], block[-2:] = [shape[-2] * shape[-1]], [1]
    *leading, cols = shape
    *leading_block, block_cols = block
    block_cols = min(block_cols, cols)
    if all(size == 1 for size in leading_block):
        return Matrices(1, math.prod(leading), cols, 1, block_cols)
    if all(size >= n for size, n in zip(leading_block, leading, strict=True)):
        rows = math.prod(leading)
        return Matrices(1, rows, cols, rows, block_cols)
    if any(size != 1 for size in leading_block[:-1]):
        return None
    return Matrices(
        math.prod(leading[:-1]), leading[-1], cols, min(leading_block[-1], leading[-1]), block_cols
    )


def scale_strides(matrices: Matrices, factors: Array) -> tuple[int, int, int] | None:
    """Strides in elements of scales or zero points: between matrices, block rows and block columns.

    None if the leading axes do not collapse into one stride.
    """
    shape = (matrices.num_matrices, matrices.blocks_down, matrices.blocks_across)
    view = factors.reshape(shape)
    if address_of(view) != address_of(factors):
        return None
    matrix, down, across = (stride // factors.itemsize for stride in view.strides)
    return matrix, down, across
