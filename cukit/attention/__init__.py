"""Attention."""

from cukit.attention.block_sparse import block_sparse_attention
from cukit.attention.cascade import cascade_attention
from cukit.attention.flash import flash_attention
from cukit.attention.flash_backward import flash_attention_backward
from cukit.attention.merge_states import merge_attention_states
from cukit.attention.paged import paged_attention
from cukit.attention.paged_steps import PagedAttention

__all__ = [
    "PagedAttention",
    "block_sparse_attention",
    "cascade_attention",
    "flash_attention",
    "flash_attention_backward",
    "merge_attention_states",
    "paged_attention",
]
