"""The memory pool of a run, and the memory it used."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

from cukit.errors import ConfigError
from cukit.memory import MemoryPool, PoolStatistics

POOLS = ("cukit", "cupy")
"""Memory pools for a run on a GPU, the default first."""


class RunMemory:
    """The allocator of one run: on a GPU its own pool or CuPy's, on the CPU NumPy's.

    Args:
        xp: numpy or cupy.
        pool: one of POOLS; ignored on the CPU.

    Raises:
        ConfigError: `pool` is not one of POOLS.
    """

    def __init__(self, xp: ModuleType, pool: str = POOLS[0]) -> None:
        if pool not in POOLS:
            raise ConfigError(f"--pool: expected {' or '.join(POOLS)}, got {pool!r}")
        self._xp = xp
        self._pool = MemoryPool() if pool == "cukit" and xp.__name__ == "cupy" else None

    def in_use(self) -> AbstractContextManager[None]:
        """Within the block, arrays of this thread are allocated from this memory."""
        return nullcontext() if self._pool is None else self._pool.use()

    def statistics(self) -> PoolStatistics | None:
        """Statistics of the run's own pool, if it has one."""
        return None if self._pool is None else self._pool.statistics()

    def peak_bytes(self) -> int:
        """Peak memory reserved on the GPU; on the CPU, peak memory of this process."""
        if self._pool is not None:
            return self._pool.statistics().peak_reserved_bytes
        if self._xp.__name__ == "cupy":
            return int(self._xp.get_default_memory_pool().total_bytes())
        try:
            import resource
        except ImportError:  # not on Windows
            return 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(peak) * (1 if sys.platform == "darwin" else 1024)
