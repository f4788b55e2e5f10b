"""Both cores of a CPU: a batch in parts, each on a thread of its own.

NumPy's matrix products can use all cores, its elementwise work uses one; and threads inside of a
small product wait for one another so often that any other program on the machine stalls them. A
thread for each part of the batch keeps all cores busy with both, and meets the others once a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

import threadpoolctl

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # <malloc.h>
_KEPT_BYTES = 1 << 30
_LARGEST_HEAP_BYTES = 32 << 20  # the most that glibc accepts


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """Within the block, NumPy's matrix products stay on the thread that calls them."""
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


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
    mallopt(_M_ARENA_MAX, 1)  # heaps of other threads would still be unmapped
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
