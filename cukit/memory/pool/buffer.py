"""Memory with an owner: freed when the owner goes, movable while nobody holds its address."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from cukit.core.scalars import check_shape
from cukit.errors import ArrayDtypeError, ArrayShapeError, ConfigError, PointerError
from cukit.memory.bookkeeping.movables import NO_ROW
from cukit.memory.bookkeeping.ties import BufferTie, PinTie
from cukit.memory.uninterrupted import Uninterrupted

if TYPE_CHECKING:
    from cukit.memory.bookkeeping.spans import Span
    from cukit.memory.pool.memory_pool import MemoryPool


USER, FOR_GOOD = "user", "for good"
"""Pins: by `DeviceBuffer.pin`, and by the capture of a graph, which knows the address for good."""


class Holder:
    """Ties a buffer to its span, wherever that is moved.

    It does not keep the pool, which would then never be given back.
    """

    __slots__ = ("closed", "note", "pins", "released", "row", "span", "tie")

    def __init__(self, span: Span, note: Callable[[Holder], None]) -> None:
        self.span = span
        self.note = note
        """Movables.note: called without the last pin."""
        self.row = NO_ROW
        """Of Movables."""
        self.pins: list[object] = []
        """USER, FOR_GOOD, an object for each `pinned()`, a tie for each array."""
        self.tie: BufferTie | None = None
        """Notices the end of the buffer."""
        self.closed = False
        self.released = False
        """Given back, or waiting for that."""

    def unpin(self, pin: object) -> bool:
        """Takes this pin away if it is there; returns whether that was the last of a closed buffer,
        so that the memory is to be given back now."""
        for place, one in enumerate(self.pins):
            if one is pin:
                del self.pins[place]
                break
        if not self.pins:
            self.note(self)
        return self.closed and self.close()

    def close(self) -> bool:
        """Returns whether the memory is to be given back now, and not by the last pin."""
        self.closed = True
        now = not self.pins and not self.released
        self.released |= now
        return now


class _Pin:
    """Owned by an array: pins while it lives, and keeps the buffer."""

    __slots__ = ("__weakref__", "_buffer")

    def __init__(self, buffer: DeviceBuffer) -> None:
        self._buffer = buffer


class DeviceBuffer:
    """`size` bytes of a pool; frees itself when closed, left as a context, or collected.

    Its address is known only while it is pinned: an unpinned buffer may be moved by
    `MemoryPool.defragment`. Work that was queued with its address before `unpin` is waited for.

    >>> from cukit.memory import HostProvider, MemoryPool
    >>> pool = MemoryPool(provider=HostProvider())
    >>> with pool.allocate_buffer(4096) as buffer:
    ...     buffer.array((16,), "float32").shape
    (16,)
    """

    def __init__(self, pool: MemoryPool, size: int, holder: Holder) -> None:
        if not isinstance(holder, Holder):
            raise ConfigError("DeviceBuffer: made by MemoryPool.allocate_buffer alone")
        self.pool = pool
        self.size = size
        self._holder = holder
        holder.tie = BufferTie(self, pool.free_from_finalizer)
        holder.tie.target = holder

    def __repr__(self) -> str:
        self.pool._take_in_if_idle()  # pins of arrays that are gone
        state = "closed" if self.closed else "pinned" if self._holder.pins else "movable"
        return f"<DeviceBuffer of {self.size} bytes, {state}>"

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._holder.closed

    def pin(self) -> int:
        """Returns the address, which stays valid until as many `unpin`s as `pin`s.

        Raises PointerError when the buffer is closed.
        """
        try:
            return self.pool._pin(self._holder, USER)
        except KeyboardInterrupt:  # pinned already: nobody will get the address
            self._unpin(USER)
            raise

    def unpin(self) -> None:
        """Takes one `pin` back. Raises PointerError when there is none; arrays keep theirs."""
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
            except KeyboardInterrupt:  # before it began
                self._unpin(pin)
                raise

    def _unpin(self, pin: object) -> None:
        with Uninterrupted():
            if self._holder.unpin(pin):
                self.pool._free_held(self._holder)

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A CuPy array (NumPy with the host provider) over the start of the buffer.

        The array, and every view of it, pins the buffer and keeps its memory.
        """
        extents = check_shape("DeviceBuffer.array", shape)
        kind = _dtype(dtype)
        num_bytes = math.prod(extents) * kind.itemsize
        if num_bytes > self.size:
            raise ArrayShapeError(
                f"{self!r}: an array of {num_bytes} bytes ({extents}, {kind}) is larger"
            )
        owner = _Pin(self)
        tie = PinTie(owner, self.pool.free_from_finalizer)
        tie.target = self._holder
        address = self.pool._pin(self._holder, tie)
        return self.pool.provider.array(address, extents, kind, owner)

    def close(self) -> None:
        """Frees the memory; if arrays over it live, the last of them does. Twice is once."""
        with Uninterrupted():
            if self._holder.close():
                self.pool._free_held(self._holder)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Neither copied nor pickled: two owners would free the same memory."""
        raise PointerError(f"{self!r} cannot be copied; copy an array over it instead")

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _dtype(dtype: Any) -> np.dtype[Any]:
    """Raises ArrayDtypeError for what is no dtype of plain bytes."""
    try:
        kind: np.dtype[Any] = np.dtype(dtype)
    except (TypeError, ValueError):
        kind = np.dtype(object)
    if kind.hasobject or not kind.itemsize:
        raise ArrayDtypeError(
            f"DeviceBuffer.array: dtype must be a dtype of numbers, got {dtype!r}"
        )
    return kind
