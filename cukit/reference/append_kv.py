"""Writes new keys and values to the blocks of a cache, in place."""

from __future__ import annotations

from typing import Any

from cukit.reference._xp import array_namespace, working_dtype
from cukit.reference.quantize import quantize
from cukit.reference.rope import rope

Array = Any


def append_kv(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    slots: Array,
    *,
    q: Array | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    position_ids: Array | None = None,
    interleaved: bool = False,
    codes: str = "",
    k_scales: Array | None = None,
    v_scales: Array | None = None,
) -> Array | None:
    """Stores `k[i]` and `v[i]` in row `slots[i]` of the caches; slots out of range are skipped.

    Returns the rotated queries (q itself without cos, None without q).
    codes: element format of caches with scales [num_blocks, block_size, num_heads_kv, 1]; "" for
    caches of k's dtype. Rotated keys are rounded once, to the format of the cache.
    """
    xp = array_namespace(k)
    wide = k.astype(working_dtype(k), copy=False)
    q_out = q
    if cos is not None:
        queries = wide[None] if q is None else q[None]
        q_out, wide = (
            each[0]
            for each in rope(queries, wide[None], cos, sin, position_ids, interleaved=interleaved)
        )
        q_out = None if q is None else q_out
    num_blocks, block_size = k_cache.shape[:2]
    used = xp.nonzero((slots >= 0) & (slots < num_blocks * block_size))[0]
    rows = slots[used] // block_size, slots[used] % block_size
    for new, cache, scales in ((wide, k_cache, k_scales), (v, v_cache, v_scales)):
        if scales is not None:
            storage, factors, _ = quantize(new[used], codes, (1, 1, new.shape[-1]))
            cache[rows], scales[rows] = storage, factors
        else:
            cache[rows] = new[used].astype(cache.dtype, copy=False)
    return q_out
