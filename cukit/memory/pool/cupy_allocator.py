"""The pool as CuPy's allocator: all CuPy arrays, and so all of cukit's, are allocated from it.

A program that allocates an array of a size that it has freed before does not need the pool's lock:
the block stays live in the pool's records and only its owner changes. When an array's memory
object is destroyed, its OwnerRef is appended to the queue of its stream and size
(bookkeeping/owner_refs.py). Popping the reference is atomic and makes the caller the block's owner.
Every other request goes through MemoryPool.allocate, which drains the queues on a miss.

Ctrl-C: Python handles signals after calls, at function starts and at backward jumps. A reference
returned by a call could therefore be lost before it is assigned to a name. So references are popped
by a `for` statement, which assigns the loop variable without a signal check in between; and until
the block has its next reference, any exception puts the old one back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Container, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from cukit.core.device import require_cupy
from cukit.errors import ConfigError, OutOfMemoryError
from cukit.memory.bookkeeping.owner_refs import OwnerRef, Queues
from cukit.memory.pool.counters import Counters
from cukit.memory.pool.listeners import Listeners
from cukit.memory.providers.cuda_device import CudaDevice
from cukit.memory.providers.provider import Provider
from cukit.memory.uninterrupted import Uninterrupted

Allocator = Callable[[int], Any]
"""Bytes -> cupy.cuda.MemoryPointer."""


class Pool(Protocol):
    """The part of MemoryPool that the allocator uses."""

    provider: Provider
    _queues: Queues
    _listeners: Listeners
    _counters: Counters
    _device_id: int
    _current_stream: Callable[[], Hashable]
    _uncaptured: Container[Hashable]
    _capture_id: Callable[[Hashable], int | None]

    def allocate(self, size: int, stream: Any = None, _owner: Any = None) -> int: ...

    def _sibling(self, device_id: int) -> Any: ...


# Installing ---------------------------------------------------------------------------------------


def install(pool: Pool) -> None:
    """Makes `pool` CuPy's allocator in all threads, until `uninstall`.

    On every other GPU, a pool with the same configuration is created when CuPy first allocates
    there; `pools_of` returns these pools. Existing arrays stay where they are.

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


def uninstall(pool: Pool) -> None:
    """Reinstalls CuPy's own pool. Arrays in `pool` stay valid. Raises ConfigError unless `pool` is
    installed."""
    if _installed != [pool]:
        raise ConfigError("uninstall: this pool is not installed")
    cupy = require_cupy("installing a pool")
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
    _installed.clear()


@contextmanager
def use(pool: Pool) -> Iterator[None]:
    """Inside the block, CuPy allocates from `pool` in this thread."""
    allocator = _allocator(pool)
    with require_cupy("using a pool").cuda.using_allocator(allocator):
        yield


_installed: list[Pool] = []

P = TypeVar("P", bound=Pool)
_FAMILY = "_family_of_install"


def siblings_of(pool: P) -> dict[int, P]:
    """Device ID -> pool: `pool` itself, and the pools created for other GPUs."""
    family = vars(pool).get(_FAMILY)
    return dict(family.pools) if family else {pool.provider.device_id: pool}


class _Family(Generic[P]):
    """An allocator for all GPUs: a pool and its siblings, which are created on first use."""

    def __init__(self, pool: P) -> None:
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
        with self._lock:
            if device_id not in self._allocators:
                sibling = self._pool._sibling(device_id)
                self.pools[device_id] = sibling
                self._allocators[device_id] = _single(sibling)
            return self._allocators[device_id]


def _allocator(pool: Pool) -> Allocator:
    if not isinstance(pool.provider, CudaDevice):
        raise ConfigError(f"{pool!r}: only the pool of a GPU can be CuPy's allocator")
    if require_cupy("a pool").cuda.runtime.getDeviceCount() == 1:
        return _single(pool)
    return vars(pool).setdefault(_FAMILY, _Family(pool))  # type: ignore[no-any-return]


# Allocating ---------------------------------------------------------------------------------------


def _single(pool: Pool) -> Allocator:
    """The allocator of one device, which every `cupy.empty` calls."""
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


def quick_allocator(
    pool: Pool, memory_type: Any, pointer_type: Any, slowly: Callable[[int], Any]
) -> Callable[[int], Any]:
    """An allocator for CuPy: bytes -> a pointer to memory that frees itself.

    memory_type: address, size, owner and device -> CuPy's memory object.
    pointer_type: memory and offset -> CuPy's pointer.
    slowly: the same allocator through MemoryPool.allocate.
    """
    by_stream, device_id = pool._queues.by_stream, pool._device_id
    listeners, counters = pool._listeners, pool._counters
    current_stream, uncaptured, capture_id = (
        pool._current_stream, pool._uncaptured, pool._capture_id,
    )  # fmt: skip

    def allocate(size: int) -> Any:
        ref = None
        append: Any = None
        try:
            key = current_stream()
            refs, popped, append = by_stream[key][size]
            if (
                refs
                and (seen := refs[-1]).target.stream == key
                and (key in uncaptured or capture_id(key) is None)
                and not (seen.target.uses or listeners.active)
            ):
                for ref in popped:  # noqa: B007
                    break
                span = seen.target
                if ref is seen and span.owner_ref is ref:
                    memory = memory_type(span.address, size, pool, device_id)
                    renewed = OwnerRef(memory, append)
                    renewed.target = span
                    span.owner_ref = renewed
                    counters.hits += 1  # no other thread runs between these bytecodes
                    return pointer_type(memory, 0)
        except BaseException as error:
            if ref is not None and ref.target.owner_ref is ref:
                _put_back(append, ref)
            # LookupError, TypeError: there is no such queue, or another thread has emptied it.
            if not isinstance(error, (LookupError, TypeError)):
                raise
        else:
            if ref is not None:  # not the reference that was checked: another thread took that one
                other, ref = ref, None
                append(other)
        return slowly(size)

    return allocate


def _put_back(append: Callable[[Any], None], ref: Any) -> None:
    with Uninterrupted():
        append(ref)


@functools.cache
def _pool_memory() -> Any:
    """A CuPy memory class whose `owner` is the pool, so that the pool exists as long as its memory.
    The class supports weak references, through which an OwnerRef detects the destruction."""

    class PoolMemory(require_cupy("a pool").cuda.UnownedMemory):  # type: ignore[misc]
        __slots__ = ("__weakref__",)

    return PoolMemory


@functools.cache
def _out_of_memory_of_both() -> type[OutOfMemoryError]:
    """A subclass of cukit's and of CuPy's OutOfMemoryError, so handlers of either catch it."""
    cupys = require_cupy("a pool").cuda.memory.OutOfMemoryError
    return type("OutOfMemoryError", (OutOfMemoryError, cupys), {"__module__": __name__})
