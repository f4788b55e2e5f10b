"""Token embedding: look-up of table rows by id, and the gradient of the table."""

from __future__ import annotations

from typing import Any

from cukit.reference._xp import array_namespace, check_range, working_dtype

Array = Any


def embedding(ids: Array, weight: Array) -> Array:
    """`weight[ids]`: ids integer `[...]`, weight `[num_embeddings, hidden]` -> `[..., hidden]`."""
    check_range("embedding", "ids", ids, weight.shape[0])
    return array_namespace(weight).take(weight, ids, axis=0)


def embedding_backward(
    grad_out: Array, ids: Array, num_embeddings: int, *, dtype: Any = None
) -> Array:
    """Sums of the rows of `grad_out` per id: `[num_embeddings, hidden]`.

    Rows are sorted by id (stable) and summed per run of equal ids.
    """
    xp = array_namespace(grad_out)
    hidden = grad_out.shape[-1]
    grad_weight = xp.zeros((num_embeddings, hidden), grad_out.dtype if dtype is None else dtype)
    flat_ids = ids.reshape(-1)
    check_range("embedding_backward", "ids", flat_ids, num_embeddings)
    if flat_ids.size == 0 or hidden == 0:
        return grad_weight
    order = xp.argsort(flat_ids, kind="stable")
    sorted_ids = flat_ids[order]
    is_start = xp.ones(sorted_ids.shape, bool)
    is_start[1:] = sorted_ids[1:] != sorted_ids[:-1]
    starts = xp.flatnonzero(is_start)
    # CuPy's reduceat subtracts prefix sums: in float32, the differences would be inaccurate.
    wide = working_dtype(grad_out) if xp.__name__ == "numpy" else xp.float64
    rows = grad_out.reshape(-1, hidden)[order].astype(wide, copy=False)
    grad_weight[sorted_ids[starts]] = xp.add.reduceat(rows, starts, axis=0)
    return grad_weight
