"""DeviceBuffer: memory that is freed with its owner, and movable while it is not pinned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import numpy as np

from cukit.core.scalars import check_shape
from cukit.errors import ArrayDtypeError, ArrayShapeError, ConfigError, PointerError
from cukit.memory.bookkeeping.owner_refs import BufferRef, PinRef
from cukit.memory.bookkeeping.spans import USER, Holder
from cukit.memory.providers.provider import Provider
from cukit.memory.uninterrupted import Uninterrupted


class Pool(Protocol):
    """The part of MemoryPool that buffers use."""

    provider: Provider
    free_from_finalizer: Callable[[Any], None]

    def _pin(self, holder: Holder, pin: object) -> int: ...

    def _free_buffer(self, holder: Holder) -> None: ...

    def _drain_if_idle(self) -> None: ...


class _Pin:
    """Owned by an array: pins the buffer, and keeps it alive, as long as the array exists."""

    __slots__ = ("__weakref__", "_buffer")

    def __init__(self, buffer: DeviceBuffer) -> None:
        self._buffer = buffer


class DeviceBuffer:
    """`size` bytes of a pool, freed on `close`, at the end of a `with` block, or when collected.

    The address is available only while the buffer is pinned: `MemoryPool.defragment` may move an
    unpinned buffer, after waiting for the work that was queued before `unpin`.

    >>> from cukit.memory import HostProvider, MemoryPool
    >>> pool = MemoryPool(provider=HostProvider())
    >>> with pool.allocate_buffer(4096) as buffer:
    ...     buffer.array((16,), "float32").shape
    (16,)
    """

    def __init__(self, pool: Pool, size: int, holder: Holder) -> None:
        if not isinstance(holder, Holder):
            raise ConfigError("DeviceBuffer: only MemoryPool.allocate_buffer creates buffers")
        self.pool = pool
        self.size = size
        self._holder = holder
        holder.owner_ref = BufferRef(self, pool.free_from_finalizer)
        holder.owner_ref.target = holder

    def __repr__(self) -> str:
        self.pool._drain_if_idle()  # removes the pins of destroyed arrays
        state = "closed" if self.closed else "pinned" if self._holder.pins else "movable"
        return f"<DeviceBuffer of {self.size} bytes, {state}>"

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._holder.closed

    def pin(self) -> int:
        """Returns the address, which stays valid until every `pin` has been undone by an `unpin`.

        Raises PointerError when the buffer is closed.
        """
        try:
            return self.pool._pin(self._holder, USER)
        except KeyboardInterrupt:  # already pinned, but the caller never gets the address
            self._unpin(USER)
            raise

    def unpin(self) -> None:
        """Undoes one `pin`. Raises PointerError if there is none; pins of arrays do not count."""
        if USER not in self._holder.pins:
            raise PointerError(f"{self!r}: unpin without pin")
        self._unpin(USER)

    @contextmanager
    def pinned(self) -> Iterator[int]:
        """`with buffer.pinned() as address:`"""
        pin = object()
        try:
            yield self.pool._pin(self._holder, pin)
        finally:
            try:
                self._unpin(pin)
            except KeyboardInterrupt:  # interrupted before `_unpin` began
                self._unpin(pin)
                raise

    def _unpin(self, pin: object) -> None:
        with Uninterrupted():
            if self._holder.unpin(pin):
                self.pool._free_buffer(self._holder)

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A CuPy array (NumPy with the host provider) over the start of the buffer.

        The array and all its views pin the buffer and keep its memory allocated.
        """
        extents = check_shape("DeviceBuffer.array", shape)
        kind = _dtype(dtype)
        num_bytes = math.prod(extents) * kind.itemsize
        if num_bytes > self.size:
            raise ArrayShapeError(
                f"{self!r}: an array of {num_bytes} bytes ({extents}, {kind}) is larger than the "
                "buffer"
            )
        owner = _Pin(self)
        ref = PinRef(owner, self.pool.free_from_finalizer)
        ref.target = self._holder
        address = self.pool._pin(self._holder, ref)
        return self.pool.provider.array(address, extents, kind, owner)

    def close(self) -> None:
        """Frees the memory, or defers the free until the last pin is removed and the last array
        over the buffer is destroyed. Repeated calls have no effect."""
        with Uninterrupted():
            if self._holder.close():
                self.pool._free_buffer(self._holder)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses copying and pickling: two owners would free the same memory."""
        raise PointerError(f"{self!r} cannot be copied; copy an array over it instead")

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _dtype(dtype: Any) -> np.dtype[Any]:
    """Raises ArrayDtypeError for object and zero-byte dtypes, and values that are not dtypes."""
    try:
        kind: np.dtype[Any] = np.dtype(dtype)
    except (TypeError, ValueError):
        kind = np.dtype(object)
    if kind.hasobject or not kind.itemsize:
        raise ArrayDtypeError(
            f"DeviceBuffer.array: dtype must be a dtype of numbers, got {dtype!r}"
        )
    return kind
