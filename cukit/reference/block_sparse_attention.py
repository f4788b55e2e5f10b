"""Attention with a block mask, with the full score matrix in memory."""

from __future__ import annotations

from typing import Any

from cukit.reference._xp import array_namespace
from cukit.reference.attention import flash_attention

Array = Any


def expand_blocks(
    block_mask: Array, block_size: tuple[int, int], seq_len_q: int, seq_len_kv: int
) -> Array:
    """[heads, query blocks, key blocks] -> [1, heads, seq_len_q, seq_len_kv]."""
    xp = array_namespace(block_mask)
    rows = xp.arange(seq_len_q) // block_size[0]
    columns = xp.arange(seq_len_kv) // block_size[1]
    return block_mask[None][:, :, rows[:, None], columns]


def block_sparse_attention(
    q: Array,
    k: Array,
    v: Array,
    block_mask: Array,
    *,
    block_size: int | tuple[int, int] = 128,
    **options: Any,
) -> Array | tuple[Array, Array]:
    """flash_attention with the block mask expanded to elements."""
    size = (block_size, block_size) if isinstance(block_size, int) else block_size
    mask = block_mask if block_mask.ndim == 3 else block_mask[None]
    return flash_attention(
        q, k, v, mask=expand_blocks(mask, size, q.shape[1], k.shape[1]), **options
    )
