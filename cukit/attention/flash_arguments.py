"""What the arguments of attention must be, and what of them the kernels take as scalars."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cukit.attention.flash_plan import AttentionProblem
from cukit.attention.flash_tilings import MAX_HEAD_DIM
from cukit.core.arrays import (
    ACCESS_BYTES,
    FLOAT_DTYPES,
    Array,
    address_of,
    bfloat16,
    check_array,
    check_same_dtype,
    float16,
)
from cukit.errors import ArrayLayoutError, ArrayShapeError, ConfigError

ATTENTION_DTYPES = (float16, bfloat16)
"""Element types of the kernels. References take float32 and float64 as well."""

_HEAD_DIM_STEP = 8  # elements in one 16-byte access
_MAX_ROW_STRIDE = (1 << 26) - 1  # offsets of up to 32 rows are 32-bit (TileCopy)
_MAX_MAP_STRIDE = 1 << 40  # bytes


def _check_heads(op: str, q: Array, k: Array, v: Array, scale: float | None) -> None:
    """Shapes and dtypes of the three inputs."""
    check_array(op, "q", q, dtypes=FLOAT_DTYPES, ndim=4, contiguous=False)
    batch, _, num_heads_q, head_dim = q.shape
    check_array(op, "k", k, shape=(batch, None, None, head_dim), contiguous=False)
    check_array(op, "v", v, shape=k.shape, contiguous=False)
    check_same_dtype(op, q=q, k=k, v=v)
    if k.shape[2] == 0 or num_heads_q == 0 or num_heads_q % k.shape[2]:
        raise ArrayShapeError(
            f"{op}: the heads of k (axis 2) must divide those of q, "
            f"got {k.shape[2]} and {num_heads_q}"
        )
    if head_dim == 0:
        raise ArrayShapeError(f"{op}: head_dim (the last axis of q) must not be 0")
    if scale is not None and not (scale > 0 and math.isfinite(scale)):
        raise ConfigError(f"{op}: scale must be positive and finite, got {scale}")


def check_forward(q: Array, k: Array, v: Array, out: Array | None, scale: float | None) -> None:
    """Arguments of the forward, wherever they live."""
    op = "flash_attention"
    _check_heads(op, q, k, v, scale)
    if out is not None:
        check_array(op, "out", out, shape=q.shape, contiguous=False)
        check_same_dtype(op, q=q, out=out)


def check_backward(
    grad_out: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, scale: float | None
) -> None:
    """Arguments of the backward, wherever they live."""
    op = "flash_attention_backward"
    _check_heads(op, q, k, v, scale)
    check_array(op, "grad_out", grad_out, shape=q.shape, contiguous=False)
    check_array(op, "out", out, shape=q.shape, contiguous=False)
    check_same_dtype(op, q=q, grad_out=grad_out, out=out)
    batch, seq_len_q, num_heads_q, _ = q.shape
    check_array(op, "lse", lse, dtypes=_lse_dtypes(q), shape=(batch, num_heads_q, seq_len_q))


def _lse_dtypes(q: Array) -> tuple[np.dtype[Any], ...]:
    return (np.dtype(np.float64 if q.dtype == np.float64 else np.float32),)


def check_kernel_layout(op: str, **arrays: Array | None) -> None:
    """What the kernels ask for beyond the reference: dtype, head_dim, 16-byte access."""
    for name, array in arrays.items():
        if array is None:
            continue
        check_array(op, name, array, dtypes=ATTENTION_DTYPES, contiguous=False)
        head_dim = array.shape[-1]
        if head_dim % _HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM:
            raise ArrayShapeError(
                f"{op}: head_dim (the last axis of {name}) must be a multiple of {_HEAD_DIM_STEP} "
                f"up to {MAX_HEAD_DIM} on the GPU, got {head_dim}"
            )
        strides = [s for s, n in zip(array.strides[:3], array.shape[:3], strict=True) if n > 1]
        if address_of(array) % ACCESS_BYTES or any(stride % ACCESS_BYTES for stride in strides):
            raise ArrayLayoutError(
                f"{op}: the start and the strides of {name} must be multiples of {ACCESS_BYTES} "
                f"bytes on the GPU, got strides {array.strides}; "
                f"pass cupy.ascontiguousarray({name})"
            )
        row_stride = array.strides[1] // array.itemsize
        if array.shape[1] > 1 and abs(row_stride) > _MAX_ROW_STRIDE:
            raise ArrayLayoutError(
                f"{op}: neighbouring positions (axis 1) of {name} must lie within "
                f"{_MAX_ROW_STRIDE} elements on the GPU, got {row_stride}"
            )


def fits_tensor_maps(*arrays: Array) -> bool:
    """Whether the copy engine can walk the arrays: every axis forwards."""
    return all(
        0 < stride < _MAX_MAP_STRIDE
        for array in arrays
        for stride, extent in zip(array.strides[:3], array.shape[:3], strict=True)
        if extent > 1
    )


def problem_of(q: Array, k: Array, causal: bool) -> AttentionProblem:
    batch, seq_len_q, num_heads_q, head_dim = q.shape
    return AttentionProblem(
        batch, seq_len_q, k.shape[1], num_heads_q, k.shape[2], head_dim, q.dtype.name, causal
    )


def strides_of(array: Array | None, like: Array) -> tuple[np.int64, np.int64, np.int64]:
    """Batch, row and head strides in elements; those of a C-contiguous array shaped as `like`
    where `array` is None."""
    if array is None:
        _, rows, heads, head_dim = like.shape
        return np.int64(rows * heads * head_dim), np.int64(heads * head_dim), np.int64(head_dim)
    batch, row, head = (stride // array.itemsize for stride in array.strides[:3])
    return np.int64(batch), np.int64(row), np.int64(head)


def scales_of(q: Array, scale: float | None) -> tuple[np.float32, np.float32]:
    """The factor of the scores, and the same for powers of two."""
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    return np.float32(factor), np.float32(factor / math.log(2.0))
