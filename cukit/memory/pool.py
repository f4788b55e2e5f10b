"""The memory pool: what users hold. The rooms behind it do the work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from cukit.memory.blocks import Event, Range
from cukit.memory.buffer import DeviceBuffer
from cukit.memory.config import MemoryPoolConfig
from cukit.memory.provider import Provider
from cukit.memory.statistics import DefragmentReport, PoolStatistics


class MemoryPool:
    """A pool of device memory that defragments.

    Streams are given as objects or handles that the provider understands; None is the current one.
    """

    provider: Provider
    config: MemoryPoolConfig

    def __init__(
        self, config: MemoryPoolConfig | None = None, provider: Provider | None = None
    ) -> None:
        """`provider=None`: CUDA virtual memory, else cudaMalloc, else (no GPU) the host."""
        raise NotImplementedError

    def allocate(self, size: int, stream: Any = None) -> int:
        """Returns the address of `size` bytes, a multiple of 512, usable on `stream`."""
        raise NotImplementedError

    def free(self, address: int, stream: Any = None) -> None:
        """Frees memory after the work queued on `stream` (None: the stream it was allocated on)."""
        raise NotImplementedError

    def free_from_finalizer(self, address: int) -> None:
        """`free` for destructors: never blocks, never raises; done later if the pool is busy."""
        raise NotImplementedError

    def used_on(self, address: int, stream: Any) -> None:
        """Tells that work on another stream uses the memory: its reuse will wait for that too."""
        raise NotImplementedError

    def allocate_buffer(self, size: int, stream: Any = None) -> DeviceBuffer:
        """A movable buffer of `size` bytes that frees itself."""
        raise NotImplementedError

    def statistics(self) -> PoolStatistics:
        raise NotImplementedError

    def scope(self) -> AbstractContextManager[Callable[[], PoolStatistics]]:
        """`with pool.scope() as statistics: ...; statistics()`: peaks and counts of the block."""
        raise NotImplementedError

    def defragment(self) -> DefragmentReport:
        raise NotImplementedError

    def trim(self) -> int:
        """Hands wholly free pages back to the device; returns the bytes."""
        raise NotImplementedError

    def ranges(self) -> list[Range]:
        """Everything the pool holds, in address order, consistent at one moment."""
        raise NotImplementedError

    def add_listener(self, listener: Callable[[Event], None]) -> None:
        """`listener` is called for every event, in order, while the pool is locked: it must be
        quick and must not use the pool."""
        raise NotImplementedError

    def remove_listener(self, listener: Callable[[Event], None]) -> None:
        raise NotImplementedError

    def install(self) -> None:
        """Makes the pool CuPy's allocator: cukit.memory.install.install(pool)."""
        raise NotImplementedError

    def uninstall(self) -> None:
        raise NotImplementedError

    def use(self) -> AbstractContextManager[MemoryPool]:
        """CuPy allocates from the pool in this thread inside the block."""
        raise NotImplementedError

    def release_capture(self, capture_id: int) -> None:
        """The graph of a capture is gone: its private memory goes back to the pool."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives everything back to the device. Live memory is an error (ConfigError-like)."""
        raise NotImplementedError
