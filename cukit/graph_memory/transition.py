"""Transition matrices between the nodes of a memory, from weighted edges or from similarity."""

from __future__ import annotations

from typing import Any

from cukit.core.arrays import (
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    adopt,
    check_array,
    float32,
    float64,
    int32,
    namespace,
    runs_kernel,
)
from cukit.core.scalars import check_choice, check_flag, check_integer, check_number
from cukit.errors import ArrayError, ArrayShapeError, ConfigError
from cukit.graph_memory.diffusion import apply_transition, check_transition, row_sums
from cukit.graph_memory.retrieve import MAX_K, retrieve_top_k
from cukit.reference.graph_memory import Transition, rows_of_edges, transpose

NORMALIZATIONS = ("row", "softmax", "symmetric")


def transition_from_adjacency(adjacency: Any, *, normalize: str = "row") -> Transition:
    """The transition matrix of a random walk over weighted edges.

    Args:
        adjacency: float32 [num_nodes, num_nodes], whose nonzero entries are edges, or a
            `Transition` whose values are weights; float64 on the CPU only.
        normalize: `"row"` divides each row by its sum (D^-1 A); `"softmax"` applies a softmax to
            the edges of each row; `"symmetric"` is D^-1/2 A D^-1/2, for symmetric non-negative
            weights. Rows with a sum of 0 are not divided.

    Returns:
        A `Transition` with float32 values (float64 for float64).

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument.
        ConfigError: an unknown `normalize`.

    A dense adjacency on the GPU synchronises, because shapes depend on its number of edges.

    >>> import numpy as np
    >>> from cukit.graph_memory import transition_from_adjacency
    >>> transition_from_adjacency(np.array([[0.0, 1.0], [3.0, 1.0]])).values
    array([1.  , 0.75, 0.25])
    """
    op = "transition_from_adjacency"
    check_choice(op, "normalize", normalize, NORMALIZATIONS)
    if isinstance(adjacency, Transition):
        offsets, columns, values = Transition(*adopt(op, *adjacency))
        check_array(op, "adjacency.row_offsets", offsets, dtypes=(int32,), ndim=1)
        check_array(op, "adjacency.columns", columns, dtypes=(int32,), ndim=1)
        known = KERNEL_DTYPES if runs_kernel("graph_diffusion", values) else FLOAT_DTYPES
        check_array(op, "adjacency.values", values, dtypes=known, shape=columns.shape)
        if len(offsets) == 0:
            raise ArrayShapeError(f"{op}: adjacency.row_offsets must have an element, got none")
        return _normalised(op, Transition(offsets, columns, values), normalize)
    matrix = adopt(op, adjacency)[0]
    assert matrix is not None
    on_kernel = runs_kernel("graph_diffusion", matrix)
    check_array(
        op, "adjacency", matrix, dtypes=(float32,) if on_kernel else (float32, float64), ndim=2
    )
    check_array(op, "adjacency", matrix, shape=(len(matrix), len(matrix)))
    xp = namespace(matrix)
    rows, columns = xp.nonzero(matrix)
    counts = xp.bincount(rows, minlength=len(matrix)) if len(rows) else xp.zeros(len(matrix))
    edges = Transition(_row_offsets(xp, counts), columns.astype(int32), matrix[rows, columns])
    return _normalised(op, edges, normalize)


def transition_from_similarity(
    memory: Array,
    k: int,
    *,
    scale: float | None = None,
    normalize: str = "softmax",
    self_loops: bool = False,
) -> Transition:
    """The transition matrix with edges from each row of a memory to its `k` most similar rows.

    Similarity is the scaled inner product.

    Args:
        memory: float16|bfloat16 [num_nodes, dim]; float32 and float64 on the CPU only. Other limits
            as for :func:`retrieve_top_k`.
        k: 1 to 255; less than num_nodes, or at most num_nodes with `self_loops`.
        scale: positive factor of the inner products; default 1 / sqrt(dim).
        normalize: `"softmax"` or `"row"`: each row is the softmax of its scores; `"symmetric"`:
            D^-1/2 A D^-1/2 with A = (W + W^T) / 2 and W = exp(scores), which has 2 k num_nodes
            edges.
        self_loops: whether a row may be its own neighbour.

    Returns:
        A `Transition`; edges of a row by descending similarity, for `"symmetric"` by column.

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument.
        ConfigError: an option out of range.

    Deterministic, as :func:`retrieve_top_k`, which finds the neighbours.
    """
    op = "transition_from_similarity"
    (memory,) = adopt(op, memory)
    check_array(op, "memory", memory, ndim=2)
    check_choice(op, "normalize", normalize, NORMALIZATIONS)
    check_flag(op, "self_loops", self_loops)
    check_integer(op, "k", k, least=1, most=MAX_K - 1)
    num_nodes, dim = memory.shape
    wanted = int(k) + (not self_loops)
    if wanted > num_nodes:
        limit = "at most" if self_loops else "below"
        raise ConfigError(f"{op}: k must be {limit} the number of rows ({num_nodes}), got {k}")
    if scale is not None:
        check_number(op, "scale", scale, above=0)
    xp = namespace(memory)
    scores, neighbours = retrieve_top_k(memory, memory, wanted)
    if not self_loops:
        own = neighbours == xp.arange(num_nodes, dtype=int32)[:, None]
        order = xp.argsort(own.astype(int32), axis=1, kind="stable")[:, :-1]
        scores = xp.take_along_axis(scores, order, axis=1)
        neighbours = xp.take_along_axis(neighbours, order, axis=1)
    scores = scores * scores.dtype.type(dim**-0.5 if scale is None else scale)
    counts = xp.full(num_nodes, int(k))
    if normalize == "symmetric":
        weights = xp.exp(scores - scores.max()).ravel() / 2
        rows, columns = xp.repeat(xp.arange(num_nodes), int(k)), neighbours.ravel().astype(int)
        both = xp.concatenate([rows, columns]), xp.concatenate([columns, rows])
        order = xp.argsort(both[0] * num_nodes + both[1], kind="stable")
        counts = xp.bincount(both[0], minlength=num_nodes)
        values = xp.concatenate([weights, weights])[order]
        edges = Transition(_row_offsets(xp, counts), both[1][order].astype(int32), values)
        return _normalised(op, edges, "symmetric")
    weights = xp.exp(scores - scores[:, :1])
    weights /= weights.sum(axis=1, keepdims=True)
    columns = xp.ascontiguousarray(neighbours).ravel()
    return Transition(_row_offsets(xp, counts), columns, xp.ascontiguousarray(weights).ravel())


def transition_from_similarity_backward(
    grad_values: Array, memory: Array, transition: Transition, *, scale: float | None = None
) -> Array:
    """Gradient of :func:`transition_from_similarity` with `"softmax"` with respect to the memory.

    The choice of neighbours is treated as constant. For a diffusion over the memory's own graph,
    pass `grad_values` of :func:`graph_diffusion_backward` and add the result to its `grad_memory`.

    Args:
        grad_values: gradient of the transition's values, float32 [num_edges].
        memory, scale: as in the forward.
        transition: result of the forward.

    Returns:
        The gradient, shape and dtype of `memory`; accumulated in float32, deterministic.

    Raises:
        ArrayError: invalid dtype, shape, layout or device of an argument.
        ConfigError: `scale` is not a positive number.
    """
    op = "transition_from_similarity_backward"
    if not isinstance(transition, Transition):
        kind = type(transition).__name__
        raise ArrayError(f"{op}: transition must be a Transition, got {kind}")
    arrays = adopt(op, grad_values, memory, *transition)
    grad_values, memory, *parts = arrays
    transition = Transition(*parts)
    check_transition(op, memory, transition)
    shape = transition.values.shape
    check_array(op, "grad_values", grad_values, dtypes=FLOAT_DTYPES, shape=shape)
    if scale is not None:
        check_number(op, "scale", scale, above=0)
    factor = grad_values.dtype.type(memory.shape[1] ** -0.5 if scale is None else scale)
    on_kernel = runs_kernel("graph_diffusion", *arrays)
    weighted = transition._replace(values=transition.values * grad_values)
    sums = row_sums(op, weighted, on_kernel=on_kernel)
    centred = grad_values - sums[rows_of_edges(transition)]
    slopes = transition._replace(values=factor * transition.values * centred)
    from_targets, from_sources = (
        apply_transition(op, memory, each, on_kernel=on_kernel)
        for each in (slopes, transpose(slopes))
    )
    if from_targets.dtype.itemsize < 4:
        total = from_targets.astype(float32) + from_sources.astype(float32)
        return total.astype(memory.dtype)
    return from_targets + from_sources


def _row_offsets(xp: Any, counts: Array) -> Array:
    """Row offsets from the numbers of edges per row."""
    offsets = xp.zeros(len(counts) + 1, int32)
    offsets[1:] = xp.cumsum(counts)
    return offsets


def _normalised(op: str, edges: Transition, normalize: str) -> Transition:
    offsets, columns, values = edges
    xp = namespace(values)
    values = values.astype(float32) if values.dtype.itemsize < 4 else values
    rows = rows_of_edges(edges)
    if normalize == "softmax":
        most = xp.full(len(offsets) - 1, -xp.inf, values.dtype)
        xp.maximum.at(most, rows, values)
        values = xp.exp(values - most[rows])
    edges = Transition(offsets, columns, values)
    on_kernel = runs_kernel("graph_diffusion", offsets, columns, values)
    sums = row_sums(op, edges, on_kernel=on_kernel)
    divisor = xp.where(sums == 0, 1, sums)
    if normalize == "symmetric":
        roots = 1 / xp.sqrt(divisor)
        return edges._replace(values=values * roots[rows] * roots[columns])
    return edges._replace(values=values / divisor[rows])
