"""Block states and statistics of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVCacheBlock:
    """The state of one block.

    number: its index along axis 2 of `KVCacheManager.slab.array`.
    references: requests that hold it, plus one if the prefix tree holds it.
    cached: whether the prefix tree holds it.
    """

    number: int
    references: int
    cached: bool


@dataclass(frozen=True)
class KVCacheStatistics:
    """Block counts (free + evictable + held = all), bytes of swapped requests in host memory,
    tokens of all prompts so far and how many of these were cached, blocks evicted so far."""

    num_blocks: int
    free_blocks: int
    evictable_blocks: int
    held_blocks: int
    cached_blocks: int
    swapped_bytes: int
    prompt_tokens: int
    cached_tokens: int
    evicted_blocks: int

    @property
    def hit_rate(self) -> float:
        """The fraction of prompt tokens whose keys and values were cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
