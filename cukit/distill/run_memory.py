"""Where the arrays of a run come from, and how much memory they took."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

from cukit.errors import ConfigError
from cukit.memory import MemoryPool, PoolStatistics

POOLS = ("cukit", "cupy")
"""Allocators that a run on a GPU can be given, the default first."""


class RunMemory:
    """The allocator of one run: on a GPU a pool of its own, or CuPy's; on the CPU NumPy's.

    Args:
        xp: numpy or cupy.
        pool: one of POOLS; without a meaning on the CPU.

    Raises:
        ConfigError: no pool has that name.
    """

    def __init__(self, xp: ModuleType, pool: str = POOLS[0]) -> None:
        if pool not in POOLS:
            raise ConfigError(f"--pool: expected {' or '.join(POOLS)}, got {pool!r}")
        self._xp = xp
        self._pool = MemoryPool() if pool == "cukit" and xp.__name__ == "cupy" else None

    def in_use(self) -> AbstractContextManager[None]:
        """Arrays that this thread makes inside the block come from here."""
        return nullcontext() if self._pool is None else self._pool.use()

    def statistics(self) -> PoolStatistics | None:
        """Of the run's own pool, if it has one."""
        return None if self._pool is None else self._pool.statistics()

    def peak_bytes(self) -> int:
        """What was taken from the GPU at most, else the most that this process has held."""
        if self._pool is not None:
            return self._pool.statistics().peak_reserved_bytes
        if self._xp.__name__ == "cupy":
            return int(self._xp.get_default_memory_pool().total_bytes())
        try:
            import resource
        except ImportError:  # Windows keeps no such number
            return 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(peak) * (1 if sys.platform == "darwin" else 1024)
