"""The memory statistics of a run."""

from __future__ import annotations

import numpy as np
import pytest

from cukit.commands._distill_display import pool_line
from cukit.distill.run.memory import RunMemory
from cukit.errors import ConfigError
from cukit.memory import HostProvider, MemoryPool, MemoryPoolConfig


def test_on_the_cpu_there_is_no_pool() -> None:
    memory = RunMemory(np)
    with memory.in_use():
        kept = np.ones(1 << 18)
    assert memory.statistics() is None
    assert memory.peak_bytes() >= kept.nbytes
    with pytest.raises(ConfigError, match="--pool: expected cukit or cupy, got 'none'"):
        RunMemory(np, "none")


@pytest.mark.gpu
@pytest.mark.unguarded
def test_on_a_gpu_arrays_come_from_the_pool() -> None:
    cupy = pytest.importorskip("cupy")
    memory, memory_of_cupy = RunMemory(cupy), RunMemory(cupy, "cupy")
    with memory.in_use():
        kept = cupy.ones(1 << 18)
    statistics = memory.statistics()
    assert statistics is not None
    assert statistics.live_bytes == kept.nbytes
    assert memory.peak_bytes() == statistics.peak_reserved_bytes >= kept.nbytes
    with memory_of_cupy.in_use():
        cupy.ones(1 << 18)
    assert memory_of_cupy.statistics() is None
    assert memory_of_cupy.peak_bytes() >= kept.nbytes


def test_a_pool_is_summarised_in_one_sentence() -> None:
    pool = MemoryPool(MemoryPoolConfig(max_pool_size=64 << 20), HostProvider())
    blocks = [pool.allocate(3 << 20) for _ in range(20)]
    for block in blocks[::2]:
        pool.free(block)
    for _ in range(80):
        pool.free(pool.allocate(20 << 20))
    line = pool_line(pool.statistics())
    assert (
        "peak 60.0 MiB live, 60.0 MiB reserved; 79.0% of 100 allocations from a free list" in line
    )
    assert "10 pages remapped, nothing copied; fragmentation 33% at the end" in line
    for block in blocks[1::2]:
        pool.free(block)
