"""An array and its blocks as the kernels see them: matrices [num_matrices, rows, cols]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cukit.core.arrays import Array, address_of
from cukit.core.narrow_dtype import NarrowDtype
from cukit.core.parameters import parameter_structs
from cukit.errors import ConfigError

_BLOCKED = "BlockedMatrices"
PARAMETERS = "quantization/parameters.cuh"


class Matrices(NamedTuple):
    """An array [..., cols] in blocks of [block_rows, block_cols] of the last two of three axes."""

    num_matrices: int
    rows: int
    cols: int
    block_rows: int
    block_cols: int

    @property
    def blocks_down(self) -> int:
        """Blocks of a matrix along its rows."""
        return -(-self.rows // self.block_rows)

    @property
    def blocks_across(self) -> int:
        """Blocks of a matrix along its columns."""
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
        self, dtype: NarrowDtype, scale_strides: tuple[int, int, int], padding: int = 0
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
        """The kernels' argument. scale_strides: elements from a matrix, row, column to the next."""
        matrix, down, across = scale_strides
        return parameter_structs(PARAMETERS)[_BLOCKED].pack(
            num_matrices=self.num_matrices, rows=self.rows, cols=self.cols,
            storage_cols=dtype.storage_shape((self.cols,))[0],
            block_rows=self.block_rows, block_cols=self.block_cols,
            blocks_down=self.blocks_down, blocks_across=self.blocks_across,
            num_blocks=self.num_blocks, scale_matrix=matrix, scale_down=down, scale_across=across,
            padding=padding,
        )  # fmt: skip


def matrices_of(op: str, shape: Sequence[int], block: Sequence[int]) -> Matrices:
    """The array of `shape`, none of whose extents is 0, with a scale for each `block`.

    Blocks may span the last axis, the second last, and all axes before where they span the second
    last as a whole too. Raises ConfigError for others.
    """
    *leading, cols = shape
    *leading_block, block_cols = block
    if all(size == 1 for size in leading_block):
        return Matrices(1, math.prod(leading), cols, 1, block_cols)
    whole = [min(size, n) == n for size, n in zip(leading_block, leading, strict=True)]
    if all(whole):
        rows = math.prod(leading)
        return Matrices(1, rows, cols, rows, block_cols)
    if any(size != 1 for size in leading_block[:-1]):
        raise ConfigError(
            f"{op}: axis must name the last axis, the last two or all of them, got blocks of "
            f"{tuple(block)} of shape {tuple(shape)}"
        )
    return Matrices(
        math.prod(leading[:-1]), leading[-1], cols, min(leading_block[-1], leading[-1]), block_cols
    )


def scale_strides(matrices: Matrices, factors: Array) -> tuple[int, int, int] | None:
    """Elements between the factors of neighbouring matrices, rows and columns of blocks.

    None where the axes before do not collapse into one stride.
    """
    shape = (matrices.num_matrices, matrices.blocks_down, matrices.blocks_across)
    view = factors.reshape(shape)
    if address_of(view) != address_of(factors):
        return None
    matrix, down, across = (stride // factors.itemsize for stride in view.strides)
    return matrix, down, across
