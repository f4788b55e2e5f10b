"""Grouped matrix products: each group of rows is multiplied by its own matrix.

Groups are contiguous, x [rows, k] with `expert_offsets` [groups + 1], or padded to a capacity,
x [groups, capacity, k] with `expert_counts` [groups]. Rows that belong to no group are 0 in the
results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from cukit.reference import activations
from cukit.reference._xp import array_namespace, upcast, working_dtype
from cukit.reference.gemm_8bit import quantized_values, result_dtype

Array = Any


def grouped_gemm(
    x: Array,
    weights: Array,
    expert_offsets: Array | None = None,
    *,
    expert_counts: Array | None = None,
    transpose_weights: bool = False,
) -> Array:
    """`y[r] = weights[g] x[r]` for the rows r of group g; weights [groups, n, k] or, with
    transpose_weights, [groups, k, n]."""
    xp = array_namespace(x)
    wide = working_dtype(x, weights)
    extent = weights.shape[2] if transpose_weights else weights.shape[1]
    y = xp.zeros((*x.shape[:-1], extent), x.dtype)
    for group, rows in _groups(expert_offsets, expert_counts):
        own, matrix = upcast(wide, x[rows], weights[group])
        y[rows] = xp.matmul(own, matrix if transpose_weights else matrix.T)
    return y


def grouped_gemm_backward(
    grad_out: Array,
    x: Array,
    weights: Array,
    expert_offsets: Array | None = None,
    *,
    expert_counts: Array | None = None,
) -> tuple[Array, Array]:
    """Gradients of `grouped_gemm` with respect to `x` and `weights` [groups, n, k]."""
    xp = array_namespace(x)
    groups = {"expert_offsets": expert_offsets, "expert_counts": expert_counts}
    grad_x = grouped_gemm(grad_out, weights, **groups, transpose_weights=True)
    grad_weights = xp.zeros(weights.shape, weights.dtype)
    for group, rows in _groups(**groups):
        grad, own = upcast(working_dtype(x, grad_out), grad_out[rows], x[rows])
        grad_weights[group] = xp.matmul(grad.T, own)
    return grad_x, grad_weights


def grouped_gated_linear(
    x: Array,
    weights: Array,
    expert_offsets: Array | None = None,
    *,
    expert_counts: Array | None = None,
    activation: str = "silu",
) -> Array:
    """`y[r] = f(gate[g] x[r]) * (up[g] x[r])`, weights [groups, 2 n, k]: gate, then up."""
    joined = grouped_gemm(
        x.astype(working_dtype(x), copy=False),
        weights.astype(working_dtype(x), copy=False),
        expert_offsets,
        expert_counts=expert_counts,
    )
    if activation == "silu":
        gated = activations.silu_and_mul(joined)
    else:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        gated = activations.gelu_and_mul(joined, approximate=approximate)
    return gated.astype(x.dtype, copy=False)


def grouped_gemm_fp8(
    x: Any,
    weights: Any,
    expert_offsets: Array | None = None,
    *,
    expert_counts: Array | None = None,
    out_dtype: Any = None,
    out: Array | None = None,
) -> Array:
    """`grouped_gemm` of float8 arrays with block scales, in float64."""
    y = grouped_gemm(
        quantized_values(x), quantized_values(weights), expert_offsets, expert_counts=expert_counts
    )
    y = y.astype(result_dtype(out_dtype) if out is None else out.dtype)
    if out is None:
        return y
    out[...] = y
    return out


def _groups(expert_offsets: Array | None, expert_counts: Array | None) -> Iterator[tuple[int, Any]]:
    """The non-empty groups and their rows."""
    if expert_offsets is not None:
        ends = expert_offsets.tolist()
        for group, (begin, end) in enumerate(itertools.pairwise(ends)):
            if end > begin:
                yield group, slice(begin, end)
        return
    assert expert_counts is not None
    for group, count in enumerate(expert_counts.tolist()):
        if count > 0:  # a count above the capacity is clipped by slicing
            yield group, (group, slice(0, count))
