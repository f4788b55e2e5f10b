"""Gated linear recurrences over sequences."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from cukit.reference._xp import array_namespace, upcast, working_dtype

Array = Any

MIN_LOG_DECAY = -104.0
"""Lower clamp of log decays; its exponential is 0 in float32."""


class Scan(NamedTuple):
    """Outputs of a scan, and the states after the last tokens.

    y: shape and dtype of x.
    final_state: float32 (float64 if an argument is float64) [num_sequences, num_heads, state_dim,
        head_dim].
    """

    y: Array
    final_state: Array


class ScanGradients(NamedTuple):
    """Gradients of a scan's arguments, each shaped like its argument.

    x, b, c: dtype of x.
    log_decay: float32 (float64 if an argument is float64); 0 where the forward clamps log_decay.
    initial_state: dtype of log_decay [num_sequences, num_heads, state_dim, head_dim].
    """

    x: Array
    b: Array
    c: Array
    log_decay: Array
    initial_state: Array


def gated_scan(
    x: Array,
    b: Array,
    c: Array,
    log_decay: Array,
    *,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    chunk: int = 64,
) -> Scan:
    """`h_t = exp(l_t) h_{t-1} + b_t x_t^T`, `y_t = h_t^T c_t`, chunk by chunk.

    x [batch, seq_len, num_heads, head_dim]; b, c [batch, seq_len, num_groups, state_dim];
    log_decay [batch, seq_len, num_heads], or with state_dim as a fourth axis; cu_seqlens:
    boundaries of the sequences in a batch of one. Within a chunk only differences of the decays'
    cumulative sum are exponentiated.
    """
    xp = array_namespace(x)
    batch, seq_len, num_heads, head_dim = x.shape
    work = working_dtype(x, b, c, log_decay)
    wide, keys, queries, decay = upcast(work, x, b, c, log_decay)
    decay = _channel_decays(xp, decay, axes=4)
    each = num_heads // b.shape[2]
    keys, queries = (xp.repeat(array, each, axis=2) for array in (keys, queries))
    ranges = _ranges(batch, seq_len, cu_seqlens)
    shape = (len(ranges), num_heads, b.shape[3], head_dim)
    state = xp.zeros(shape, work) if initial_state is None else initial_state.astype(work)
    y = xp.zeros(x.shape, work)
    for number, (row, begin, end) in enumerate(ranges):
        h = state[number]
        for first in range(begin, end, chunk):
            part = slice(first, min(first + chunk, end))
            y[row, part], h = _chunk(
                xp, h, wide[row, part], keys[row, part], queries[row, part], decay[row, part]
            )
        state[number] = h
    final_type = np.float64 if work == np.float64 else np.float32
    return Scan(y.astype(x.dtype), state.astype(final_type))


def _ranges(batch: int, seq_len: int, cu_seqlens: Array | None) -> list[tuple[int, int, int]]:
    """Batch index, first token and end of each sequence."""
    if cu_seqlens is None:
        return [(row, 0, seq_len) for row in range(batch)]
    ends = [int(end) for end in cu_seqlens]
    return [(0, begin, end) for begin, end in itertools.pairwise(ends)]


def _channel_decays(xp: Any, log_decay: Array, *, axes: int) -> Array:
    """Clamped log decays with a last axis of channels, which is 1 for a decay per head."""
    decay = xp.clip(log_decay, MIN_LOG_DECAY, 0)
    return decay if decay.ndim == axes else decay[..., None]


def _scores(xp: Any, c: Array, b: Array, upto: Array) -> Array:
    """`sum_n exp(upto_in - upto_jn) c_in b_jn` for j <= i, [num_heads, tokens, tokens].

    upto: cumulative log decays of the chunk, [tokens, num_heads, state_dim or 1].
    """
    tokens, num_heads, channels = upto.shape
    causal = xp.arange(tokens)[:, None] >= xp.arange(tokens)[None, :]
    if channels == 1:
        whole = upto[:, :, 0].T
        between = xp.where(causal, whole[:, :, None] - whole[:, None, :], -xp.inf)
        return xp.einsum("ihn,jhn->hij", c, b) * xp.exp(between)
    rows = [
        xp.einsum("hn,jhn,jhn->hj", c[i], b[: i + 1], xp.exp(upto[i] - upto[: i + 1]))
        for i in range(tokens)
    ]
    scores = xp.zeros((num_heads, tokens, tokens), upto.dtype)
    for i, row in enumerate(rows):
        scores[:, i, : i + 1] = row
    return scores


def _chunk(xp: Any, h: Array, x: Array, b: Array, c: Array, decay: Array) -> tuple[Array, Array]:
    """Outputs of a chunk and the state after it; h [num_heads, state_dim, head_dim], decay
    [tokens, num_heads, state_dim or 1]."""
    upto = xp.cumsum(decay, axis=0)
    y = xp.einsum("hij,jhp->ihp", _scores(xp, c, b, upto), x)
    y += xp.einsum("ihn,hnp->ihp", c * xp.exp(upto), h)
    left = b * xp.exp(upto[-1:] - upto)
    h = h * xp.exp(upto[-1])[:, :, None] + xp.einsum("jhn,jhp->hnp", left, x)
    return y, h


def gated_scan_backward(
    grad_y: Array,
    x: Array,
    b: Array,
    c: Array,
    log_decay: Array,
    *,
    grad_final_state: Array | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    chunk: int = 64,
) -> ScanGradients:
    """Gradients of :func:`gated_scan`: recomputes the states before all chunks, then processes the
    chunks in reverse.

    Arguments as in :func:`gated_scan`; grad_y like x, grad_final_state like initial_state.
    """
    xp = array_namespace(x)
    batch, seq_len, num_heads, head_dim = x.shape
    groups, state_dim = b.shape[2:]
    work = working_dtype(grad_y, x, b, c, log_decay)
    grads, wide, keys, queries, raw = upcast(work, grad_y, x, b, c, log_decay)
    decay = _channel_decays(xp, raw, axes=4)
    each = num_heads // groups
    keys, queries = (xp.repeat(array, each, axis=2) for array in (keys, queries))
    ranges = _ranges(batch, seq_len, cu_seqlens)
    shape = (len(ranges), num_heads, state_dim, head_dim)
    before = xp.zeros(shape, work) if initial_state is None else initial_state.astype(work)
    grad_state = xp.zeros(shape, work)
    if grad_final_state is not None:
        grad_state[...] = grad_final_state
    grad_x, grad_b, grad_c, grad_decay = (
        xp.zeros(array.shape, work) for array in (wide, keys, queries, decay)
    )
    for number, (row, begin, end) in enumerate(ranges):
        parts = [slice(first, min(first + chunk, end)) for first in range(begin, end, chunk)]
        states = [before[number]]
        for part in parts[:-1]:
            inputs = (array[row, part] for array in (wide, keys, queries, decay))
            states.append(_chunk(xp, states[-1], *inputs)[1])
        g = grad_state[number]
        for part, h in zip(reversed(parts), reversed(states), strict=False):
            inputs = (array[row, part] for array in (grads, wide, keys, queries, decay))
            of_chunk = _chunk_backward(xp, h, g, *inputs)
            grad_x[row, part], grad_b[row, part], grad_c[row, part] = of_chunk[:3]
            grad_decay[row, part], g = of_chunk[3:]
        grad_state[number] = g
    grad_decay = grad_decay.reshape(raw.shape)
    grad_decay = xp.where((raw > 0) | (raw < MIN_LOG_DECAY), 0, grad_decay)
    by_group = (batch, seq_len, groups, each, state_dim)
    grad_b, grad_c = (array.reshape(by_group).sum(3) for array in (grad_b, grad_c))
    rest = np.float64 if work == np.float64 else np.float32
    return ScanGradients(
        *(array.astype(x.dtype) for array in (grad_x, grad_b, grad_c)),
        *(array.astype(rest) for array in (grad_decay, grad_state)),
    )


def _chunk_backward(
    xp: Any, h: Array, g: Array, grad_y: Array, x: Array, b: Array, c: Array, decay: Array
) -> tuple[Array, ...]:
    """Gradients of a chunk's x, b, c and decays, and of the state before it.

    h: the state before the chunk, g: the gradient of the state after it.
    """
    upto = xp.cumsum(decay, axis=0)  # [tokens, num_heads, state_dim or 1]
    grown, left, kept = xp.exp(upto), xp.exp(upto[-1:] - upto), xp.exp(upto[-1])[:, :, None]
    scores = _scores(xp, c, b, upto)
    grad_scores = xp.tril(xp.einsum("ihp,jhp->hij", grad_y, x))

    from_state = grown * xp.einsum("hnp,ihp->ihn", h, grad_y)
    to_state = left * xp.einsum("hnp,jhp->jhn", g, x)
    grad_x = xp.einsum("hnp,jhn->jhp", g, b * left) + xp.einsum("hij,ihp->jhp", scores, grad_y)
    grad_h = kept * g + xp.einsum("ihn,ihp->hnp", c * grown, grad_y)

    of_b, of_c = _pair_gradients(xp, xp.tril(grad_scores, -1), b, c, upto)
    diagonal = xp.einsum("hii->ih", grad_scores)[:, :, None]
    grad_b, grad_c = to_state + of_b + diagonal * c, from_state + of_c + diagonal * b

    # The decay of token t is a factor of: products of tokens i >= t with tokens j < t; reads of
    # tokens i >= t from the state before the chunk; contributions of tokens j < t to the state
    # after it; the contribution of the state before the chunk to the state after it.
    def total(array: Array) -> Array:
        return array if decay.shape[2] > 1 else xp.sum(array, axis=-1, keepdims=True)

    change = total(b * of_b - c * of_c + b * to_state)
    change = xp.concatenate([xp.zeros_like(change[:1]), change[:-1]])
    before = xp.cumsum(change, axis=0)
    after = xp.cumsum(total(c * from_state)[::-1], axis=0)[::-1]
    grad_decay = before + after + total(xp.sum(kept * g * h, axis=2))
    return grad_x, grad_b, grad_c, grad_decay, grad_h


def _pair_gradients(xp: Any, pairs: Array, b: Array, c: Array, upto: Array) -> tuple[Array, Array]:
    """`sum_i pairs_ij exp(upto_i - upto_j) c_i` and `sum_j pairs_ij exp(upto_i - upto_j) b_j` over
    i > j; pairs [num_heads, i, j], upto [tokens, num_heads, state_dim or 1]."""
    if upto.shape[2] == 1:
        whole = upto[:, :, 0].T
        earlier = xp.tril(xp.ones(pairs.shape[1:], bool), -1)
        between = xp.where(earlier, whole[:, :, None] - whole[:, None, :], -xp.inf)
        decayed = pairs * xp.exp(between)
        return xp.einsum("hij,ihn->jhn", decayed, c), xp.einsum("hij,jhn->ihn", decayed, b)
    of_b, of_c = xp.zeros(b.shape, upto.dtype), xp.zeros(c.shape, upto.dtype)
    for i in range(1, len(upto)):
        decayed = pairs[:, i, :i].T[:, :, None] * xp.exp(upto[i] - upto[:i])
        of_c[i] = xp.sum(decayed * b[:i], axis=0)
        of_b[:i] += decayed * c[i]
    return of_b, of_c


def gated_scan_step(
    state: Array,
    x: Array,
    b: Array,
    c: Array,
    log_decay: Array,
) -> Array:
    """One token per sequence; updates `state` and returns y [batch, num_heads, head_dim]."""
    xp = array_namespace(x)
    work = working_dtype(state, x, b, c, log_decay)
    wide, keys, queries, decay = upcast(work, x, b, c, log_decay)
    each = x.shape[1] // b.shape[1]
    keys, queries = (xp.repeat(array, each, axis=1) for array in (keys, queries))
    decay = xp.exp(_channel_decays(xp, decay, axes=3))[..., None]
    h = state.astype(work) * decay + keys[:, :, :, None] * wide[:, :, None, :]
    state[...] = h
    return xp.einsum("bhn,bhnp->bhp", queries, h).astype(x.dtype)
