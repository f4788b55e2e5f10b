"""A pool as CuPy's allocator, on fake devices."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cukit.errors import ConfigError, OutOfMemoryError
from cukit.memory import HostProvider, MemoryPool, MemoryPoolConfig, pools_of
from cukit.memory.bookkeeping import owner_refs
from cukit.memory.pool import cupy_allocator
from cukit.memory.providers.cuda_device import CudaDevice
from tests.memory.invariants import check_invariants
from tests.memory.simulation import PAGE, SimulatedProvider

cupy = pytest.importorskip("cupy")


class Gpu(SimulatedProvider, CudaDevice):
    """One of several devices."""

    def __init__(self, device_id: int = 0) -> None:
        SimulatedProvider.__init__(self)
        self.device_id = device_id

    def for_device(self, device_id: int) -> Gpu:
        return Gpu(device_id)


class Cuda:
    """A fake CuPy module with two devices and CuPy's allocator functions."""

    MemoryPointer = cupy.cuda.MemoryPointer
    UnownedMemory = cupy.cuda.UnownedMemory
    BaseMemory = cupy.cuda.BaseMemory
    memory = cupy.cuda.memory

    def __init__(self) -> None:
        self.device = 0
        self.count = 2
        self.allocator: Callable[[int], Any] | None = None
        self.runtime = SimpleNamespace(
            getDevice=lambda: self.device, getDeviceCount=lambda: self.count
        )

    def set_allocator(self, allocator: Callable[[int], Any]) -> None:
        self.allocator = allocator


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    made = Cuda()
    theirs = SimpleNamespace(malloc="CuPy's own")
    module = SimpleNamespace(cuda=made, get_default_memory_pool=lambda: theirs)
    monkeypatch.setattr(cupy_allocator, "require_cupy", lambda purpose: module)
    yield made
    cupy_allocator._installed.clear()


def pool_of(provider: SimulatedProvider | HostProvider) -> MemoryPool:
    return MemoryPool(MemoryPoolConfig(max_pool_size=64 * PAGE), provider)


def test_memory_is_freed_with_its_last_pointer() -> None:
    pool = pool_of(SimulatedProvider())
    allocate: Any = cupy_allocator._single(pool)
    pointer = allocate(1000)
    assert (pointer.mem.size, pointer.device_id) == (1000, 0)
    assert pool.owns(pointer.ptr)
    inside = pointer + 100
    del pointer
    assert pool.statistics().num_live == 1
    del inside
    assert pool.statistics().num_live == 0
    nothing = allocate(0)
    assert (nothing.ptr, nothing.mem.size, pool.statistics().num_live) == (0, 0, 0)
    with pytest.raises(OutOfMemoryError, match="above it") as ours:
        allocate(65 * PAGE)
    assert isinstance(ours.value, cupy.cuda.memory.OutOfMemoryError)


def test_a_pointer_in_a_reference_cycle_is_freed() -> None:
    pool = pool_of(SimulatedProvider())
    allocate: Any = cupy_allocator._single(pool)
    cycle: list[Any] = [allocate(1000)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.statistics().num_live == 0


def test_install_and_uninstall(cuda: Cuda) -> None:
    pool, other = pool_of(Gpu()), pool_of(Gpu())
    with pytest.raises(ConfigError, match="only the pool of a GPU"):
        pool_of(HostProvider()).install()
    with pytest.raises(ConfigError, match="not installed"):
        pool.uninstall()
    pool.install()
    assert cuda.allocator is not None
    kept = cuda.allocator(1000)
    assert pool.owns(kept.ptr)
    with pytest.raises(ConfigError, match="not installed"):
        other.uninstall()
    pool.uninstall()
    assert cuda.allocator == "CuPy's own"
    assert pool.owns(kept.ptr)


def test_every_device_has_its_own_pool(cuda: Cuda) -> None:
    pool = pool_of(Gpu())
    assert pools_of(pool) == {0: pool}
    pool.install()
    assert cuda.allocator is not None
    first = cuda.allocator(1000)
    cuda.device = 1
    second, third = cuda.allocator(2000), cuda.allocator(3000)
    assert [each.device_id for each in (first, second, third)] == [0, 1, 1]
    pools = pools_of(pool)
    assert set(pools) == {0, 1}
    assert pools[1].config == pool.config
    assert pools[1].provider.device_id == 1
    assert [each.statistics().num_live for each in pools.values()] == [1, 2]
    cuda.device = 0
    del second, third  # on whichever device is current
    assert [each.statistics().num_live for each in pools.values()] == [1, 0]
    pool.install()
    assert pools_of(pool) == pools, "the same ones again"


def test_freed_memory_is_reused_by_the_next_owner() -> None:
    """The reuse bypasses the pool's lock: the block stays live in the pool's records."""
    pool = pool_of(HostProvider(page_bytes=PAGE))
    allocate: Any = cupy_allocator._single(pool)
    held = allocate(1000)
    address = held.ptr
    hits = pool.statistics().num_hits
    for _ in range(3):
        del held
        held = allocate(1000)
        assert held.ptr == address
        check_invariants(pool)
    assert pool.statistics().num_hits == hits + 3
    del held
    other = allocate(900)  # the same rounded size, but through the pool
    assert other.ptr == address
    assert pool.statistics().requested_bytes == 900
    del other
    assert pool.statistics().num_live == 0
    check_invariants(pool)


def test_threads_reuse_each_block_once() -> None:
    pool = pool_of(HostProvider(page_bytes=PAGE))
    allocate: Any = cupy_allocator._single(pool)
    errors: list[str] = []
    shared: list[Any] = []

    def work(mark: int) -> None:
        numbers = random.Random(mark)
        for step in range(3000):
            pointer = allocate((512, 600, 2048)[numbers.randrange(3)])
            cell = ctypes.c_int64.from_address(pointer.ptr)
            cell.value = owner = mark * 10_000 + step
            if numbers.random() < 0.1:
                shared.append(pointer)  # freed by another thread
            if len(shared) > 10 and numbers.random() < 0.2:
                with contextlib.suppress(IndexError):
                    shared.pop()
            if cell.value != owner:
                errors.append(f"thread {mark}, step {step}: overwritten by another thread")
            if numbers.random() < 0.01:
                pool.statistics()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors
    shared.clear()
    statistics = pool.statistics()
    assert statistics.num_live == 0
    assert statistics.num_allocations == statistics.num_frees == 18_000
    check_invariants(pool)


def test_replacing_an_array_needs_no_bookkeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new array reuses the block that the previous replacement of its size freed."""
    pool = pool_of(HostProvider(page_bytes=PAGE))
    through_pool: list[int] = []

    def counted(size: int, *others: Any) -> Any:
        through_pool.append(size)
        return MemoryPool.allocate(pool, size, *others)

    monkeypatch.setattr(pool, "allocate", counted)
    allocate: Any = cupy_allocator._single(pool)
    sizes = (512, 2000, 700, 9000)
    held = [allocate(size) for size in sizes]
    for step in range(10):
        if step == 4:
            through_pool.clear()
        for number, size in enumerate(sizes):
            held[number] = allocate(size)
    assert not through_pool
    check_invariants(pool)


def test_more_sizes_than_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_refs, "MAX_QUEUES", 3)
    pool = pool_of(HostProvider(page_bytes=PAGE))
    allocate: Any = cupy_allocator._single(pool)
    for _ in range(3):
        held = [allocate(512 * (1 + number % 7)) for number in range(20)]
        assert pool.statistics().num_live == 20
        del held
        assert pool.statistics().num_live == 0
        check_invariants(pool)
    assert len(pool._queues.all) == 1 + 3
