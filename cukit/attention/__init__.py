"""Attention: exact, block-sparse, paged and latent, and KL divergences between attentions."""

from cukit.attention.append_kv import append_kv
from cukit.attention.attention_kl import attention_kl
from cukit.attention.attention_kl_backward import attention_kl_backward
from cukit.attention.block_sparse import block_sparse_attention
from cukit.attention.cache_arrays import RecentKV
from cukit.attention.cascade import cascade_attention
from cukit.attention.flash import flash_attention
from cukit.attention.flash_backward import flash_attention_backward
from cukit.attention.indexer_kl import indexer_kl
from cukit.attention.indexer_kl_backward import indexer_kl_backward
from cukit.attention.merge_states import merge_attention_states
from cukit.attention.mla import (
    MlaMetadata,
    absorb_mla_projections,
    encode_mla_latents,
    mla_attention,
    mla_metadata,
)
from cukit.attention.pack_kv import pack_kv
from cukit.attention.paged import paged_attention
from cukit.attention.paged_steps import PagedAttention

__all__ = [
    "MlaMetadata",
    "PagedAttention",
    "RecentKV",
    "absorb_mla_projections",
    "append_kv",
    "attention_kl",
    "attention_kl_backward",
    "block_sparse_attention",
    "cascade_attention",
    "encode_mla_latents",
    "flash_attention",
    "flash_attention_backward",
    "indexer_kl",
    "indexer_kl_backward",
    "merge_attention_states",
    "mla_attention",
    "mla_metadata",
    "pack_kv",
    "paged_attention",
]
