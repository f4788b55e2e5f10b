"""Attention over the rows of a memory, which are both keys and values."""

from __future__ import annotations

from typing import Any

from cukit.attention import (
    flash_attention,
    flash_attention_backward,
    merge_attention_states,
)
from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    adopt,
    bfloat16,
    check_array,
    check_same_dtype,
    float16,
    float32,
    float64,
    namespace,
    runs_kernel,
)
from cukit.core.device import Device, current_device
from cukit.core.kernel import KernelSpec
from cukit.core.scalars import check_flag, check_number
from cukit.errors import ArrayShapeError
from cukit.reference import graph_memory as reference
from cukit.registry import get_op, register

_QUERIES = 128
"""Queries per thread block of attention."""
_MIN_ROWS = 512
"""Minimum rows per part of the memory."""


def memory_read(
    queries: Array, memory: Array, *, scale: float | None = None, return_lse: bool = False
) -> Array | tuple[Array, Array]:
    """Reads a memory by attention: `softmax(scale queries memory^T) memory`.

    Args:
        queries: float16|bfloat16 [num_queries, dim]; float32|float64 on the CPU only. On the GPU
            dim must be a multiple of 8, at most 256.
        memory: dtype of queries, [num_rows, dim], C-contiguous, at least one row.
        scale: positive; default 1 / sqrt(dim).
        return_lse: also return the log-sum-exp of the scores, which the backward needs.

    Returns:
        `out`, shape and dtype of queries; with `return_lse`, `(out, lse)`, float32 [num_queries].

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument.
        ConfigError: an option out of range.

    If there are too few queries to fill the GPU, and num_rows is even and at least 1024, parts of
    the memory are read in parallel and the results merged. Runs on CuPy's current stream without
    synchronisation; accumulates in float32, deterministic. Implemented by single-head
    :func:`flash_attention`.

    >>> import numpy as np, cukit as ck
    >>> ck.memory_read(np.zeros((1, 2)), np.array([[1.0, 0.0], [3.0, 4.0]]))
    array([[2., 2.]])
    """
    op = "memory_read"
    queries, memory = adopt(op, queries, memory)
    check_flag(op, "return_lse", return_lse)
    _check(op, queries, memory, scale)
    if not runs_kernel(op, queries, memory):
        return reference.memory_read(queries, memory, scale=scale, return_lse=return_lse)
    check_array(op, "queries", queries, dtypes=(float16, bfloat16))
    num_queries, dim = queries.shape
    parts = plan_parts(num_queries, len(memory), current_device())
    keys = memory.reshape(parts, -1, 1, dim)
    repeated = _repeated(queries, parts)
    out, lse = flash_attention(repeated, keys, keys, scale=scale, return_lse=True)
    while len(out) > 1:
        half = len(out) // 2
        out, lse = merge_attention_states(out[:half], lse[:half], out[half:], lse[half:])
    out = out.reshape(num_queries, dim)
    return (out, lse.reshape(num_queries)) if return_lse else out


def memory_read_backward(
    grad_out: Array,
    queries: Array,
    memory: Array,
    out: Array,
    lse: Array,
    *,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """Gradients of :func:`memory_read` with respect to queries and memory.

    Args:
        grad_out: gradient of `out`, [num_queries, dim].
        queries, memory, scale: as in the forward.
        out, lse: results of the forward with `return_lse`.

    Returns:
        `(grad_queries, grad_memory)`, shapes and dtypes of queries and memory; deterministic.

    Raises:
        ArrayError, ConfigError: as :func:`memory_read`.
    """
    op = "memory_read_backward"
    arrays = adopt(op, grad_out, queries, memory, out, lse)
    grad_out, queries, memory, out, lse = arrays
    _check(op, queries, memory, scale)
    for name, array in (("grad_out", grad_out), ("out", out)):
        check_array(op, name, array, dtypes=FLOAT_DTYPES, shape=queries.shape)
        check_same_dtype(op, queries=queries, **{name: array})
    check_array(op, "lse", lse, dtypes=(float32, float64), shape=(len(queries),))
    if not runs_kernel(op, *arrays):
        return reference.memory_read_backward(*arrays, scale=scale)
    check_array(op, "queries", queries, dtypes=(float16, bfloat16))
    check_array(op, "lse", lse, dtypes=(float32,))
    parts = plan_parts(len(queries), len(memory), current_device())
    keys = memory.reshape(parts, -1, 1, memory.shape[1])
    grad_queries, grad_keys, grad_values = flash_attention_backward(
        _repeated(grad_out, parts),
        _repeated(queries, parts),
        keys,
        keys,
        _repeated(out, parts),
        _repeated(lse, parts).reshape(parts, 1, len(queries)),
        scale=scale,
        deterministic=True,
    )[:3]
    grad_memory = grad_keys.astype(float32) + grad_values.astype(float32)
    if parts > 1:
        grad_queries = grad_queries.astype(float32).sum(axis=0).astype(queries.dtype)
    return (
        grad_queries.reshape(queries.shape),
        grad_memory.astype(memory.dtype).reshape(memory.shape),
    )


def _repeated(array: Array, parts: int) -> Array:
    """`array` repeated for each part of the memory: [parts, num_queries, 1, ...]."""
    xp = namespace(array)
    head = array[None, :, None]
    return head if parts == 1 else xp.ascontiguousarray(xp.repeat(head, parts, axis=0))


def plan_parts(num_queries: int, num_rows: int, device: Device) -> int:
    """Number of equal parts of the memory: 1, or the largest power of two with at most one block
    per SM and at least _MIN_ROWS rows per part."""
    blocks = -(-num_queries // _QUERIES)
    parts = 1
    while (
        blocks * parts * 2 <= device.num_sms
        and num_rows % (parts * 2) == 0
        and num_rows // (parts * 2) >= _MIN_ROWS
    ):
        parts *= 2
    return parts


def _check(op: str, queries: Array, memory: Array, scale: Any) -> None:
    check_array(op, "queries", queries, dtypes=FLOAT_DTYPES, ndim=2)
    check_array(op, "memory", memory, dtypes=FLOAT_DTYPES, shape=(None, queries.shape[1]))
    check_same_dtype(op, queries=queries, memory=memory)
    if 0 in memory.shape:
        raise ArrayShapeError(f"{op}: memory must have rows and columns, got {memory.shape}")
    if scale is not None:
        check_number(op, "scale", scale, above=0)


def _specs(device: Device) -> list[KernelSpec]:
    names = ("flash_attention", "merge_attention_states")
    return list(dict.fromkeys(spec for name in names for spec in get_op(name).specs(device)))


def _backward_specs(device: Device) -> list[KernelSpec]:
    return get_op("flash_attention_backward").specs(device)


register(
    name="memory_read",
    family="graph_memory",
    function=memory_read,
    reference=reference.memory_read,
    specs=_specs,
)
register(
    name="memory_read_backward",
    family="graph_memory",
    function=memory_read_backward,
    reference=reference.memory_read_backward,
    specs=_backward_specs,
)
