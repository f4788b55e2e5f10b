"""The pool as CuPy's allocator: every CuPy array, and so everything in cukit, comes from it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cukit.core.device import require_cupy
from cukit.errors import ConfigError, OutOfMemoryError
from cukit.memory.pool.handover import quick_allocator
from cukit.memory.providers.cuda_device import CudaDevice

if TYPE_CHECKING:
    from cukit.memory.pool.memory_pool import MemoryPool

Allocator = Callable[[int], Any]
"""Bytes -> cupy.cuda.MemoryPointer."""


def install(pool: MemoryPool) -> None:
    """Makes `pool` CuPy's allocator in all threads, until `uninstall`.

    On other GPUs than the pool's own, pools with the same configuration are made when CuPy first
    allocates there; `pools_of` names them. Arrays that exist already stay where they are.

    Raises:
        ConfigError: the pool is not on a GPU, or this thread is inside `use` (or CuPy's
            `using_allocator`).
    """
    allocator = _allocator(pool)
    cuda = require_cupy("installing a pool").cuda
    try:
        cuda.set_allocator(allocator)
    except ValueError as error:
        raise ConfigError(f"install: {error}") from None
    _installed[:] = [pool]


def uninstall(pool: MemoryPool) -> None:
    """Gives CuPy its own pool back. Arrays in `pool` stay valid. Raises ConfigError if another
    pool, or none, is installed."""
    if _installed != [pool]:
        raise ConfigError("uninstall: this pool is not installed")
    cupy = require_cupy("installing a pool")
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
    _installed.clear()


@contextmanager
def use(pool: MemoryPool) -> Iterator[None]:
    """CuPy allocates from `pool` in this thread, inside the block."""
    allocator = _allocator(pool)
    with require_cupy("using a pool").cuda.using_allocator(allocator):
        yield


def pools_of(pool: MemoryPool) -> dict[int, MemoryPool]:
    """By device: the pool itself, and those made beside it for other GPUs."""
    from cukit.memory.pool.memory_pool import MemoryPool

    if not isinstance(pool, MemoryPool):
        raise ConfigError(f"pools_of: pool must be a MemoryPool, got {pool!r}")
    family = vars(pool).get(_FAMILY)
    return dict(family.pools) if family else {pool.provider.device_id: pool}


_installed: list[MemoryPool] = []
_FAMILY = "_family_of_install"


class _Family:
    """A pool and its siblings on other GPUs."""

    def __init__(self, pool: MemoryPool) -> None:
        self.pools = {pool.provider.device_id: pool}
        self._pool = pool
        self._lock = threading.Lock()
        self._allocators = {pool.provider.device_id: _single(pool)}
        self._current_device = require_cupy("a pool").cuda.runtime.getDevice

    def __call__(self, size: int) -> Any:
        allocate = self._allocators.get(self._current_device())
        if allocate is None:
            allocate = self._extend(self._current_device())
        return allocate(size)

    def _extend(self, device_id: int) -> Allocator:
        pool = self._pool
        with self._lock:
            if device_id not in self._allocators:
                provider: Any = pool.provider
                sibling = type(pool)(pool.config, provider.for_device(device_id))
                self.pools[device_id] = sibling
                self._allocators[device_id] = _single(sibling)
            return self._allocators[device_id]


def _allocator(pool: MemoryPool) -> Allocator:
    if not isinstance(pool.provider, CudaDevice):
        raise ConfigError(f"{pool!r}: only the pool of a GPU can be CuPy's allocator")
    if require_cupy("a pool").cuda.runtime.getDeviceCount() == 1:
        return _single(pool)
    return vars(pool).setdefault(_FAMILY, _Family(pool))  # type: ignore[no-any-return]


def _single(pool: MemoryPool) -> Allocator:
    """The allocator of one device: what every `cupy.empty` runs through."""
    cuda = require_cupy("a pool").cuda
    memory_pointer, unowned_memory = cuda.MemoryPointer, cuda.UnownedMemory
    pool_memory = _pool_memory()
    device_id = pool.provider.device_id
    allocate = pool.allocate

    def allocate_slowly(size: int) -> Any:
        if size == 0:
            return memory_pointer(unowned_memory(0, 0, None, device_id), 0)
        try:
            return memory_pointer(allocate(size, None, pool_memory), 0)
        except OutOfMemoryError as error:
            error.__class__ = _out_of_memory_of_both()
            raise

    return quick_allocator(pool, pool_memory, memory_pointer, allocate_slowly)


@functools.cache
def _pool_memory() -> Any:
    """CuPy's kind of memory, owned by a pool, which lives as long as CuPy uses it. A tie notices
    its end."""

    class PoolMemory(require_cupy("a pool").cuda.UnownedMemory):  # type: ignore[misc]
        __slots__ = ("__weakref__",)

    return PoolMemory


@functools.cache
def _out_of_memory_of_both() -> type[OutOfMemoryError]:
    """OutOfMemoryError for those who wait for ours and for those who wait for CuPy's."""
    cupys = require_cupy("a pool").cuda.memory.OutOfMemoryError
    return type("OutOfMemoryError", (OutOfMemoryError, cupys), {"__module__": __name__})
