"""Graph memories: retrieval, diffusion, attention reads and gated writes."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukit.errors import ArrayError
from cukit.reference._xp import array_namespace, check_range, working_dtype

Array = Any

_SCORES_AT_ONCE = 1 << 24


class Retrieved(NamedTuple):
    """The best rows of a memory per query, best first.

    scores: float32 (float64 for float64 arguments) [num_queries, k].
    indices: int32 [num_queries, k].
    """

    scores: Array
    indices: Array


class Transition(NamedTuple):
    """A sparse transition matrix in CSR format: T[i, columns[e]] = values[e].

    row_offsets: int32 [num_nodes + 1]; the edges of row i are row_offsets[i] to row_offsets[i + 1].
    columns: int32 [num_edges], 0 to num_nodes - 1.
    values: float32 [num_edges].
    """

    row_offsets: Array
    columns: Array
    values: Array


def retrieve_top_k(queries: Array, memory: Array, k: int) -> Retrieved:
    """The k rows with the largest inner products; ties are ordered by index. NaN counts as
    -infinity."""
    xp = array_namespace(queries)
    dtype = working_dtype(queries, memory)
    table = memory.astype(dtype, copy=False)
    scores = xp.empty((len(queries), k), dtype)
    indices = xp.empty((len(queries), k), xp.int32)
    step = max(1, _SCORES_AT_ONCE // max(len(memory), 1))
    for first in range(0, len(queries), step):
        all_scores = queries[first : first + step].astype(dtype, copy=False) @ table.T
        all_scores = xp.where(xp.isnan(all_scores), -xp.inf, all_scores + 0)
        order = _order(xp, all_scores, k)
        indices[first : first + step] = order
        scores[first : first + step] = xp.take_along_axis(all_scores, order, axis=1)
    return Retrieved(scores if dtype == xp.float64 else scores.astype(xp.float32), indices)


def _order(xp: Any, scores: Array, k: int) -> Array:
    """Indices of the k largest scores, descending; ties are ordered by index."""
    if 4 * k >= scores.shape[1]:
        return xp.argsort(-scores, axis=1, kind="stable")[:, :k]
    rows = []
    bounds = -xp.partition(-scores, k - 1, axis=1)[:, k - 1]
    for row, bound in zip(scores, bounds, strict=True):
        kept = xp.flatnonzero(row >= bound)
        rows.append(kept[xp.argsort(-row[kept], kind="stable")[:k]])
    return xp.stack(rows)


def apply_transition(transition: Transition, z: Array) -> Array:
    """`T z`, accumulated in the order of the edges."""
    xp = array_namespace(z)
    offsets, columns, values = transition
    rows = rows_of_edges(transition)
    out = xp.zeros((len(offsets) - 1, z.shape[1]), z.dtype)
    step = max(1, _SCORES_AT_ONCE // max(z.shape[1], 1))
    for first in range(0, len(columns), step):
        part = slice(first, first + step)
        weighted = values[part, None].astype(z.dtype, copy=False) * z[columns[part]]
        xp.add.at(out, rows[part], weighted)
    return out


def rows_of_edges(transition: Transition) -> Array:
    """The row of each edge, int32 [num_edges]."""
    xp = array_namespace(transition.columns)
    edges = xp.arange(len(transition.columns))
    rows = xp.searchsorted(transition.row_offsets[1:], edges, side="right")
    return rows.astype(xp.int32)


def transpose(transition: Transition) -> Transition:
    """The transposed transition matrix; edges of a row by ascending column."""
    xp = array_namespace(transition.columns)
    offsets, columns, values = transition
    rows = rows_of_edges(transition)
    order = xp.argsort(columns, kind="stable")
    counts = xp.bincount(columns, minlength=len(offsets) - 1)
    ends = xp.zeros(len(offsets), xp.int32)
    ends[1:] = xp.cumsum(counts)
    return Transition(ends, rows[order], values[order])


METHODS = ("pagerank", "heat")


def step_weights(steps: int, restart: float, method: str, time: float) -> tuple[float, ...]:
    """The factor `keep` of each step, `z <- keep T z + (1 - keep) memory` from z = memory.

    heat: Horner's scheme for the series of `exp(time T)` up to T^steps, with every partial sum
    divided by the sum of its weights.
    """
    if method == "pagerank":
        return (1.0 - restart,) * steps
    weights, total = [], 1.0  # total: sum of the series from this term on, divided by this term
    for term in range(steps, 0, -1):
        ratio = time / term * total
        weights.append(ratio / (1.0 + ratio))
        total = 1.0 + ratio
    return tuple(weights)


def graph_diffusion(
    memory: Array,
    transition: Transition,
    *,
    steps: int = 10,
    restart: float = 0.15,
    method: str = "pagerank",
    time: float = 1.0,
) -> Array:
    """`z <- keep T z + (1 - keep) memory` in each step, from z = memory."""
    check_edges("graph_diffusion", transition, len(memory))
    dtype = working_dtype(memory)
    wide = memory.astype(dtype, copy=False)
    z = wide
    for keep in step_weights(steps, restart, method, time):
        z = dtype(keep) * apply_transition(transition, z) + dtype(1 - keep) * wide
    return z.astype(memory.dtype)


def graph_diffusion_backward(
    grad_out: Array,
    memory: Array,
    transition: Transition,
    *,
    transposed: Transition | None = None,
    steps: int = 10,
    restart: float = 0.15,
    method: str = "pagerank",
    time: float = 1.0,
    values: bool = True,
) -> tuple[Array, Array | None]:
    """Gradients of :func:`graph_diffusion` with respect to memory and transition values."""
    check_edges("graph_diffusion_backward", transition, len(memory))
    xp = array_namespace(memory)
    dtype = working_dtype(memory)
    weights = step_weights(steps, restart, method, time)
    wide, grad = memory.astype(dtype, copy=False), grad_out.astype(dtype, copy=False)
    states = [wide]
    for keep in weights[:-1]:
        states.append(
            dtype(keep) * apply_transition(transition, states[-1]) + dtype(1 - keep) * wide
        )
    backwards = transpose(transition)
    rows = rows_of_edges(transition)
    grad_memory = xp.zeros_like(wide)
    grad_values = xp.zeros(len(transition.columns), dtype)
    for keep, state in zip(weights[::-1], states[::-1], strict=False):
        grad_memory += dtype(1 - keep) * grad
        grad_values += dtype(keep) * (grad[rows] * state[transition.columns]).sum(axis=1)
        grad = dtype(keep) * apply_transition(backwards, grad)
    grad_memory += grad
    given = grad_values.astype(transition.values.dtype) if values else None
    return grad_memory.astype(memory.dtype), given


def check_edges(op: str, transition: Transition, num_nodes: int) -> None:
    """Raises ArrayError unless offsets ascend from 0 to num_edges and columns are valid."""
    offsets, columns, _ = transition
    ends = int(offsets[0]), int(offsets[-1])
    if ends != (0, len(columns)) or (len(offsets) > 1 and bool((offsets[1:] < offsets[:-1]).any())):
        raise ArrayError(
            f"{op}: transition.row_offsets must ascend from 0 to the number of edges "
            f"({len(columns)}), got {ends[0]} to {ends[1]}"
        )
    check_range(op, "transition.columns", columns, num_nodes)


def memory_write(
    memory: Array,
    indices: Array,
    values: Array,
    gates: Array,
    *,
    keep: bool = False,
    inplace: bool = False,
) -> Array | tuple[Array, Array]:
    """`memory[i] = (1 - s / c) memory[i] + sum(gates * values) / c`, where `s = sum(gates)` and
    `c = max(1, s)`, with sums over the writes to row i.

    Negative gates count as 0; writes with an index out of range are ignored.
    """
    xp = array_namespace(memory)
    dtype = working_dtype(memory)
    valid = xp.flatnonzero((indices >= 0) & (indices < len(memory)))
    rows = indices[valid]
    given = gates[valid].astype(dtype, copy=False)
    given = xp.where(given < 0, 0, given).astype(dtype, copy=False)
    totals = _order_independent_sums(rows, given[:, None], len(memory))[:, 0]
    sums = _order_independent_sums(
        rows, given[:, None] * values[valid].astype(dtype, copy=False), len(memory)
    )
    result = memory.copy()
    written = xp.zeros(len(memory), bool)
    written[rows] = True
    rows = xp.flatnonzero(written)
    s, u = totals[rows, None], sums[rows]
    old = memory[rows].astype(dtype, copy=False)
    replaced = s >= 1
    result[rows] = xp.where(replaced, u / xp.where(replaced, s, 1), (1 - s) * old + u).astype(
        memory.dtype
    )
    if inplace:
        memory[...] = result
        result = memory
    return (result, totals) if keep else result


def _order_independent_sums(rows: Array, terms: Array, num_rows: int) -> Array:
    """Sums the terms of each row as fixed-point integers: the order does not affect the result."""
    xp = array_namespace(terms)
    counts = xp.bincount(rows, minlength=num_rows) if len(rows) else xp.zeros(num_rows, int)
    largest = xp.zeros((num_rows, terms.shape[1]), terms.dtype)
    xp.maximum.at(largest, rows, xp.abs(terms))
    finite = xp.isfinite(largest)
    bits = xp.frexp(counts.astype(terms.dtype))[1][:, None]
    shift = 62 - xp.frexp(xp.where(finite, largest, 0))[1] - bits
    scaled = xp.where(finite[rows], xp.rint(xp.ldexp(terms, shift[rows])), 0)
    total = xp.zeros(largest.shape, xp.uint64)  # wraps modulo 2^64, as int64
    xp.add.at(total, rows, scaled.astype(xp.int64).view(xp.uint64))
    sums = xp.ldexp(total.view(xp.int64).astype(terms.dtype), -shift)
    return xp.where(finite, sums, xp.nan).astype(terms.dtype)


def memory_write_backward(
    grad_out: Array,
    memory: Array,
    out: Array,
    indices: Array,
    values: Array,
    gates: Array,
    totals: Array,
) -> tuple[Array, Array, Array]:
    """Gradients of :func:`memory_write` with respect to memory, values and gates."""
    xp = array_namespace(memory)
    dtype = working_dtype(memory)
    grad, s = grad_out.astype(dtype, copy=False), totals.astype(dtype, copy=False)
    exists = (indices >= 0) & (indices < len(memory))
    rows = xp.where(exists, indices, 0)
    if not len(memory):
        return grad_out.copy(), xp.zeros_like(values), xp.zeros_like(gates)
    replaced = s >= 1
    scale = 1 / xp.where(replaced, s, 1)
    grad_memory = xp.where(replaced, 0, 1 - s)[:, None] * grad
    counted = exists & ~(gates < 0)
    factor = xp.where(counted, gates.astype(dtype, copy=False), 0) * scale[rows]
    grad_values = factor[:, None] * grad[rows]
    base = xp.where(replaced[rows, None], out[rows].astype(dtype), memory[rows].astype(dtype))
    change = (grad[rows] * (values.astype(dtype, copy=False) - base)).sum(axis=1)
    grad_gates = xp.where(counted, change * scale[rows], 0)
    return (
        grad_memory.astype(memory.dtype),
        grad_values.astype(values.dtype),
        grad_gates.astype(gates.dtype),
    )


def memory_read(
    queries: Array, memory: Array, *, scale: float | None = None, return_lse: bool = False
) -> Array | tuple[Array, Array]:
    """`softmax(scale queries memory^T) memory`."""
    xp = array_namespace(queries)
    dtype = working_dtype(queries)
    q, m = queries.astype(dtype, copy=False), memory.astype(dtype, copy=False)
    factor = dtype(queries.shape[1] ** -0.5 if scale is None else scale)
    scores = factor * (q @ m.T)
    most = scores.max(axis=1, keepdims=True)
    weights = xp.exp(scores - most)
    total = weights.sum(axis=1, keepdims=True)
    out = ((weights / total) @ m).astype(queries.dtype)
    return (out, (most + xp.log(total))[:, 0]) if return_lse else out


def memory_read_backward(
    grad_out: Array,
    queries: Array,
    memory: Array,
    out: Array,
    lse: Array,
    *,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """Gradients of :func:`memory_read` with respect to queries and memory."""
    xp = array_namespace(queries)
    dtype = working_dtype(queries)
    grad, q, m, o = (a.astype(dtype, copy=False) for a in (grad_out, queries, memory, out))
    factor = dtype(queries.shape[1] ** -0.5 if scale is None else scale)
    p = xp.exp(factor * (q @ m.T) - lse[:, None].astype(dtype, copy=False))
    grad_scores = factor * p * (grad @ m.T - (grad * o).sum(axis=1, keepdims=True))
    grad_memory = p.T @ grad + grad_scores.T @ q
    return (grad_scores @ m).astype(queries.dtype), grad_memory.astype(memory.dtype)
