"""Multi-head latent attention over a latent cache, with absorbed up-projections."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukit.reference._xp import array_namespace
from cukit.reference.narrow import decode_float8
from cukit.reference.paged_attention import paged_attention

Array = Any

LATENT_DIM = 512
"""Latent columns of a cached row: the values, and the first columns of the keys, of all heads."""
ROPE_DIM = 64
"""Columns after the latent: the rotary part of the key, shared by all heads."""
GROUP = 128
"""Columns of an FP8 latent per scale."""
CODE_BYTES = LATENT_DIM + 4 * (LATENT_DIM // GROUP) + 2 * ROPE_DIM
"""Bytes per token of an FP8 cache: codes, float32 scales, bfloat16 rotary part."""
SCALE = 192**-0.5
"""Default scale, from the head size before absorption: 128 non-rotary plus 64 rotary columns."""


def mla_attention(
    q: Array,
    kv_cache: Array,
    block_table: Array,
    seq_lens: Array,
    *,
    causal: bool = True,
    scale: float | None = None,
    latent_dim: int = LATENT_DIM,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """paged_attention with one KV head; the first latent_dim columns of its keys are the values."""
    cache = kv_cache
    if kv_cache.dtype == np.uint8:
        cache = decode_latents(kv_cache).astype(np.promote_types(q.dtype, np.float32), copy=False)
    return paged_attention(
        q,
        cache,
        cache[..., :latent_dim],
        block_table,
        seq_lens,
        causal=causal,
        scale=SCALE if scale is None else scale,
        return_lse=return_lse,
    )


def decode_latents(cache: Array) -> Array:
    """Decodes an FP8 cache [..., 656] to float32 [..., 576]."""
    xp = array_namespace(cache)
    codes = decode_float8(cache[..., :LATENT_DIM], "float8_e4m3")
    rest = xp.ascontiguousarray(cache[..., LATENT_DIM:])
    scales = rest[..., : -2 * ROPE_DIM].copy().view(np.float32)
    # A bfloat16 is the upper half of a float32.
    halves = rest[..., -2 * ROPE_DIM :].copy().view(np.uint16)
    rope = (halves.astype(np.uint32) << 16).view(np.float32)
    return xp.concatenate((codes * xp.repeat(scales, GROUP, axis=-1), rope), axis=-1)


def absorb_mla_projections(w_q: Array, w_o: Array, w_uk: Array, w_uv: Array) -> tuple[Array, Array]:
    """Absorbs the up-projections of each head: replaces its non-rotary rows of W_q by W_uk^T times
    these rows, and its columns of W_o by these columns times W_uv. Computes in float32 (float64 for
    float64)."""
    xp = array_namespace(w_q)
    heads, nope, latent_dim = w_uk.shape
    hidden, value_dim = w_o.shape[0], w_uv.shape[1]
    wide = np.float64 if w_q.dtype == np.float64 else np.float32
    per_head = w_q.reshape(heads, w_q.shape[0] // heads, w_q.shape[1])
    latent = xp.matmul(
        w_uk.astype(wide).swapaxes(1, 2), per_head[:, :nope].astype(wide)
    )  # [heads, latent, q_rank]
    absorbed = xp.concatenate((latent.astype(w_q.dtype), per_head[:, nope:]), axis=1)
    columns = w_o.reshape(hidden, heads, value_dim).swapaxes(0, 1).astype(wide)
    outputs = xp.matmul(columns, w_uv.astype(wide)).swapaxes(0, 1).astype(w_o.dtype)
    rows = absorbed.shape[0] * absorbed.shape[1]
    return absorbed.reshape(rows, w_q.shape[1]), outputs.reshape(hidden, heads * latent_dim)
