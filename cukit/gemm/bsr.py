"""Products with block-sparse matrices."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    adopt,
    bfloat16,
    check_array,
    check_same_dtype,
    empty,
    float16,
    namespace,
    runs_kernel,
)
from cukit.core.device import Device, current_device
from cukit.core.kernel import KernelSpec, Launch, load_kernel
from cukit.core.map_cache import TensorMapCache
from cukit.core.tensor_map import encode_tensor_map
from cukit.errors import ArrayShapeError, ConfigError
from cukit.gemm.block_sparse import BlockPattern, BlockSparseMatrix
from cukit.gemm.bsr_plan import (
    TILINGS,
    BsrMatmulConfig,
    BsrSampledConfig,
    choose_sampled_tiling,
    choose_tiling,
    matmul_work,
    sampled_work,
)
from cukit.reference import bsr as reference
from cukit.registry import register

_OP = "bsr_matmul"
_DTYPES = (float16, bfloat16)
_HOPPER = "sm_90"
_STRIDE_ELEMENTS = 8  # rows are multiples of 16 bytes


def bsr_matmul(
    a: Array | BlockSparseMatrix,
    b: Array | BlockSparseMatrix,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    pattern: BlockPattern | BlockSparseMatrix | None = None,
    out: Array | BlockSparseMatrix | None = None,
) -> Array | BlockSparseMatrix:
    """`op(a) @ op(b)` where one of the three matrices is block-sparse.

    Sparse times dense and dense times sparse give a dense matrix; dense times dense with a
    `pattern` gives the blocks of the product that the pattern names. Blocks that are not stored
    take no time. A linear layer with a sparse weight `w` [out, in], and its gradients:

        y = bsr_matmul(x, w, transpose_b=True)
        grad_x = bsr_matmul(grad_y, w)
        grad_w = bsr_matmul(grad_y, x, transpose_a=True, pattern=w)

    Args:
        a: a :class:`BlockSparseMatrix` [m, k], or float16|bfloat16 (float32|float64 on the CPU)
            [..., k], C-contiguous, its leading axes rows. With `transpose_a` [k, m].
        b: a BlockSparseMatrix [k, n], or [k, n], C-contiguous. With `transpose_b` [n, k]. Dtype of
            `a`.
        transpose_a, transpose_b: multiply by the transpose; nothing is copied for it.
        pattern: where both operands are dense: a :class:`BlockPattern` [m, n], or a matrix that has
            one.
        out: written in place: an array [..., n] ([m, n] with `transpose_a`), or with `pattern` a
            BlockSparseMatrix of that pattern. Must not overlap an operand.

    Returns:
        `out`, or a new array or BlockSparseMatrix. On the GPU the last axes of dense operands and
        results must be multiples of 8.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: two sparse operands; a pattern beside a sparse operand, or none without.

    Runs on CuPy's current stream, accumulates in float32, is deterministic. The first product of a
    pattern with dense operands of one shape is planned on the host, and the plan copied to the GPU.

    >>> import numpy as np, cukit as ck
    >>> weight = ck.bsr_from_mask(np.ones((32, 64), np.float32), np.eye(2, 4, dtype=bool), 16)
    >>> ck.bsr_matmul(np.ones((3, 64), np.float32), weight, transpose_b=True)[0, ::16]
    array([16., 16.], dtype=float32)
    """
    sparse = [x for x in (a, b) if isinstance(x, BlockSparseMatrix)]
    if len(sparse) == 2:
        raise ConfigError(f"{_OP}: one of a and b must be dense")
    if sparse and pattern is not None:
        raise ConfigError(f"{_OP}: a pattern is for two dense operands")
    if not sparse and pattern is None:
        raise ConfigError(f"{_OP}: two dense operands need a pattern")
    if pattern is not None:
        return _sample(a, b, transpose_a, transpose_b, pattern, out)
    if isinstance(a, BlockSparseMatrix):
        return _multiply(a, b, out, _Roles("a", "b", transpose_a, transpose_b, False))
    # The transpose of the product is the transposed sparse matrix times the transposed dense one.
    return _multiply(b, a, out, _Roles("b", "a", not transpose_b, not transpose_a, True))


class _Roles(NamedTuple):
    """A product as op(sparse) @ op(dense), of which `out` is the transpose if so said."""

    sparse: str
    """The operand's name."""
    dense: str
    sparse_transposed: bool
    dense_transposed: bool
    out_transposed: bool


def _multiply(
    matrix: BlockSparseMatrix, dense: Array, out: Array | None, roles: _Roles
) -> Array:
    dense, out = adopt(_OP, dense, out)
    if not runs_kernel(_OP, matrix.values, dense, out):
        _check_product(matrix.pattern, matrix.values, dense, out, roles)
        a, b = (dense, matrix) if roles.out_transposed else (matrix, dense)
        transpose_a = roles.sparse_transposed if a is matrix else not roles.dense_transposed
        transpose_b = roles.dense_transposed if a is matrix else not roles.sparse_transposed
        return reference.bsr_matmul(
            a, b, transpose_a=transpose_a, transpose_b=transpose_b, out=out
        )
    planned = matrix.pattern.launcher(_prepare_matmul)(matrix.values, dense, out, roles)
    result = empty(dense, planned.shape) if out is None else out
    if result.size:
        planned.launch(matrix.values, dense, result)
    return result


def _check_product(
    pattern: BlockPattern, values: Array, dense: Array, out: Array | None, roles: _Roles
) -> tuple[int, ...]:
    """Raises an ArrayError where the arrays do not fit; returns the shape of the result."""
    check_array(_OP, roles.dense, dense, dtypes=FLOAT_DTYPES)
    leading = roles.out_transposed and roles.dense_transposed  # a dense `a`, as it is
    if dense.ndim < 2 or (dense.ndim > 2 and not leading):
        raise ArrayShapeError(f"{_OP}: {roles.dense} must have two axes, got shape {dense.shape}")
    check_same_dtype(_OP, **{roles.sparse: values, roles.dense: dense, "out": out})
    m, k = pattern.shape[::-1] if roles.sparse_transposed else pattern.shape
    inner = dense.shape[-1] if roles.dense_transposed else dense.shape[0]
    if inner != k:
        raise ArrayShapeError(
            f"{_OP}: {roles.sparse} of shape {pattern.shape} and {roles.dense} of shape "
            f"{dense.shape} do not match: inner extents {k} and {inner}"
        )
    others = dense.shape[:-1] if roles.dense_transposed else dense.shape[1:]
    shape = (*others, m) if roles.out_transposed else (m, *others)
    if out is not None:
        check_array(_OP, "out", out, shape=shape)
    return shape


class MappedBsrMatmul:
    """A launch of the Hopper kernel for arrays of one description, checked before.

    m, n: rows and columns of op(sparse) @ op(dense). xp: the namespace of its arrays.
    """

    __slots__ = ("_dense", "_entries", "_launch", "_out", "_values", "_work")

    def __init__(
        self, config: BsrMatmulConfig, pattern: BlockPattern, m: int, n: int, xp: Any
    ) -> None:
        tiling = config.tiling
        indptr, entries = pattern.entries(config.sparse_transposed)
        work = matmul_work(indptr, n, tiling, current_device())
        outside = [[pattern.grid[not config.sparse_transposed], pattern.num_blocks]]
        entries = np.concatenate([entries, outside]).astype(np.int32)
        self._entries, self._work = xp.asarray(entries), xp.asarray(work)
        self._launch = Launch(
            load_kernel(config.spec()), (work.shape[1],), (np.int32(m), np.int32(n))
        )
        k_major, mn_major = (tiling.block, tiling.tile_k), (tiling.tile_k, 64)
        self._values = _maps(mn_major if config.sparse_transposed else k_major)
        self._dense = _maps((tiling.width, tiling.tile_k) if config.dense_transposed else mn_major)
        self._out = _maps((64, 64))

    def __call__(self, values: Array, dense: Array, out: Array) -> None:
        self._launch(
            self._values(_rows(values)),
            self._dense(_rows(dense)),
            self._out(_rows(out)),
            self._work,
            self._entries,
        )


class MappedBsrSampled:
    """As MappedBsrMatmul, for the blocks of a dense product; k: its inner extent."""

    __slots__ = ("_a", "_b", "_columns", "_launch", "_values", "_work")

    def __init__(self, config: BsrSampledConfig, pattern: BlockPattern, k: int, xp: Any) -> None:
        tiling = config.tiling
        work = sampled_work(pattern.indptr, k, tiling, current_device())
        self._columns, self._work = xp.asarray(pattern.indices), xp.asarray(work)
        self._launch = Launch(load_kernel(config.spec()), (work.shape[1],))
        k_major, mn_major = (tiling.block, tiling.tile_k), (tiling.tile_k, 64)
        self._a = _maps(mn_major if config.a_transposed else k_major)
        self._b = _maps(k_major if config.b_transposed else mn_major)
        self._values = _maps((64, 64))

    def __call__(self, a: Array, b: Array, values: Array) -> None:
        self._launch(
            self._a(_rows(a)),
            self._b(b),
            self._values(_rows(values)),
            self._work,
            self._columns,
        )


def _maps(box: tuple[int, int]) -> TensorMapCache:
    return TensorMapCache(partial(encode_tensor_map, box=box, swizzle_bytes=2 * box[1]))


def _rows(array: Array) -> Array:
    """All axes but the last flattened: blocks of values lie one below the other."""
    return array if array.ndim == 2 else array.reshape(-1, array.shape[-1])


class _Planned(NamedTuple):
    """A checked call: the shape of its result, and what computes it."""

    shape: tuple[int, ...]
    launch: Any


def _prepare_matmul(
    pattern: BlockPattern, values: Array, dense: Array, out: Array | None, roles: _Roles
) -> _Planned:
    shape = _check_product(pattern, values, dense, out, roles)
    check_array(_OP, roles.dense, dense, dtypes=_DTYPES)
    _check_strides(**{roles.dense: dense.shape, "the result": shape})
    if not pattern.num_blocks:
        return _Planned(shape, _zeros)
    m = pattern.shape[roles.sparse_transposed]
    n = _size(dense) // pattern.shape[not roles.sparse_transposed]
    device = current_device()
    transposed = (roles.sparse_transposed, roles.dense_transposed, roles.out_transposed)
    tiling = choose_tiling(pattern.block_size, m // pattern.block_size, n, device.num_sms)
    config = BsrMatmulConfig(dense.dtype.name, tiling, *transposed)
    return _Planned(shape, MappedBsrMatmul(config, pattern, m, n, namespace(dense)))


def _size(array: Array) -> int:
    size: int = array.size
    return size


def _check_strides(**shapes: tuple[int, ...]) -> None:
    for name, shape in shapes.items():
        if shape[-1] % _STRIDE_ELEMENTS:
            raise ArrayShapeError(
                f"{_OP}: the last axis of {name} must be a multiple of {_STRIDE_ELEMENTS} on the "
                f"GPU, got shape {shape}"
            )


def _zeros(values: Array, dense: Array, out: Array) -> None:
    out.fill(0)
