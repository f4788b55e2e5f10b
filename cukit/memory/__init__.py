"""A memory manager for CuPy that defragments.

>>> from cukit.memory import MemoryPool, MemoryPoolConfig
"""

from cukit.memory.blocks import Block, Event, Frame, Range
from cukit.memory.buffer import DeviceBuffer
from cukit.memory.config import MemoryPoolConfig
from cukit.memory.pool import MemoryPool
from cukit.memory.provider import DeviceOutOfMemory, Move, Provider
from cukit.memory.statistics import DefragmentReport, PoolStatistics, StreamStatistics

__all__ = [
    "Block",
    "DefragmentReport",
    "DeviceBuffer",
    "DeviceOutOfMemory",
    "Event",
    "Frame",
    "MemoryPool",
    "MemoryPoolConfig",
    "Move",
    "PoolStatistics",
    "Provider",
    "Range",
    "StreamStatistics",
]
