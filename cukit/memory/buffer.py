"""Memory with an owner: freed when the owner goes, movable while nobody holds its address."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from cukit.errors import ArrayShapeError, PointerError

if TYPE_CHECKING:
    from cukit.memory.pool import MemoryPool
    from cukit.memory.spans import Span


class Holder:
    """Ties a buffer to its span, wherever that is moved.

    Pins and the right to free are list entries, for adding and taking those is atomic: a destructor
    may run at any moment and must not wait for a lock.
    """

    __slots__ = ("_may_free", "_release", "closed", "pins", "span")

    def __init__(self, span: Span, release: Callable[[Holder], None]) -> None:
        self.span = span
        self.pins: list[None] = []
        self.closed = False
        self._release = release
        self._may_free = [None]

    def unpin(self) -> None:
        """One pin less; the last one of a closed buffer frees it."""
        self.pins.pop()
        if self.closed:
            self.close()

    def close(self) -> None:
        """Frees the memory, or leaves that to the last pin."""
        self.closed = True
        if self.pins:
            return
        try:
            self._may_free.pop()
        except IndexError:
            return
        self._release(self)


class _Pin:
    """Owned by an array: pins while it lives, and keeps the buffer."""

    def __init__(self, buffer: DeviceBuffer, holder: Holder) -> None:
        self._buffer = buffer
        weakref.finalize(self, holder.unpin).atexit = False


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
        self.pool = pool
        self.size = size
        self._holder = holder
        self._pins: list[None] = []
        """One for each `pin` of the user; the holder's are these and those of arrays."""
        self._finalizer = weakref.finalize(self, holder.close)
        self._finalizer.atexit = False

    def __repr__(self) -> str:
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
        address = self.pool._pin(self._holder)
        self._pins.append(None)
        return address

    def unpin(self) -> None:
        """Takes one `pin` back. Raises PointerError when there is none; arrays keep theirs."""
        try:
            self._pins.pop()
        except IndexError:
            raise PointerError(f"{self!r}: unpin without pin") from None
        self._holder.unpin()

    @contextmanager
    def pinned(self) -> Iterator[int]:
        """`with buffer.pinned() as address:`"""
        address = self.pin()
        try:
            yield address
        finally:
            self.unpin()

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A CuPy array (NumPy with the host provider) over the start of the buffer.

        The array, and every view of it, pins the buffer and keeps its memory.
        """
        address = self.pool._pin(self._holder)
        owner = _Pin(self, self._holder)
        array = self.pool.provider.array(address, shape, dtype, owner)
        if array.nbytes > self.size:
            raise ArrayShapeError(
                f"{self!r}: an array of {array.nbytes} bytes ({shape}, {dtype}) is larger"
            )
        return array

    def close(self) -> None:
        """Frees the memory; if arrays over it live, the last of them does. Twice is once."""
        self._holder.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Neither copied nor pickled: two owners would free the same memory."""
        raise PointerError(f"{self!r} cannot be copied; copy an array over it instead")

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
