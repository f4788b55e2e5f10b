"""Products with block-sparse matrices, computed by dense products."""

from __future__ import annotations

from typing import Any

from cukit.reference._xp import array_namespace, working_dtype
from cukit.reference.gemm import matmul

Array = Any


def bsr_matmul(
    a: Any,
    b: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    pattern: Any = None,
    out: Any = None,
) -> Any:
    """op(a) @ op(b); operands with a method `to_dense` are converted to dense matrices.

    pattern: a pattern, or a matrix that has one; the result is then only the pattern's blocks of
    the product, [num_blocks, size, size].
    """
    left, right = (x.to_dense() if hasattr(x, "to_dense") else x for x in (a, b))
    if pattern is None:
        return matmul(left, right, transpose_a=transpose_a, transpose_b=transpose_b, out=out)
    pattern = getattr(pattern, "pattern", pattern)
    product = matmul(
        left,
        right,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        out_dtype=working_dtype(left, right),
    )
    values = blocks_of(product, pattern).astype(left.dtype, copy=False)
    if out is None:
        return values
    out[...] = values
    return out


def blocks_of(dense: Array, pattern: Any) -> Array:
    """The stored blocks [num_blocks, size, size] of a matrix."""
    xp = array_namespace(dense)
    size = pattern.block_size
    rows, columns = dense.shape
    blocks = dense.reshape(rows // size, size, columns // size, size).transpose(0, 2, 1, 3)
    return xp.ascontiguousarray(blocks[xp.asarray(pattern.rows), xp.asarray(pattern.indices)])
