"""A memory pool for CuPy that defragments.

`pool/` contains the pool, `bookkeeping/` its records, `providers/` the sources of memory, `replay/`
replays of allocation logs. The other tools are imported by path: `cukit.memory.history`, `leaks`,
`log`, `picture`, `recorder`, `snapshot` and `cuda_guard`.

>>> from cukit.memory import HostProvider, MemoryPool, MemoryPoolConfig
>>> pool = MemoryPool(MemoryPoolConfig(max_pool_size=1 << 30), HostProvider())
>>> address = pool.allocate(4096)
>>> pool.free(address)
"""

from cukit.memory.batched_copy import Move, batched_copy
from cukit.memory.bookkeeping.blocks import Block, Event, Frame, Range
from cukit.memory.bookkeeping.statistics import DefragmentReport, PoolStatistics, StreamStatistics
from cukit.memory.pool.buffer import DeviceBuffer
from cukit.memory.pool.config import MemoryPoolConfig
from cukit.memory.pool.devices import (
    DevicePools,
    default_pool,
    memory_pool_allocate,
    memory_pool_free,
    pools_of,
)
from cukit.memory.pool.memory_pool import MemoryPool
from cukit.memory.pool.oom import OutOfMemoryReport
from cukit.memory.providers.cuda_malloc import CudaMalloc
from cukit.memory.providers.cuda_vmm import CudaVirtualMemory
from cukit.memory.providers.host import HostProvider
from cukit.memory.providers.provider import DeviceOutOfMemory, Provider

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
