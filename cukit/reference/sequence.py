"""Scans over sequences: states that decay, and what is read from them."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from cukit.reference._xp import array_namespace, upcast, working_dtype

Array = Any

LEAST_LOG_DECAY = -104.0
"""exp of it is 0 in float32: what lies below counts as this."""


class Scan(NamedTuple):
    """Outputs of a scan, and the states behind the last tokens.

    y: shape and dtype of x.
    final_state: float32 [num_sequences, num_heads, state_dim, head_dim].
    """

    y: Array
    final_state: Array


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
    log_decay [batch, seq_len, num_heads]; cu_seqlens: ends of the sequences in a batch of one.
    Within a chunk only differences of the decays' cumulative sum are exponentiated.
    """
    xp = array_namespace(x)
    batch, seq_len, num_heads, head_dim = x.shape
    work = working_dtype(x, b, c, log_decay)
    wide, keys, queries, decay = upcast(work, x, b, c, log_decay)
    decay = xp.clip(decay, LEAST_LOG_DECAY, 0)
    each = num_heads // b.shape[2]
    keys, queries = (xp.repeat(array, each, axis=2) for array in (keys, queries))
    if cu_seqlens is None:
        ranges = [(row, 0, seq_len) for row in range(batch)]
    else:
        ends = [int(end) for end in cu_seqlens]
        ranges = [(0, begin, end) for begin, end in itertools.pairwise(ends)]
    shape = (len(ranges), num_heads, b.shape[3], head_dim)
    state = xp.zeros(shape, work) if initial_state is None else initial_state.astype(work)
    y = xp.zeros(x.shape, work)
    for number, (row, begin, end) in enumerate(ranges):
        h = state[number]
        for first in range(begin, end, chunk):
            part = slice(first, min(first + chunk, end))
            y[row, part], h = _chunk(
                xp, wide[row, part], keys[row, part], queries[row, part], decay[row, part], h
            )
        state[number] = h
    final_type = np.float64 if work == np.float64 else np.float32
    return Scan(y.astype(x.dtype), state.astype(final_type))


def _chunk(xp: Any, x: Array, b: Array, c: Array, decay: Array, h: Array) -> tuple[Array, Array]:
    """Outputs of a chunk and the state behind it; h [num_heads, state_dim, head_dim]."""
    upto = xp.cumsum(decay, axis=0).T  # [num_heads, tokens]
    tokens = len(x)
    causal = xp.arange(tokens)[:, None] >= xp.arange(tokens)[None, :]
    between = xp.where(causal, upto[:, :, None] - upto[:, None, :], -xp.inf)
    scores = xp.einsum("ihn,jhn->hij", c, b) * xp.exp(between)
    y = xp.einsum("hij,jhp->ihp", scores, x)
    y += xp.einsum("ihn,hnp->ihp", c * xp.exp(upto).T[:, :, None], h)
    left = xp.exp(upto[:, -1:] - upto).T[:, :, None]
    h = h * xp.exp(upto[:, -1])[:, None, None] + xp.einsum("jhn,jhp->hnp", b * left, x)
    return y, h


def gated_scan_step(
    state: Array,
    x: Array,
    b: Array,
    c: Array,
    log_decay: Array,
) -> Array:
    """One token of each sequence; changes `state` and returns y [batch, num_heads, head_dim]."""
    xp = array_namespace(x)
    work = working_dtype(state, x, b, c, log_decay)
    wide, keys, queries, decay = upcast(work, x, b, c, log_decay)
    each = x.shape[1] // b.shape[1]
    keys, queries = (xp.repeat(array, each, axis=1) for array in (keys, queries))
    decay = xp.exp(xp.clip(decay, LEAST_LOG_DECAY, 0))[:, :, None, None]
    h = state.astype(work) * decay + keys[:, :, :, None] * wide[:, :, None, :]
    state[...] = h
    return xp.einsum("bhn,bhnp->bhp", queries, h).astype(x.dtype)
