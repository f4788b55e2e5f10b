"""Options outside their legal values are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from cukit.errors import ConfigError
from cukit.memory import HostProvider, MemoryPool, MemoryPoolConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_pool_size": -1}, "initial_pool_size: expected at least 0, got -1"),
        ({"max_pool_size": 0}, "max_pool_size: expected None or at least 1, got 0"),
        (
            {"initial_pool_size": 4096, "max_pool_size": 512},
            "max_pool_size: expected None or at least 4096, got 512",
        ),
        ({"block_size": 3 << 20}, "block_size: expected a power of two from 512 on"),
        ({"block_size": 256}, "block_size: expected a power of two from 512 on"),
        ({"growth_factor": 0.9}, "growth_factor: expected between 1 and 16"),
        ({"defrag_threshold": 0.0}, "defrag_threshold: expected above 0 and at most 1"),
        ({"call_site_depth": -1}, "call_site_depth: expected at least 0"),
    ],
)
def test_illegal(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"MemoryPoolConfig: {message}"):
        MemoryPoolConfig(**options)


def test_a_limit_below_one_page() -> None:
    with pytest.raises(ConfigError, match="max_pool_size: expected at least a page of 2097152"):
        MemoryPool(MemoryPoolConfig(max_pool_size=1 << 20), HostProvider(4 << 20))


def test_an_initial_size_beyond_the_device() -> None:
    with pytest.raises(ConfigError, match="the device cannot give 8388608 bytes"):
        MemoryPool(MemoryPoolConfig(initial_pool_size=8 << 20), HostProvider(4 << 20))
