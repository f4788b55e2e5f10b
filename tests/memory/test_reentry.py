"""Threads, and finalizers that run inside calls of the pool."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable

import pytest

from cukit.errors import CukitError, OutOfMemoryError, PointerError
from cukit.memory import DeviceBuffer, HostProvider, MemoryPool, MemoryPoolConfig
from tests.memory.invariants import check_invariants
from tests.memory.simulation import KIB, PAGE, SimulatedProvider, fill, holds


class InterruptedProvider(SimulatedProvider):
    """Runs code inside every driver call, as a garbage collection might."""

    def __init__(self, *, can_remap: bool) -> None:
        super().__init__(512 * PAGE, can_remap=can_remap)
        self.interrupt: Callable[[], None] = lambda: None

    def _called(self, name: str) -> None:
        super()._called(name)
        self.interrupt()


@pytest.mark.parametrize("can_remap", [True, False])
@pytest.mark.parametrize("how", ["free", "free_from_finalizer", "buffer"])
def test_frees_inside_every_driver_call(how: str, *, can_remap: bool) -> None:
    """The frees neither block nor get lost, and the pool stays consistent."""
    provider = InterruptedProvider(can_remap=can_remap)
    pool = MemoryPool(MemoryPoolConfig(max_pool_size=256 * PAGE), provider)
    to_free: list[int | DeviceBuffer] = []
    interrupted = 0

    def interrupt() -> None:
        nonlocal interrupted
        if not to_free:
            return
        each = to_free.pop()
        interrupted += 1
        if isinstance(each, DeviceBuffer):
            del each
            gc.collect(0)
        elif how == "free":
            pool.free(each)
        else:
            pool.free_from_finalizer(each)

    live: list[int] = []
    for _ in range(40):
        if how == "buffer":
            to_free.extend(pool.allocate_buffer(3 * PAGE) for _ in range(3))
        else:
            to_free.extend(pool.allocate(3 * PAGE) for _ in range(3))
        provider.interrupt = interrupt
        live.append(pool.allocate(random.Random(len(live)).randrange(1, 5 * PAGE)))
        pool.defragment()
        pool.trim()
        provider.interrupt = lambda: None
        pool.statistics()  # performs the deferred frees
        check_invariants(pool)
        assert pool.statistics().num_live == len(live) + len(to_free)
    assert interrupted > 40


def test_an_allocation_inside_the_pool_is_rejected() -> None:
    provider = InterruptedProvider(can_remap=True)
    pool = MemoryPool(MemoryPoolConfig(), provider)
    provider.interrupt = lambda: pool.allocate(512) and None
    with pytest.raises(RuntimeError, match="allocation from inside the pool"):
        pool.allocate(512)
    provider.interrupt = lambda: None
    check_invariants(pool)
    pool.free(pool.allocate(512))


class _Cycle:
    """A reference cycle, which only the garbage collector frees."""

    def __init__(self, buffer: DeviceBuffer) -> None:
        self.buffer = buffer
        self.me = self


def test_collections_at_every_moment() -> None:
    """Python collects garbage at almost every allocation: buffers are freed inside pool calls."""
    pool = MemoryPool(MemoryPoolConfig(max_pool_size=64 * PAGE), SimulatedProvider(64 * PAGE))
    before = gc.get_threshold()
    gc.set_threshold(3, 1, 1)
    try:
        for number in range(1500):
            _Cycle(pool.allocate_buffer(1 + 977 * number % (3 * PAGE)))
            if number % 100 == 0:
                pool.defragment()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert pool.statistics().num_live == 0
    check_invariants(pool)


def test_threads() -> None:
    """Each thread writes to its allocations; about half of them may be freed by other threads."""
    pool = MemoryPool(MemoryPoolConfig(max_pool_size=128 << 20), HostProvider(128 << 20))
    errors: list[BaseException] = []
    handed_over: list[tuple[int, int, int]] = []

    def work(seed: int) -> None:
        numbers = random.Random(seed)
        own: list[tuple[int, int, int]] = []
        try:
            for _ in range(600):
                size = int(2 ** numbers.uniform(3, 18))
                try:
                    address = pool.allocate(size)
                except OutOfMemoryError:
                    address = 0
                if address:
                    pattern = numbers.getrandbits(60)
                    fill(address, size, pattern)
                    (own if numbers.random() < 0.5 else handed_over).append(
                        (address, size, pattern)
                    )
                source = own if numbers.random() < 0.5 else handed_over
                if len(source) > 20:
                    try:
                        address, size, pattern = source.pop()
                    except IndexError:
                        continue
                    assert holds(address, size, pattern)
                    if numbers.random() < 0.5:
                        pool.free(address)
                    else:
                        pool.free_from_finalizer(address)
                if numbers.random() < 0.01:
                    pool.defragment()
            for address, size, pattern in own:
                assert holds(address, size, pattern)
                pool.free(address)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for address, size, pattern in handed_over:
        assert holds(address, size, pattern)
        pool.free(address)
    check_invariants(pool)
    pool.close()


def test_threads_move_the_buffers_of_other_threads() -> None:
    pool = MemoryPool(MemoryPoolConfig(), HostProvider(256 << 20, page_bytes=64 * KIB))
    errors: list[BaseException] = []
    stop = threading.Event()

    def use(seed: int) -> None:
        numbers = random.Random(seed)
        buffers: list[tuple[DeviceBuffer, int]] = []
        try:
            for _ in range(300):
                buffer = pool.allocate_buffer(numbers.randrange(1, 40 * KIB))
                with buffer.pinned() as address:
                    fill(address, buffer.size, seed)
                buffers.append((buffer, seed))
                buffer, pattern = buffers[numbers.randrange(len(buffers))]
                with buffer.pinned() as address:
                    assert holds(address, buffer.size, pattern)
                if len(buffers) > 30:
                    buffers.pop(numbers.randrange(len(buffers)))
        except BaseException as error:
            errors.append(error)

    def defragment() -> None:
        while not stop.is_set():
            pool.defragment()

    users = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    mover = threading.Thread(target=defragment)
    for thread in (*users, mover):
        thread.start()
    for thread in users:
        thread.join()
    stop.set()
    mover.join()
    assert not errors
    gc.collect()
    assert pool.statistics().num_live == 0
    assert pool.statistics().bytes_moved > 0
    check_invariants(pool)


@pytest.mark.parametrize("can_remap", [True, False])
def test_an_unreferenced_pool_returns_everything(*, can_remap: bool) -> None:
    provider = SimulatedProvider(can_remap=can_remap)
    pool = MemoryPool(MemoryPoolConfig(growth_factor=2.0), provider)
    buffers = [pool.allocate_buffer(size * PAGE) for size in (1, 2, 3)]
    pool.free(pool.allocate(5 * PAGE))
    del buffers[1]
    pool.allocate_buffer(8 * PAGE).close()
    del pool
    gc.collect()
    assert provider.used_bytes > 0, "a buffer keeps its pool"
    buffers.clear()
    gc.collect()
    assert provider.used_bytes == 0
    assert not provider.segments


def test_frees_by_destructors_take_effect_at_the_next_call() -> None:
    """No call of the pool treats memory as live after a finalizer has freed it."""
    provider = SimulatedProvider()
    pool = MemoryPool(MemoryPoolConfig(), provider)
    address = pool.allocate(PAGE)
    pool.free_from_finalizer(address)
    assert pool.allocate(PAGE) == address
    assert pool.statistics().num_hits == 1
    pool.free_from_finalizer(address)
    assert not pool.owns(address)
    address = pool.allocate(PAGE)
    pool.free_from_finalizer(address)
    with pytest.raises(PointerError, match="double free"):
        pool.free(address)
    pool.allocate(PAGE, stream=1)  # from now on a freed page is marked with an event
    pool.free_from_finalizer(address := pool.allocate(PAGE))
    provider.calls.clear()
    assert not pool.owns(address)
    assert "record" in provider.calls
    check_invariants(pool)


def test_memory_freed_by_destructors_is_not_kept() -> None:
    provider = SimulatedProvider()
    pool = MemoryPool(MemoryPoolConfig(), provider)
    pool.free_from_finalizer(pool.allocate(PAGE))
    del pool
    gc.collect()
    assert provider.used_bytes == 0


def test_a_pool_that_ends_during_a_capture_is_released_later() -> None:
    """Its memory is released when the next pool is collected."""
    provider = SimulatedProvider()
    MemoryPool(MemoryPoolConfig(initial_pool_size=PAGE), provider)
    provider.captures[7] = 1
    gc.collect()
    assert provider.used_bytes > 0
    provider.captures.clear()
    MemoryPool(MemoryPoolConfig(), SimulatedProvider())
    gc.collect()
    assert provider.used_bytes == 0


def test_raw_memory_outlives_its_pool() -> None:
    provider = SimulatedProvider()
    address = MemoryPool(MemoryPoolConfig(), provider).allocate(PAGE)
    gc.collect()
    assert provider.accessible(address, PAGE)


def test_use_in_a_forked_child_is_an_error() -> None:
    pool = MemoryPool(MemoryPoolConfig(), HostProvider(64 << 20))
    address = pool.allocate(512)
    buffer = pool.allocate_buffer(512)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            pool.free_from_finalizer(address)
            del buffer
            pool.allocate(512)
        except CukitError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    assert b"CUDA cannot be used after fork" in os.read(reader, 1000)
    os.close(reader)
    pool.free(address)
    check_invariants(pool)
