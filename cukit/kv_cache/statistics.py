"""What a KV cache tells about its blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVCacheBlock:
    """One block as the books have it.

    number: along axis 2 of the slab.
    references: requests that hold it, and one for the prefix tree.
    cached: whether the prefix tree holds it.
    """

    number: int
    references: int
    cached: bool


@dataclass(frozen=True)
class KVCacheStatistics:
    """Blocks: free + evictable + held = all. Tokens: of all prompts, and those found cached."""

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
        """Of the prompts' tokens, those whose keys and values were cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
