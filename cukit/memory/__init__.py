"""A memory manager for CuPy that defragments.

>>> from cukit.memory import HostProvider, MemoryPool, MemoryPoolConfig
>>> pool = MemoryPool(MemoryPoolConfig(max_pool_size=1 << 30), HostProvider())
>>> address = pool.allocate(4096)
>>> pool.free(address)
"""

from cukit.memory.blocks import Block, Event, Frame, Range
from cukit.memory.buffer import DeviceBuffer
from cukit.memory.compaction import batched_copy
from cukit.memory.config import MemoryPoolConfig
from cukit.memory.cuda_malloc import CudaMalloc
from cukit.memory.devices import (
    DevicePools,
    default_pool,
    memory_pool_allocate,
    memory_pool_free,
)
from cukit.memory.host import HostProvider
from cukit.memory.install import pools_of
from cukit.memory.oom import OutOfMemoryReport
from cukit.memory.pool import MemoryPool
from cukit.memory.provider import DeviceOutOfMemory, Move, Provider
from cukit.memory.statistics import DefragmentReport, PoolStatistics, StreamStatistics
from cukit.memory.vmm import CudaVirtualMemory

__all__ = [
    "Block",
    "CudaMalloc",
    "CudaVirtualMemory",
    "DefragmentReport",
    "DeviceBuffer",
    "DeviceOutOfMemory",
    "DevicePools",
    "Event",
    "Frame",
    "HostProvider",
    "MemoryPool",
    "MemoryPoolConfig",
    "Move",
    "OutOfMemoryReport",
    "PoolStatistics",
    "Provider",
    "Range",
    "StreamStatistics",
    "batched_copy",
    "default_pool",
    "memory_pool_allocate",
    "memory_pool_free",
    "pools_of",
]
