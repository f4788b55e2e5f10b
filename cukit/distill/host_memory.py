"""Keeping the CPU's freed memory at hand between training steps."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_KEPT_BYTES = 1 << 30
_LARGEST_HEAP_BYTES = 32 << 20  # the most that glibc accepts


def keep_freed_memory() -> None:
    """Ask glibc not to hand freed arrays back to the system.

    Every step allocates arrays of the same sizes as the one before. By default glibc unmaps a large
    one when it is freed, so the next step gets fresh pages, and a page fault for every 4 KB costs
    more than the arithmetic on them. Elsewhere than on glibc this does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
