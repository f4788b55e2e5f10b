"""Fixtures: every provider, and pools on it."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator

import pytest

from cukit.memory import (
    CudaMalloc,
    CudaVirtualMemory,
    HostProvider,
    MemoryPool,
    MemoryPoolConfig,
    Provider,
)

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _small_collections() -> Iterator[None]:
    """Exempts existing objects from garbage collection. A pool runs a full collection before an
    allocation fails; hundreds of these late in a test run would take minutes."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


_PROVIDERS: dict[str, Callable[[], Provider]] = {
    "host": lambda: HostProvider(512 * MIB),
    "host-segments": lambda: HostProvider(512 * MIB, can_remap=False),
    "cuda-vmm": lambda: CudaVirtualMemory(page_bytes=2 * MIB),
    "cuda-malloc": CudaMalloc,
}


@pytest.fixture(
    params=[
        "host",
        "host-segments",
        pytest.param("cuda-vmm", marks=pytest.mark.gpu),
        pytest.param("cuda-malloc", marks=pytest.mark.gpu),
    ]
)
def provider(request: pytest.FixtureRequest) -> Provider:
    """A new provider of each kind; tests may restrict the kinds by indirect parametrisation."""
    return _PROVIDERS[request.param]()


@pytest.fixture
def make_pool(provider: Provider) -> Callable[..., MemoryPool]:
    """Creates pools on the provider: `make_pool(max_pool_size=...)`."""
    return lambda **options: MemoryPool(MemoryPoolConfig(**options), provider)


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Makes SIGINT raise KeyboardInterrupt; a process that a shell starts in the background ignores
    SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
