"""Sequential copies within one memory, and checks of guard pages against patterns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Array = Any


def batched_copy(memory: Array, moves: Iterable[tuple[int, int, int]]) -> Array:
    """`memory[d : d + n] = memory[s : s + n]` for each `(d, s, n)` in order, in place."""
    for destination, source, size in moves:
        memory[destination : destination + size] = memory[source : source + size].copy()
    return memory


def guard_pages(memory: Array, pages: Array, page_bytes: int) -> Array:
    """Counts the bytes of each page, outside `[begin, end)`, that differ from its pattern `before`,
    then fills the page with its pattern `after`, in place.

    memory: uint8. pages: int64 [pages, 5]: address, begin and end (indices of `memory`), before,
    after; pattern 0 skips the check or the fill. Returns int32 [pages, 3]: the number of differing
    bytes, page_bytes - the offset of the first, the offset of the last + 1; zeros if none differ.
    """
    damage = np.zeros((len(pages), 3), np.int32)
    offsets = np.arange(page_bytes)
    for found, (address, begin, end, before, after) in zip(damage, pages.tolist(), strict=True):
        page = memory[address : address + page_bytes]
        if before:
            owned = (begin <= address + offsets) & (address + offsets < end)
            (changed,) = np.nonzero(~owned & (page != guard_pattern(before, page_bytes)))
            if changed.size:
                found[:] = changed.size, page_bytes - changed[0], changed[-1] + 1
        if after:
            page[:] = guard_pattern(after, page_bytes)
    return damage


def guard_pattern(pattern: int, page_bytes: int) -> Array:
    """uint8 [page_bytes]: the 32-bit word `pattern` repeated; for a pattern from 2^32 on,
    hashes of the word offsets with the seed `pattern >> 32`."""
    words = np.arange(page_bytes // 4, dtype=np.uint32)
    seed = pattern >> 32
    if not seed:
        words[:] = pattern
    else:
        words ^= np.uint32(seed)
        words = (words ^ (words >> 16)) * np.uint32(0x7FEB352D)
        words = (words ^ (words >> 15)) * np.uint32(0x846CA68B)
        words ^= words >> 16
    return words.view(np.uint8)
