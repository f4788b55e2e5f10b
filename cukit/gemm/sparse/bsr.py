"""Products with block-sparse matrices."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, NamedTuple

from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    adopt,
    bfloat16,
    check_addresses,
    check_array,
    check_same_dtype,
    empty,
    float16,
    namespace,
    runs_kernel,
)
from cukit.core.device import Device, current_device
from cukit.core.kernel import KernelSpec
from cukit.core.overlap import check_overlap
from cukit.core.scalars import check_flag
from cukit.errors import ArrayShapeError, ConfigError
from cukit.gemm.dispatch.matmul import matmul
from cukit.gemm.sparse._bsr_launch import MatmulSm80, MatmulSm90, SampledSm80, SampledSm90
from cukit.gemm.sparse._bsr_plan import (
    SAMPLED_TILINGS,
    SLOTS_SM90,
    TILINGS,
    BsrMatmulConfig,
    BsrSampledConfig,
    Transposed,
    plan_bsr_matmul,
    plan_bsr_sampled,
    prefers_dense,
)
from cukit.gemm.sparse._bsr_schedule import group_rows
from cukit.gemm.sparse.block_sparse import BLOCK_SIZES, BlockPattern, BlockSparseMatrix
from cukit.reference import bsr as reference
from cukit.registry import register

_OP = "bsr_matmul"
_DTYPES = (float16, bfloat16)
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
    """`op(a) @ op(b)` where one operand or the result is block-sparse.

    Sparse times dense and dense times sparse give a dense matrix; dense times dense with a
    `pattern` gives the blocks of the product that are in the pattern. Blocks that are not stored
    are skipped, on the GPU only if they are missing in all block rows of a tile: 64 rows on Hopper
    (128 with blocks of 128), 128 rows otherwise. On Hopper, a sparse operand is expanded to a
    temporary dense matrix if the dense product is estimated to be faster. A linear layer with a
    sparse weight `w` [out, in], and its gradients:

        y = bsr_matmul(x, w, transpose_b=True)
        grad_x = bsr_matmul(grad_y, w)
        grad_w = bsr_matmul(grad_y, x, transpose_a=True, pattern=w)

    Args:
        a: a :class:`BlockSparseMatrix` [m, k], or float16|bfloat16 (float32|float64 on the CPU)
            [..., k], C-contiguous, leading axes flattened to rows. With `transpose_a` [k, m].
        b: a BlockSparseMatrix [k, n], or an array [k, n], C-contiguous. With `transpose_b` [n, k].
            Dtype of `a`.
        transpose_a, transpose_b: multiply by the transpose, without a copy.
        pattern: for two dense operands: a :class:`BlockPattern` [m, n], or a matrix with that
            pattern.
        out: written in place: an array [..., n] ([m, n] with `transpose_a`), or with `pattern` a
            BlockSparseMatrix of that pattern. Must not overlap an operand.

    Returns:
        `out`, or a new array or BlockSparseMatrix. On the GPU the last axes of dense operands and
        results must be multiples of 8, and all arrays 16-byte aligned.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: two sparse operands; a pattern with a sparse operand, or no pattern without.

    Runs on CuPy's current stream. Accumulates in float32; deterministic. For each pattern and shape
    of the dense operands, the first product computes a schedule on the host, copies it to the GPU
    and waits for the copy; this first call cannot be captured in a CUDA graph.

    >>> import numpy as np, cukit as ck
    >>> weight = ck.bsr_from_mask(np.ones((32, 64), np.float32), np.eye(2, 4, dtype=bool), 16)
    >>> ck.bsr_matmul(np.ones((3, 64), np.float32), weight, transpose_b=True)[0, ::16]
    array([16., 16.], dtype=float32)
    """
    check_flag(_OP, "transpose_a", transpose_a)
    check_flag(_OP, "transpose_b", transpose_b)
    sparse = [x for x in (a, b) if isinstance(x, BlockSparseMatrix)]
    if len(sparse) == 2:
        raise ConfigError(f"{_OP}: one of a and b must be dense")
    if sparse and pattern is not None:
        raise ConfigError(f"{_OP}: pattern needs two dense operands")
    if not sparse and pattern is None:
        raise ConfigError(f"{_OP}: two dense operands need a pattern")
    if pattern is not None:
        return _sample(a, b, transpose_a, transpose_b, pattern, out)
    if isinstance(a, BlockSparseMatrix):
        return _multiply(a, b, out, _Roles("a", "b", Transposed(transpose_a, transpose_b, False)))
    # dense @ sparse is computed as the transpose of sparse^T @ dense^T.
    transposed = Transposed(not transpose_b, not transpose_a, True)
    return _multiply(b, a, out, _Roles("b", "a", transposed))


class _Roles(NamedTuple):
    """A product as op(sparse) @ op(dense); `out` may be its transpose."""

    sparse: str
    """Name of the sparse operand."""
    dense: str
    """Name of the dense operand."""
    transposed: Transposed


class _Planned(NamedTuple):
    """A checked call: the shape of its result, and the function that computes it."""

    shape: tuple[int, ...]
    launch: Any


def _multiply(matrix: BlockSparseMatrix, dense: Array, out: Array | None, roles: _Roles) -> Array:
    dense, out = adopt(_OP, dense, out)
    check_overlap(_OP, out, **{roles.sparse: matrix.values, roles.dense: dense})
    if not runs_kernel(_OP, matrix.values, dense, out):
        _check_product(matrix.pattern, matrix.values, dense, out, roles)
        sparse_transposed, dense_transposed, out_transposed = roles.transposed
        if out_transposed:
            a, transpose_a, b, transpose_b = (
                dense,
                not dense_transposed,
                matrix,
                not sparse_transposed,
            )
        else:
            a, transpose_a, b, transpose_b = matrix, sparse_transposed, dense, dense_transposed
        return reference.bsr_matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b, out=out)
    planned = matrix.pattern.launcher(_prepare_product)(matrix.values, dense, out, roles)
    result = empty(dense, planned.shape) if out is None else out
    if result.size:
        planned.launch(matrix.values, dense, result)
    return result


def _prepare_product(
    pattern: BlockPattern, values: Array, dense: Array, out: Array | None, roles: _Roles
) -> _Planned:
    shape = _check_product(pattern, values, dense, out, roles)
    _check_for_kernel(**{roles.dense: dense})
    _check_last_axis("the result", shape)
    m, k = pattern.shape[::-1] if roles.transposed.sparse else pattern.shape
    if not pattern.num_blocks or not dense.size:
        return _Planned(shape, _fill_with_zeros)
    check_addresses(
        _OP, **{f"the values of {roles.sparse}": values, roles.dense: dense, "out": out}
    )
    n = dense.size // k
    block, device = pattern.block_size, current_device()
    config = plan_bsr_matmul(block, m // block, n, dense.dtype.name, roles.transposed, device)
    if config.tiling is not None:
        indptr, entries = pattern.entries(roles.transposed.sparse)
        groups = group_rows(indptr, entries, k // block, config.tiling.slots)
        transposed = roles.transposed.dense
        if prefers_dense(groups.columns.size, block, m, n, k, dense_transposed=transposed):
            return _Planned(shape, partial(_multiply_expanded, pattern, roles.transposed))
    launch = MatmulSm80 if config.tiling is None else MatmulSm90
    return _Planned(shape, launch(config, pattern, m, n, namespace(dense)))


def _multiply_expanded(
    pattern: BlockPattern, transposed: Transposed, values: Array, dense: Array, out: Array
) -> None:
    full = BlockSparseMatrix(values, pattern).to_dense()
    dense, out = (array.reshape(-1, array.shape[-1]) for array in (dense, out))
    if transposed.out:
        flags = {"transpose_a": not transposed.dense, "transpose_b": not transposed.sparse}
        matmul(dense, full, out=out, precision="auto", **flags)
    else:
        flags = {"transpose_a": transposed.sparse, "transpose_b": transposed.dense}
        matmul(full, dense, out=out, precision="auto", **flags)


def _check_product(
    pattern: BlockPattern, values: Array, dense: Array, out: Array | None, roles: _Roles
) -> tuple[int, ...]:
    """Checks the arrays; returns the shape of the result."""
    check_array(_OP, roles.dense, dense, dtypes=FLOAT_DTYPES)
    transposed = roles.transposed
    leading = transposed.out and transposed.dense  # a dense `a` that is not transposed
    if dense.ndim < 2 or (dense.ndim > 2 and not leading):
        raise ArrayShapeError(f"{_OP}: {roles.dense} must have two axes, got shape {dense.shape}")
    check_same_dtype(_OP, **{roles.sparse: values, roles.dense: dense, "out": out})
    m, k = pattern.shape[::-1] if transposed.sparse else pattern.shape
    inner = dense.shape[-1] if transposed.dense else dense.shape[0]
    if inner != k:
        raise ArrayShapeError(
            f"{_OP}: {roles.sparse} of shape {pattern.shape} and {roles.dense} of shape "
            f"{dense.shape} do not match: inner extents {k} and {inner}"
        )
    others = dense.shape[:-1] if transposed.dense else dense.shape[1:]
    shape = (*others, m) if transposed.out else (m, *others)
    if out is not None:
        check_array(_OP, "out", out, shape=shape)
    return shape


def _sample(
    a: Array,
    b: Array,
    transpose_a: bool,
    transpose_b: bool,
    pattern: BlockPattern | BlockSparseMatrix,
    out: Any,
) -> BlockSparseMatrix:
    a, b = adopt(_OP, a, b)
    chosen = pattern.pattern if isinstance(pattern, BlockSparseMatrix) else pattern
    if not isinstance(chosen, BlockPattern):
        raise ConfigError(
            f"{_OP}: pattern must be a BlockPattern or a BlockSparseMatrix, got "
            f"{type(pattern).__name__}"
        )
    if out is not None and (not isinstance(out, BlockSparseMatrix) or out.pattern is not chosen):
        raise ConfigError(f"{_OP}: out must be a BlockSparseMatrix of the pattern")
    values = None if out is None else out.values
    check_overlap(_OP, values, a=a, b=b)
    if not runs_kernel(_OP, a, b, values):
        _check_sampled(chosen, a, b, values, transpose_a, transpose_b)
        values = reference.bsr_matmul(
            a, b, transpose_a=transpose_a, transpose_b=transpose_b, pattern=chosen, out=values
        )
        return BlockSparseMatrix(values, chosen) if out is None else out
    launch = chosen.launcher(_prepare_sampled)(a, b, values, transpose_a, transpose_b)
    result = out
    if result is None:
        size = chosen.block_size
        result = BlockSparseMatrix(empty(a, (chosen.num_blocks, size, size)), chosen)
    if result.values.size:
        launch(a, b, result.values)
    return result


def _prepare_sampled(
    pattern: BlockPattern,
    a: Array,
    b: Array,
    values: Array | None,
    transpose_a: bool,
    transpose_b: bool,
) -> Any:
    k = _check_sampled(pattern, a, b, values, transpose_a, transpose_b)
    _check_for_kernel(a=a, b=b)
    if not k:
        return _fill_with_zeros
    check_addresses(_OP, a=a, b=b, **{"the values of out": values})
    dtype, device = a.dtype.name, current_device()
    block = pattern.block_size
    starts = group_rows(*pattern.entries(False), pattern.grid[1], SLOTS_SM90[block]).starts
    config = plan_bsr_sampled(starts, block, dtype, transpose_a, transpose_b, device)
    launch = SampledSm80 if config.tiling is None else SampledSm90
    return launch(config, pattern, k, namespace(a))


def _check_sampled(
    pattern: BlockPattern,
    a: Array,
    b: Array,
    values: Array | None,
    transpose_a: bool,
    transpose_b: bool,
) -> int:
    """Checks the arrays; returns the inner extent."""
    for name, array in (("a", a), ("b", b)):
        check_array(_OP, name, array, dtypes=FLOAT_DTYPES)
        if array.ndim < 2 or (array.ndim > 2 and (name == "b" or transpose_a)):
            raise ArrayShapeError(f"{_OP}: {name} must have two axes, got shape {array.shape}")
    check_same_dtype(_OP, a=a, b=b, out=values)
    k_a, k_b = a.shape[0 if transpose_a else -1], b.shape[1 if transpose_b else 0]
    m, n = a.size // max(k_a, 1), b.shape[0 if transpose_b else 1]
    if k_a != k_b:
        raise ArrayShapeError(
            f"{_OP}: a of shape {a.shape} (transpose_a={transpose_a}) and b of shape {b.shape} "
            f"(transpose_b={transpose_b}) do not match: inner extents {k_a} and {k_b}"
        )
    if k_a and (m, n) != pattern.shape:
        raise ArrayShapeError(
            f"{_OP}: the product of a and b must have the pattern's shape {pattern.shape}, got "
            f"{(m, n)}"
        )
    return int(k_a)


def _check_for_kernel(**arrays: Array) -> None:
    for name, array in arrays.items():
        check_array(_OP, name, array, dtypes=_DTYPES)
        _check_last_axis(name, array.shape)


def _check_last_axis(name: str, shape: tuple[int, ...]) -> None:
    if shape[-1] % _STRIDE_ELEMENTS:
        raise ArrayShapeError(
            f"{_OP}: the last axis of {name} must be a multiple of {_STRIDE_ELEMENTS} on the GPU, "
            f"got shape {shape}"
        )


def _fill_with_zeros(_a: Array, _b: Array, out: Array) -> None:
    out.fill(0)


def _specs(device: Device) -> list[KernelSpec]:
    """Every tiling on Hopper, every block size elsewhere, with and without transposition, all in
    bfloat16; one variant in float16."""
    hopper = device.arch == "sm_90"
    plain, tiling = Transposed(False, False, False), TILINGS[64][0] if hopper else None
    specs = [BsrMatmulConfig("float16", 64, plain, tiling, hopper).spec()]
    for block, flag in product(BLOCK_SIZES, (False, True)):
        transposed = Transposed(flag, flag, flag)
        specs += [
            BsrMatmulConfig("bfloat16", block, transposed, tiling, hopper and not flag).spec()
            for tiling in (TILINGS[block] if hopper else (None,))
        ]
        specs += [
            BsrSampledConfig("bfloat16", block, flag, not flag, tiling).spec()
            for tiling in (SAMPLED_TILINGS[block] if hopper else (None,))
        ]
    return specs


register(
    name=_OP,
    family="gemm",
    function=bsr_matmul,
    reference=reference.bsr_matmul,
    specs=_specs,
)
