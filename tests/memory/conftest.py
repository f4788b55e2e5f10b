"""Every provider, behind one fixture."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from cukit.memory import HostProvider, MemoryPool, MemoryPoolConfig, Provider

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _small_collections() -> Iterator[None]:
    """Pools collect garbage before they give up. Hundreds of times, with all that a long test run
    has loaded, that would take minutes: objects made before are not looked at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def _virtual_memory() -> Provider:
    from cukit.memory.vmm import CudaVirtualMemory

    return CudaVirtualMemory(page_bytes=2 * MIB)


def _cuda_malloc() -> Provider:
    from cukit.memory.cuda_malloc import CudaMalloc

    return CudaMalloc()


@pytest.fixture(
    params=[
        pytest.param(lambda: HostProvider(512 * MIB), id="host"),
        pytest.param(lambda: HostProvider(512 * MIB, can_remap=False), id="host-segments"),
        pytest.param(_virtual_memory, id="cuda-vmm", marks=pytest.mark.gpu),
        pytest.param(_cuda_malloc, id="cuda-malloc", marks=pytest.mark.gpu),
    ]
)
def provider(request: pytest.FixtureRequest) -> Provider:
    """A fresh provider of each kind."""
    made: Provider = request.param()
    return made


@pytest.fixture
def make_pool(provider: Provider) -> Callable[..., MemoryPool]:
    """Makes pools on the provider: `make_pool(max_pool_size=...)`."""
    return lambda **options: MemoryPool(MemoryPoolConfig(**options), provider)
