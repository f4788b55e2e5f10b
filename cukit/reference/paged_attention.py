"""Attention over a paged cache: gathers the keys and values of each request."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cukit.reference._xp import array_namespace, working_dtype
from cukit.reference.attention import flash_attention

Array = Any


def paged_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seq_lens: Array,
    *,
    causal: bool = True,
    window_size: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    cu_seqlens_q: Array | None = None,
    recent: Any = None,
    scale: float | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """flash_attention per request over the rows selected by the block table.

    recent: ring buffers k and v [num_rings, num_rows, ...], the ring buffer of each request
    (rings), and the position of its first key there (packed_lens); None if all keys are in the
    cache.
    """
    xp = array_namespace(q)
    *rows_q, heads_q, _ = q.shape
    block_size = k_cache.shape[1]
    out = xp.zeros((*q.shape[:-1], v_cache.shape[-1]), dtype=q.dtype)
    shape = (*rows_q[:-1], heads_q, rows_q[-1])
    lse = xp.full(shape, -math.inf, dtype=working_dtype(q, k_cache, v_cache))
    for b, length in enumerate(np.asarray(_host(seq_lens)).tolist()):
        if cu_seqlens_q is None:
            own_q, own_out, own_lse = q[b], out[b], lse[b]
        else:
            own = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
            own_q, own_out, own_lse = q[own], out[own], lse[:, own]
        first = first_key(length, len(own_q), window_size)
        packed = length if recent is None else min(length, max(first, int(recent.packed_lens[b])))
        places = xp.arange(first, packed)
        rows = block_table[b][places // block_size], places % block_size
        k, v = k_cache[rows], v_cache[rows]
        if recent is not None and packed < length:
            ring = int(recent.rings[b]), xp.arange(packed, length) % recent.k.shape[1]
            k, v = (
                xp.concatenate([old, new[ring].astype(old.dtype)])
                for old, new in ((k, recent.k), (v, recent.v))
            )
        own_out[None], own_lse[None] = flash_attention(
            own_q[None],
            k[None],
            v[None],
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            sinks=sinks,
            scale=scale,
            return_lse=True,
        )
    return (out, lse) if return_lse else out


def cascade_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seq_lens: Array,
    prefixes: Any,
    **options: Any,
) -> Array | tuple[Array, Array]:
    """paged_attention: shared prefixes do not change the result."""
    return paged_attention(q, k_cache, v_cache, block_table, seq_lens, **options)


def merge_attention_states(
    out_a: Array, lse_a: Array, out_b: Array, lse_b: Array
) -> tuple[Array, Array]:
    """Combines two outputs over disjoint keys, weighted by their softmax denominators exp(lse)."""
    xp = array_namespace(out_a)
    top = xp.maximum(lse_a, lse_b)
    base = xp.where(top == -math.inf, 0, top)
    weights = [xp.exp(lse - base).swapaxes(1, 2)[..., None] for lse in (lse_a, lse_b)]
    total = weights[0] + weights[1]
    # An output without keys is ignored, even if it is NaN.
    sides = [xp.where(w == 0, 0, w * out) for w, out in zip(weights, (out_a, out_b), strict=True)]
    out = (sides[0] + sides[1]) / xp.where(total == 0, 1, total)
    whole = total[..., 0].swapaxes(1, 2)
    lse = xp.where(whole == 0, -math.inf, base + xp.log(xp.where(whole == 0, 1, whole)))
    return out.astype(out_a.dtype, copy=False), lse.astype(lse_a.dtype, copy=False)


def first_key(seq_len: Any, seq_q: int, window_size: tuple[int | None, int | None] | None) -> Any:
    """The first key within the window of any query; earlier keys may be missing from the cache."""
    left = None if window_size is None else window_size[0]
    return 0 * seq_len if left is None else np.maximum(0, seq_len - seq_q - left)


def _host(array: Array) -> Array:
    return array.get() if hasattr(array, "get") else array
