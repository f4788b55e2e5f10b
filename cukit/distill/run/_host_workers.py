"""Training on all cores of a CPU: one thread for each part of a batch.

NumPy's matrix products can use all cores, but its elementwise operations use one. The threads of a
small product synchronise so often that any other program on the machine stalls them. One thread per
part of the batch keeps all cores busy and synchronises once per step.
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
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """Within the block, NumPy's matrix products run on the calling thread."""
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


def keep_freed_memory() -> None:
    """Make glibc keep freed memory instead of returning it to the system.

    Every step allocates arrays of the same sizes. By default glibc unmaps a large array when it is
    freed, so the next step gets new pages, and the page fault for each 4 KiB costs more than the
    arithmetic on the page. Does nothing without glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_ARENA_MAX, 1)  # one arena: the heaps of other threads would still be unmapped
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
