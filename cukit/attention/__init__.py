"""Attention: exact, block-sparse, paged and latent, and KL divergences of attention weights."""

from cukit.attention.divergence.attention_kl import attention_kl
from cukit.attention.divergence.attention_kl_backward import attention_kl_backward
from cukit.attention.divergence.indexer_kl import indexer_kl
from cukit.attention.divergence.indexer_kl_backward import indexer_kl_backward
from cukit.attention.flash.block_sparse import block_sparse_attention
from cukit.attention.flash.flash import flash_attention
from cukit.attention.flash.flash_backward import flash_attention_backward
from cukit.attention.flash.merge_states import merge_attention_states
from cukit.attention.paged.append_kv import append_kv
from cukit.attention.paged.cache_arrays import RecentKV
from cukit.attention.paged.cascade import cascade_attention
from cukit.attention.paged.mla import (
    MlaMetadata,
    absorb_mla_projections,
    encode_mla_latents,
    mla_attention,
    mla_metadata,
)
from cukit.attention.paged.pack_kv import pack_kv
from cukit.attention.paged.paged import paged_attention
from cukit.attention.paged.paged_steps import PagedAttention

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
