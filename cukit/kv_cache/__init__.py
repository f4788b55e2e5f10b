"""The KV cache of a server: paged blocks, shared prefixes, forks, preemption, compression.

>>> from cukit.kv_cache import KVCacheManager
>>> cache = KVCacheManager(num_blocks=64, block_size=16, num_heads_kv=2, head_dim=64)
>>> cache.allocate("first", range(40)), cache.available_blocks
(0, 61)
"""

from cukit.kv_cache.compression import CompressedKV, compress_kv
from cukit.kv_cache.group_codes import GroupCodes
from cukit.kv_cache.manager import KVCacheManager
from cukit.kv_cache.radix_attention import RadixAttention
from cukit.kv_cache.radix_tree import RadixTree
from cukit.kv_cache.statistics import KVCacheBlock, KVCacheStatistics

__all__ = [
    "CompressedKV",
    "GroupCodes",
    "KVCacheBlock",
    "KVCacheManager",
    "KVCacheStatistics",
    "RadixAttention",
    "RadixTree",
    "compress_kv",
]
