"""One pool per device, and raw allocation from the default pools."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from cukit.core.device import gpu_available
from cukit.core.scalars import check_integer
from cukit.errors import ConfigError, PointerError
from cukit.memory.pool.config import MemoryPoolConfig
from cukit.memory.pool.cupy_allocator import siblings_of
from cukit.memory.pool.memory_pool import MemoryPool
from cukit.memory.providers.default import default_provider
from cukit.memory.providers.provider import Provider


class DevicePools:
    """One pool per device, all with the same configuration, created on first use."""

    def __init__(
        self,
        config: MemoryPoolConfig | None = None,
        make_provider: Callable[[int], Provider] | None = None,
    ) -> None:
        """`make_provider`: device number -> provider; None: MemoryPool's default."""
        if config is None:
            config = MemoryPoolConfig()
        if not isinstance(config, MemoryPoolConfig):
            raise ConfigError(
                f"DevicePools: config must be a MemoryPoolConfig or None, got {config!r}"
            )
        if make_provider is not None and not callable(make_provider):
            raise ConfigError(
                f"DevicePools: make_provider must be a function or None, got {make_provider!r}"
            )
        self._config = config
        self._make_provider = make_provider or (
            lambda device_id: default_provider(device_id, config.max_pool_size)
        )
        self._lock = threading.Lock()
        self._pools: dict[int, MemoryPool] = {}

    def pool(self, device_id: int | None = None) -> MemoryPool:
        """The pool of a device; None is the current one."""
        if device_id is not None:
            check_integer("DevicePools", "device_id", device_id, least=0)
        number = _current_device() if device_id is None else device_id
        pool = self._pools.get(number)
        if pool is None:
            with self._lock:
                pool = self._pools.get(number)
                if pool is None:
                    pool = MemoryPool(self._config, self._make_provider(number))
                    self._pools[number] = pool
        return pool

    def allocate(self, size: int, stream: Any = None) -> int:
        """Allocates on the current device; see MemoryPool.allocate."""
        return self.pool().allocate(size, stream)

    def free(self, address: int, stream: Any = None) -> None:
        """Frees memory from `allocate`, on any device. Raises PointerError for other addresses."""
        pools = list(self._pools.values())
        for pool in pools:
            if pool.owns(address):
                pool.free(address, stream)
                return
        if not pools:
            raise PointerError(f"memory pool: free of {address:#x}: nothing was allocated yet")
        pools[0].free(address, stream)


def pools_of(pool: MemoryPool) -> dict[int, MemoryPool]:
    """By device ID: the pool itself, and those that its CuPy allocator created on other GPUs."""
    if not isinstance(pool, MemoryPool):
        raise ConfigError(f"pools_of: pool must be a MemoryPool, got {pool!r}")
    return siblings_of(pool)


def _current_device() -> int:
    if not gpu_available():
        return 0
    import cupy

    return int(cupy.cuda.runtime.getDevice())


_default = DevicePools()


def default_pool(device_id: int | None = None) -> MemoryPool:
    """The pool of `memory_pool_allocate` on a device; None is the current one."""
    return _default.pool(device_id)


def memory_pool_allocate(size: int, stream: Any = None) -> int:
    """Returns the address of `size` bytes on the current device, aligned to 512.

    Without a GPU, allocates host memory. Raises OutOfMemoryError.

    >>> address = memory_pool_allocate(1000)
    >>> memory_pool_free(address)
    """
    return _default.allocate(size, stream)


def memory_pool_free(address: int, stream: Any = None) -> None:
    """Frees memory from `memory_pool_allocate`, after the work queued on `stream` (None: the stream
    it was allocated on). Raises PointerError for any other address."""
    _default.free(address, stream)
