"""Memory with an owner: freed when the owner goes, movable while nobody holds its address."""

from __future__ import annotations

from typing import Any


class DeviceBuffer:
    """`size` bytes of a pool; frees itself when closed, left as a context, or collected.

    Its address is known only while it is pinned; an unpinned buffer may be moved by
    `MemoryPool.defragment`.
    """

    size: int

    def pin(self) -> int:
        """Returns the address, which stays valid until as many `unpin`s as `pin`s."""
        raise NotImplementedError

    def unpin(self) -> None:
        raise NotImplementedError

    def pinned(self) -> Any:
        """`with buffer.pinned() as address:`"""
        raise NotImplementedError

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A CuPy array (NumPy with the host provider) over the buffer; pins it while it lives."""
        raise NotImplementedError

    def close(self) -> None:
        """Frees the memory now. Further use raises."""
        raise NotImplementedError

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
