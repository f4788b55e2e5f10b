"""Pools of several devices."""

from __future__ import annotations

import pytest

from cukit.errors import PointerError
from cukit.memory import (
    DevicePools,
    HostProvider,
    MemoryPoolConfig,
    default_pool,
    memory_pool_allocate,
    memory_pool_free,
)


def test_each_device_has_its_own_pool() -> None:
    pools = DevicePools(MemoryPoolConfig(max_pool_size=8 << 20), lambda _: HostProvider(8 << 20))
    with pytest.raises(PointerError, match="nothing was allocated yet"):
        pools.free(512)
    first, second = pools.pool(0), pools.pool(1)
    assert first is not second
    assert pools.pool(1) is second
    elsewhere = second.allocate(4096)
    pools.free(elsewhere)
    assert second.statistics().num_live == 0
    with pytest.raises(PointerError, match="belongs to another pool"):
        pools.free(elsewhere)


def test_raw_memory() -> None:
    address = memory_pool_allocate(1000)
    assert address % 512 == 0
    assert default_pool().owns(address)
    memory_pool_free(address)
    with pytest.raises(PointerError, match="double free"):
        memory_pool_free(address)
