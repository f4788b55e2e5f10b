"""Block-sparse matrices: a pattern of square blocks and the values of the stored blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    Array,
    HostArray,
    adopt,
    check_array,
    float32,
    is_gpu_array,
    namespace,
)
from cukit.core.kernel import launch_plan
from cukit.core.scalars import check_choice, check_integer, check_number, check_shape
from cukit.errors import ArrayError, ArrayShapeError, ConfigError

BLOCK_SIZES = (16, 32, 64, 128)

MaskKind = Literal["random", "banded", "magnitude"]


class TransposedPattern(NamedTuple):
    """The pattern of a transposed matrix."""

    pattern: BlockPattern
    numbers: HostArray
    """int32 [num_blocks]: the index of each of its blocks in the original pattern."""


class BlockPattern:
    """The stored blocks of a matrix, in block compressed sparse row (BSR) form on the host.

    Kernels are planned for a pattern: the first product computes their schedules, which are kept as
    long as the pattern exists. Matrices with the same pattern, such as a weight before and after a
    training step and its gradient, should share one object. Immutable.

    shape: rows and columns in elements, multiples of block_size.
    block_size: 16, 32, 64 or 128.
    indptr: int32 [rows / block_size + 1]: blocks before each block row.
    indices: int32 [num_blocks]: block column of each block, ascending in each block row.
    """

    __slots__ = ("__dict__", "_launchers", "block_size", "indices", "indptr", "shape")

    def __init__(
        self, indptr: Array, indices: Array, shape: tuple[int, int], block_size: int
    ) -> None:
        """indptr, indices: int32|int64; copied, with a synchronisation if they are on the GPU.

        Raises ArrayError or ConfigError for an inconsistent pattern.
        """
        indptr, indices = adopt("BlockPattern", indptr, indices)
        for name, array in (("indptr", indptr), ("indices", indices)):
            check_array("BlockPattern", name, array, dtypes=INDEX_DTYPES, ndim=1, contiguous=False)
        self.shape = _check_shape(shape, block_size)
        self.block_size = block_size
        self.indptr = _index(indptr)
        self.indices = _index(indices)
        self._launchers: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._check()

    @classmethod
    def from_mask(cls, mask: Array, block_size: int) -> BlockPattern:
        """The blocks where `mask`, bool [block rows, block columns], is True."""
        (mask,) = adopt("BlockPattern", mask)
        check_array(
            "BlockPattern", "mask", mask, dtypes=(np.dtype(bool),), ndim=2, contiguous=False
        )
        _check_shape((0, 0), block_size)
        host = mask.get() if is_gpu_array(mask) else mask
        indptr = np.concatenate([[0], np.cumsum(host.sum(axis=1))])
        shape = (host.shape[0] * block_size, host.shape[1] * block_size)
        return cls(indptr, np.ascontiguousarray(np.nonzero(host)[1]), shape, block_size)

    @property
    def grid(self) -> tuple[int, int]:
        """Numbers of block rows and block columns."""
        return self.shape[0] // self.block_size, self.shape[1] // self.block_size

    @property
    def num_blocks(self) -> int:
        """Number of stored blocks."""
        return int(self.indices.size)

    @property
    def density(self) -> float:
        """Fraction of the blocks that are stored; 0 for an empty matrix."""
        blocks = self.grid[0] * self.grid[1]
        return self.num_blocks / blocks if blocks else 0.0

    @property
    def mask(self) -> HostArray:
        """bool [block rows, block columns]."""
        mask = np.zeros(self.grid, bool)
        mask[self.rows, self.indices] = True
        return mask

    @cached_property
    def rows(self) -> HostArray:
        """int32 [num_blocks]: block row of each block."""
        return np.repeat(np.arange(self.grid[0], dtype=np.int32), np.diff(self.indptr))

    @cached_property
    def transposed(self) -> TransposedPattern:
        """The pattern of the transpose; values are not moved."""
        numbers = np.lexsort((self.rows, self.indices)).astype(np.int32)
        counts = np.bincount(self.indices, minlength=self.grid[1])
        indptr = np.concatenate([[0], np.cumsum(counts)])
        pattern = BlockPattern(indptr, self.rows[numbers], self.shape[::-1], self.block_size)
        return TransposedPattern(pattern, numbers)

    def entries(self, transpose: bool) -> tuple[HostArray, HostArray]:
        """`(indptr, entries)` of the pattern or its transpose.

        entries: int32 [num_blocks, 2]: block column, and index of the block among the values.
        """
        if transpose:
            pattern, numbers = self.transposed
        else:
            pattern, numbers = self, np.arange(self.num_blocks, dtype=np.int32)
        return pattern.indptr, np.stack([pattern.indices, numbers], axis=1)

    def launcher(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """`prepare(self, *args)` memoised like a launch plan, as long as the pattern exists."""
        found = self._launchers.get(prepare)
        if found is None:
            found = self._launchers[prepare] = launch_plan(partial(prepare, self))
        return found

    def __repr__(self) -> str:
        return (
            f"BlockPattern(shape={self.shape}, block_size={self.block_size}, "
            f"num_blocks={self.num_blocks}, density={self.density:.3f})"
        )

    def _check(self) -> None:
        rows, columns = self.grid
        if self.indptr.size != rows + 1:
            raise ArrayShapeError(
                f"BlockPattern: indptr of {rows} block rows must have {rows + 1} elements, got "
                f"{self.indptr.size}"
            )
        if self.indptr[0] != 0 or self.indptr[-1] != self.num_blocks:
            raise ArrayError(
                f"BlockPattern: indptr must start at 0 and end at the number of indices, "
                f"{self.num_blocks}, got {self.indptr[0]} and {self.indptr[-1]}"
            )
        counts = np.diff(self.indptr)
        if counts.size and counts.min() < 0:
            row = int(np.argmax(counts < 0))
            raise ArrayError(
                f"BlockPattern: indptr must not decrease, got {self.indptr[row]} followed by "
                f"{self.indptr[row + 1]} at block row {row}"
            )
        if not self.num_blocks:
            return
        if self.indices.min() < 0 or self.indices.max() >= columns:
            raise ArrayError(
                f"BlockPattern: indices must be 0 to {columns - 1}, got {self.indices.min()} to "
                f"{self.indices.max()}"
            )
        falls = (np.diff(self.indices) <= 0) & (np.diff(self.rows) == 0)
        if falls.any():
            at = int(np.argmax(falls))
            raise ArrayError(
                f"BlockPattern: indices of a block row must be strictly ascending, got "
                f"{self.indices[at]} followed by {self.indices[at + 1]} in row {self.rows[at]}"
            )


class BlockSparseMatrix:
    """A matrix that stores only the blocks of a pattern; all other blocks are zero.

    values: float16|bfloat16 (float32|float64 on the CPU) [num_blocks, block_size, block_size],
        C-contiguous: the blocks in the order of `pattern.indices`, each row-major.
    pattern: the :class:`BlockPattern`.

    >>> import numpy as np, cukit as ck
    >>> matrix = ck.BlockSparseMatrix.from_dense(np.eye(64, dtype=np.float32), block_size=16)
    >>> matrix
    BlockSparseMatrix(float32, shape=(64, 64), block_size=16, num_blocks=4, density=0.250)
    >>> np.array_equal(matrix.to_dense(), np.eye(64))
    True
    """

    __slots__ = ("pattern", "values")

    def __init__(self, values: Array, pattern: BlockPattern) -> None:
        """Raises ArrayError if the values do not match the pattern."""
        (values,) = adopt("BlockSparseMatrix", values)
        size = pattern.block_size
        shape = (pattern.num_blocks, size, size)
        check_array("BlockSparseMatrix", "values", values, dtypes=FLOAT_DTYPES, shape=shape)
        self.values: Array = values
        self.pattern = pattern

    @classmethod
    def from_arrays(
        cls, values: Array, indices: Array, indptr: Array, shape: tuple[int, int]
    ) -> BlockSparseMatrix:
        """From the three arrays of the BSR format, as in SciPy; `values` is not copied."""
        (values,) = adopt("BlockSparseMatrix", values)
        if values.ndim != 3 or values.shape[1] != values.shape[2]:
            raise ArrayShapeError(
                f"BlockSparseMatrix: values must be [num_blocks, size, size], got {values.shape}"
            )
        return cls(values, BlockPattern(indptr, indices, shape, values.shape[1]))

    @classmethod
    def from_dense(
        cls,
        dense: Array,
        pattern: BlockPattern | None = None,
        *,
        block_size: int | None = None,
    ) -> BlockSparseMatrix:
        """The blocks of `dense`, [rows, columns], that are in the pattern.

        Without a pattern: the blocks of `block_size` with a nonzero element; for a GPU array,
        finding them synchronises.
        """
        (dense,) = adopt("BlockSparseMatrix", dense)
        check_array("BlockSparseMatrix", "dense", dense, ndim=2, contiguous=False)
        if (pattern is None) == (block_size is None):
            raise ConfigError(
                "BlockSparseMatrix: from_dense needs either a pattern or a block_size"
            )
        if pattern is None:
            assert block_size is not None
            _check_shape(dense.shape, block_size)
            pattern = BlockPattern.from_mask(
                (_blocks(dense, block_size) != 0).any((2, 3)), block_size
            )
        if dense.shape != pattern.shape:
            raise ArrayShapeError(
                f"BlockSparseMatrix: dense must have the pattern's shape {pattern.shape}, got "
                f"{dense.shape}"
            )
        xp = namespace(dense)
        chosen = _as_bits(_blocks(dense, pattern.block_size))[
            xp.asarray(pattern.rows), xp.asarray(pattern.indices)
        ]
        return cls(xp.ascontiguousarray(chosen).view(dense.dtype), pattern)

    def to_dense(self) -> Array:
        """The dense matrix, in the dtype of the values."""
        xp = namespace(self.values)
        dense = xp.zeros(self.shape, self.dtype)
        blocks = _as_bits(_blocks(dense, self.pattern.block_size))
        blocks[xp.asarray(self.pattern.rows), xp.asarray(self.pattern.indices)] = _as_bits(
            self.values
        )
        return dense

    def with_values(self, values: Array) -> BlockSparseMatrix:
        """A matrix of other values with the same pattern, e.g. after a training step."""
        return BlockSparseMatrix(values, self.pattern)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns in elements."""
        return self.pattern.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        dtype: np.dtype[Any] = self.values.dtype
        return dtype

    def __repr__(self) -> str:
        pattern = self.pattern
        return (
            f"BlockSparseMatrix({self.dtype.name}, shape={self.shape}, "
            f"block_size={pattern.block_size}, num_blocks={pattern.num_blocks}, "
            f"density={pattern.density:.3f})"
        )


def bsr_from_mask(dense: Array, mask: Array, block_size: int) -> BlockSparseMatrix:
    """The blocks of `dense` where `mask` is True.

    Args:
        dense: float16|bfloat16|float32|float64 [rows, columns].
        mask: bool [rows / block_size, columns / block_size].
        block_size: 16, 32, 64 or 128.

    Returns:
        A :class:`BlockSparseMatrix` with copied values. Raises ArrayError or ConfigError.

    >>> import numpy as np, cukit as ck
    >>> ck.bsr_from_mask(np.ones((32, 32), np.float16), np.eye(2, dtype=bool), 16).values.shape
    (2, 16, 16)
    """
    return BlockSparseMatrix.from_dense(dense, BlockPattern.from_mask(mask, block_size))


def create_sparse_mask(
    shape: tuple[int, int],
    block_size: int,
    density: float,
    *,
    kind: MaskKind = "random",
    weight: Array | None = None,
    seed: int = 0,
) -> HostArray:
    """A mask of blocks in which a fraction `density` (rounded to whole blocks) is True.

    Args:
        shape: rows and columns of the matrix in elements, multiples of block_size.
        block_size: 16, 32, 64 or 128.
        density: 0 to 1.
        kind: `"random"`: random blocks; `"banded"`: the blocks nearest to the diagonal of the
            matrix; `"magnitude"`: the blocks of `weight` with the largest sums of squares.
        weight: an array of `shape`, for `"magnitude"`. With a GPU array, the call synchronises.
        seed: of the random numbers.

    Returns:
        bool [block rows, block columns], a NumPy array. Ties are broken by row, then by column.
        Raises ArrayError or ConfigError.

    >>> import cukit as ck
    >>> ck.create_sparse_mask((64, 64), 16, 0.25, kind="banded").astype(int)
    array([[1, 0, 0, 0],
           [0, 1, 0, 0],
           [0, 0, 1, 0],
           [0, 0, 0, 1]])
    """
    _check_shape(shape, block_size)
    check_number("create_sparse_mask", "density", density, least=0, most=1)
    check_choice("create_sparse_mask", "kind", kind, ("random", "banded", "magnitude"))
    check_integer("create_sparse_mask", "seed", seed, least=0)
    if (weight is None) == (kind == "magnitude"):
        raise ConfigError(
            "create_sparse_mask: weight is required with kind='magnitude' and invalid otherwise, "
            f"got kind={kind!r} and weight {'missing' if weight is None else 'given'}"
        )
    rows, columns = shape[0] // block_size, shape[1] // block_size
    if kind == "random":
        score = np.random.default_rng(seed).random((rows, columns))
    elif kind == "banded":
        middle_row = (np.arange(rows)[:, None] + 0.5) / max(rows, 1)
        middle_column = (np.arange(columns)[None] + 0.5) / max(columns, 1)
        score = -np.abs(middle_row - middle_column)
    else:
        (weight,) = adopt("create_sparse_mask", weight)
        check_array("create_sparse_mask", "weight", weight, shape=shape, contiguous=False)
        squares = (_blocks(weight, block_size).astype(float32) ** 2).sum((2, 3))
        score = squares.get() if is_gpu_array(squares) else squares
    best = np.argsort(-score.ravel(), kind="stable")[: round(density * rows * columns)]
    mask = np.zeros(rows * columns, bool)
    mask[best] = True
    return mask.reshape(rows, columns)


def _blocks(dense: Array, size: int) -> Array:
    """A view [block rows, block columns, size, size] of a matrix; `size` must divide its axes."""
    rows, columns = dense.shape
    return dense.reshape(rows // size, size, columns // size, size).transpose(0, 2, 1, 3)


def _as_bits(array: Array) -> Array:
    """16-bit arrays viewed as integers, because CuPy cannot index bfloat16 arrays."""
    return array.view(f"u{array.itemsize}") if array.dtype.itemsize == 2 else array


def _index(array: Array) -> HostArray:
    host = array.get() if is_gpu_array(array) else array
    if host.size and host.max() > np.iinfo(np.int32).max:
        raise ArrayError(f"BlockPattern: indices must fit int32, got {host.max()}")
    return np.array(host, np.int32)


def _check_shape(shape: tuple[int, ...], block_size: int) -> tuple[int, int]:
    if not isinstance(block_size, int) or block_size not in BLOCK_SIZES:
        raise ConfigError(
            f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {block_size}"
        )
    shape = check_shape("a block-sparse matrix", shape)
    if len(shape) != 2 or any(extent % block_size for extent in shape):
        raise ArrayShapeError(
            f"a block-sparse matrix with blocks of {block_size} must have two axes, multiples of "
            f"{block_size}, got {shape}"
        )
    return shape[0], shape[1]
