"""The pools to replay logs on: cukit's, CuPy's two, RMM's, and PyTorch's in two configurations.

Each is configured as its documentation recommends; a limit is set through the pool's own option.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cukit.core.device import gpu_available
from cukit.errors import (
    ConfigError,
    MissingDependencyError,
    OutOfMemoryError,
    UnsupportedDeviceError,
)
from cukit.memory.pool.config import MemoryPoolConfig
from cukit.memory.pool.memory_pool import MemoryPool
from cukit.memory.replay.replay import ReplayPool

DRIVER_CALL_NS = 5_000
"""Less than the time of any call that takes memory from the device."""


def make_pool(name: str, num_streams: int, limit: int | None) -> ReplayPool:
    """A new, empty pool. Raises ConfigError for an unknown name, MissingDependencyError or
    UnsupportedDeviceError."""
    if name not in POOLS:
        raise ConfigError(f"no pool is called {name!r}: expected one of {', '.join(POOLS)}")
    if name != "cukit" and not gpu_available():
        raise UnsupportedDeviceError(f"{name} needs a GPU")
    return POOLS[name](num_streams, limit)


class CukitPool:
    """cukit's pool: CUDA virtual memory, or host pages without a GPU."""

    out_of_memory = (OutOfMemoryError,)
    growth_ns = 0

    def __init__(self, num_streams: int, limit: int | None) -> None:
        self._pool = MemoryPool(MemoryPoolConfig(max_pool_size=limit))
        self._meter = ProviderMeter(self._pool.provider)
        self._streams: list[Any] = [None]  # the current stream, as in most programs
        if num_streams > 1:
            streams = _streams(num_streams) if gpu_available() else range(num_streams)
            self._streams = list(streams)

    def allocate(self, size: int, stream: int) -> int:
        return self._pool.allocate(size, self._streams[stream])

    def free(self, pointer: int, stream: int) -> None:
        self._pool.free(pointer, self._streams[stream])

    def reserved_bytes(self) -> int:
        return self._meter.reserved_bytes()

    def close(self) -> None:
        self._pool.close()


class ProviderMeter:
    """Counts the bytes that a pool has taken from its provider; does not slow down other calls."""

    def __init__(self, provider: Any) -> None:
        self._bytes = 0
        page = provider.page_bytes
        if provider.can_remap:
            large = page * provider.large_pages
            self._count(provider, "create_pages", lambda count: count * page)
            self._count(provider, "create_large_pages", lambda count: count * large)
            self._count(provider, "destroy_pages", lambda pages: -len(pages) * page)
        else:
            self._count(provider, "reserve", lambda size: size)
            self._count(provider, "release", lambda _, size: -size)

    def reserved_bytes(self) -> int:
        return self._bytes

    def _count(self, provider: Any, method: str, change: Callable[..., int]) -> None:
        inner = getattr(provider, method)

        def counted(*args: Any) -> Any:
            result = inner(*args)
            self._bytes += change(*args)
            return result

        setattr(provider, method, counted)


class _CupyPool:
    """Common part of CuPy's two pools: memory is freed by dropping its last reference."""

    growth_ns = 0

    def __init__(self, num_streams: int) -> None:
        import cupy

        self._cuda = cupy.cuda
        self.out_of_memory = (cupy.cuda.memory.OutOfMemoryError,)
        self._streams = _streams(num_streams)
        self._current = 0
        self._held: dict[int, Any] = {}
        self._malloc: Callable[[int], Any]

    def allocate(self, size: int, stream: int) -> int:
        if stream != self._current:
            self._switch(stream)
        memory = self._malloc(size)
        pointer = int(memory.ptr)
        self._held[pointer] = memory
        return pointer

    def free(self, pointer: int, stream: int) -> None:
        if stream != self._current:
            self._switch(stream)
        del self._held[pointer]

    def _switch(self, stream: int) -> None:
        self._streams[stream].use()
        self._current = stream


class CupyPool(_CupyPool):
    """cupy.cuda.MemoryPool."""

    def __init__(self, num_streams: int, limit: int | None) -> None:
        super().__init__(num_streams)
        self._has_grown = False
        self._reserved = 0
        self._pool = self._cuda.MemoryPool(self._grow)
        if limit is not None:
            self._pool.set_limit(size=limit)
        self._malloc = self._pool.malloc

    def _grow(self, size: int) -> Any:
        memory = self._cuda.MemoryPointer(self._cuda.Memory(size), 0)
        self._has_grown = True
        return memory

    def reserved_bytes(self) -> int:
        if self._has_grown:  # total_bytes() visits all free blocks
            self._has_grown = False
            self._reserved = int(self._pool.total_bytes())
        return self._reserved

    def close(self) -> None:
        self._streams[0].use()
        self._pool.free_all_blocks()


class CupyAsyncPool(_CupyPool):
    """cupy.cuda.MemoryAsyncPool: the driver's own pool."""

    def __init__(self, num_streams: int, limit: int | None) -> None:
        super().__init__(num_streams)
        self._pool = self._cuda.MemoryAsyncPool("default")
        self._pool.set_limit(size=limit or 0)
        self._malloc = self._pool.malloc

    def reserved_bytes(self) -> int:
        return int(self._pool.total_bytes())

    def close(self) -> None:
        self._streams[0].use()
        self._cuda.Device().synchronize()
        self._pool.free_all_blocks()


class RmmPool:
    """RMM's pool over cudaMalloc. With a limit, the initial size is the limit, as is usual."""

    out_of_memory = (MemoryError,)
    growth_ns = 0

    def __init__(self, num_streams: int, limit: int | None) -> None:
        try:
            import rmm
            from rmm.pylibrmm.stream import Stream
        except ImportError as error:
            raise MissingDependencyError(
                f"RMM is not installed ({error}): pip install rmm-cu13"
            ) from None
        upstream = rmm.mr.CudaMemoryResource()
        size = limit and limit // 256 * 256
        initial = size or 0
        self._pool = rmm.mr.PoolMemoryResource(upstream, initial, size)
        self._cupy_streams = _streams(num_streams)
        self._streams = [Stream(stream) for stream in self._cupy_streams]
        self._sizes: dict[int, int] = {}

    def allocate(self, size: int, stream: int) -> int:
        pointer = int(self._pool.allocate(size, self._streams[stream]))
        self._sizes[pointer] = size
        return pointer

    def free(self, pointer: int, stream: int) -> None:
        self._pool.deallocate(pointer, self._sizes.pop(pointer), self._streams[stream])

    def reserved_bytes(self) -> int:
        return int(self._pool.pool_size())

    def close(self) -> None:
        del self._pool


class TorchPool:
    """PyTorch's caching allocator."""

    growth_ns = DRIVER_CALL_NS
    settings = ""

    def __init__(self, num_streams: int, limit: int | None) -> None:
        try:
            import torch
        except ImportError as error:
            raise MissingDependencyError(
                f"PyTorch is not installed ({error}): pip install torch"
            ) from None
        self._cuda = torch.cuda
        if self.settings:
            torch.cuda.memory._set_allocator_settings(self.settings)
        self.out_of_memory = (torch.cuda.OutOfMemoryError,)
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else limit / total)
        self._streams = [torch.cuda.current_stream().cuda_stream]
        self._owned = [torch.cuda.Stream() for _ in range(num_streams - 1)]
        self._streams += [stream.cuda_stream for stream in self._owned]

    def allocate(self, size: int, stream: int) -> int:
        return int(self._cuda.caching_allocator_alloc(size, 0, self._streams[stream]))

    def free(self, pointer: int, stream: int) -> None:
        self._cuda.caching_allocator_delete(pointer)

    def reserved_bytes(self) -> int:
        return int(self._cuda.memory_reserved())

    def close(self) -> None:
        self._cuda.empty_cache()


class TorchExpandablePool(TorchPool):
    """PyTorch's caching allocator with expandable segments (virtual memory)."""

    settings = "expandable_segments:True"


def _streams(count: int) -> list[Any]:
    """CuPy's default stream and `count - 1` new streams."""
    import cupy

    return [cupy.cuda.Stream.null, *(cupy.cuda.Stream() for _ in range(count - 1))]


POOLS: dict[str, Callable[[int, int | None], ReplayPool]] = {
    "cukit": CukitPool,
    "cupy": CupyPool,
    "cupy-async": CupyAsyncPool,
    "rmm": RmmPool,
    "torch": TorchPool,
    "torch-expandable": TorchExpandablePool,
}
