"""Driver pages under live data: remapped, moved, limited, refused and released."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cukit.errors import OutOfMemoryError
from cukit.memory import CudaMalloc, CudaVirtualMemory, DeviceBuffer, MemoryPool, MemoryPoolConfig
from cukit.memory.bookkeeping.slots import plan_slots
from cukit.memory.providers.cuda_driver import DriverError
from cukit.memory.replay.pools import ProviderMeter
from tests.memory.device_work import fill, intact, words_at
from tests.memory.invariants import check_invariants

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MakePool = Callable[..., MemoryPool]
BOTH = pytest.mark.parametrize("provider", ["cuda-vmm", "cuda-malloc"], indirect=True)


def checksum(array: Any) -> int:
    """A checksum that depends on every bit and its position."""
    words = array.ravel().view(np.uint32).astype(np.uint64)
    return int((words * cupy.arange(1, words.size + 1, dtype=np.uint64)).sum())


@pytest.mark.parametrize("provider", ["cuda-vmm"], indirect=True)
def test_arrays_keep_their_bits_while_pages_are_remapped_around_them(make_pool: MakePool) -> None:
    pool = make_pool(max_pool_size=256 * MIB)
    generator = cupy.random.default_rng(1)
    with pool.use():
        arrays = [generator.standard_normal(MIB // 2, np.float32) for _ in range(120)]
    sums = [checksum(array) for array in arrays]
    addresses = [array.data.ptr for array in arrays]
    for turn in range(4):  # each turn keeps another half of the arrays
        freed = sum(array.nbytes for array in arrays[turn % 2 :: 2])
        for values in (arrays, sums, addresses):
            del values[turn % 2 :: 2]
        before = pool.statistics().pages_remapped
        with pool.use():
            large = cupy.full(freed // 4, turn, np.float32)
        assert pool.statistics().pages_remapped > before
        assert [array.data.ptr for array in arrays] == addresses
        assert [checksum(array) for array in arrays] == sums
        assert bool((large == turn).all())
        arrays.append(large)
        sums.append(checksum(large))
        addresses.append(large.data.ptr)
        check_invariants(pool)
    assert pool.statistics().peak_reserved_bytes <= 256 * MIB


@pytest.mark.parametrize("provider", ["cuda-vmm"], indirect=True)
@pytest.mark.parametrize("kind", ["uniform", "log-uniform"])
def test_arrays_keep_their_bits_on_pages_that_are_mapped_twice(
    make_pool: MakePool, kind: str
) -> None:
    pool = make_pool(max_pool_size=230 * MIB)
    numbers = random.Random(kind)
    live: list[tuple[int, int, int]] = []
    total = stitched = 0
    for step in range(2000):
        exponent = numbers.uniform(8, 23)
        size = numbers.randint(256, 8 * MIB) if kind == "uniform" else int(2**exponent)
        size = size // 4 * 4
        while total + size > 200 * MIB:
            place = numbers.randrange(len(live))
            live[place], live[-1] = live[-1], live[place]
            address, length, value = live.pop()
            assert intact(words_at(pool.provider, address, length), value)
            pool.free(address)
            total -= length
        address = pool.allocate(size)
        fill(words_at(pool.provider, address, size), step, 0)
        live.append((address, size, step))
        total += size
        stitched = max(stitched, len(pool._supply._stitcher._aliases))
    assert stitched
    for address, length, value in live:
        assert intact(words_at(pool.provider, address, length), value)
    check_invariants(pool)


@BOTH
def test_buffers_of_all_sizes_keep_their_bits_through_defragmentations(
    make_pool: MakePool,
) -> None:
    pool = make_pool(max_pool_size=512 * MIB, block_size=64 * MIB, enable_defrag=False)
    numbers = random.Random(2)
    buffers: list[tuple[DeviceBuffer, int]] = []
    moved = 0
    for turn in range(6):
        while sum(buffer.size for buffer, _ in buffers) < 120 * MIB:
            size = 4 * int(2 ** numbers.uniform(4, 19))
            buffer, value = pool.allocate_buffer(size), numbers.getrandbits(31)
            with buffer.pinned() as address:
                fill(words_at(pool.provider, address, size), value, 0)
            buffers.append((buffer, value))
        numbers.shuffle(buffers)
        while sum(buffer.size for buffer, _ in buffers) > 60 * MIB:
            buffers.pop()[0].close()
        pinned = {buffer: buffer.pin() for buffer, _ in buffers[:turn]}
        report = pool.defragment()
        moved += report.bytes_moved
        assert report.largest_free_after >= report.largest_free_before
        for buffer, value in buffers:
            with buffer.pinned() as address:
                assert pinned.get(buffer, address) == address
                assert intact(words_at(pool.provider, address, buffer.size), value)
        for buffer in pinned:
            buffer.unpin()
        check_invariants(pool)
    assert moved > 60 * MIB


@pytest.mark.parametrize("provider", ["cuda-vmm"], indirect=True)
@pytest.mark.parametrize(("size", "count"), [(64 * KIB, 3000), (MIB, 400), (512, 20000)])
def test_buffers_of_one_size_keep_their_bits_when_the_device_plans(
    make_pool: MakePool, size: int, count: int
) -> None:
    """Two turns, the second with raw blocks between buffers; the device and the host plan alike."""
    pool = make_pool(enable_defrag=False)
    numbers = random.Random(size)
    provider, planned = pool.provider, []
    move_slots = provider.move_slots

    def observed(grid: Any, addresses: Any, walls: Any, stream: Any) -> Any:
        at, fixed = np.array(addresses), np.array(walls, np.int64).reshape(-1, 2)
        rows = at.nonzero()[0]
        plan = plan_slots(grid, at[rows], fixed[:, 0], fixed[:, 1])
        planned.append(0 if plan is None else len(plan.moved))
        started = move_slots(grid, addresses, walls, stream)

        def wait() -> Any:
            moves = started.wait()
            assert (moves is None) == (plan is None)
            if plan is not None:
                np.testing.assert_array_equal(moves[0], rows[plan.moved])
                target = grid.begin + (moves[1] << grid.slot_shift)
                np.testing.assert_array_equal(target, plan.target[plan.moved])
            return moves

        return SimpleNamespace(wait=wait)

    provider.move_slots = observed
    buffers: list[tuple[DeviceBuffer, int]] = []
    raw: list[int] = []
    for turn in range(2):
        while len(buffers) < count:
            buffer, value = pool.allocate_buffer(size), numbers.getrandbits(31)
            with buffer.pinned() as address:
                if size > 512 or len(buffers) % 64 == 0:
                    fill(words_at(provider, address, size), value, 0)
                else:
                    value = -1
            buffers.append((buffer, value))
            if turn and len(raw) < 6 and len(buffers) % 50 == 0:
                raw.append(pool.allocate(numbers.choice([size, 3 * MIB])))
        numbers.shuffle(buffers)
        for buffer, _ in buffers[: count // 2]:
            buffer.close()
        del buffers[: count // 2]
        report = pool.defragment()
        assert report.bytes_moved == planned[-1] * size > 0
        check_invariants(pool)
        for buffer, value in buffers:
            if value >= 0:
                with buffer.pinned() as address:
                    assert intact(words_at(provider, address, size), value)
    assert len(planned) == 2
    for address in raw:
        pool.free(address)


@BOTH
def test_the_limit_bounds_the_memory_from_the_driver(make_pool: MakePool) -> None:
    pool = make_pool(max_pool_size=4 * GIB)
    meter = ProviderMeter(pool.provider)
    numbers = random.Random(3)
    live: list[int] = []
    for _ in range(400):
        try:
            live.append(pool.allocate(int(2 ** numbers.uniform(18, 29))))
        except OutOfMemoryError:
            for _ in range(len(live) // 2 + 1):
                pool.free(live.pop(numbers.randrange(len(live))))
    with pytest.raises(OutOfMemoryError, match=r"\(limit: 4\.00 GiB\)"):
        pool.allocate(5 * GIB)
    statistics = pool.statistics()
    assert statistics.num_out_of_memory > 1
    assert 3 * GIB < statistics.peak_reserved_bytes <= 4 * GIB
    assert meter.reserved_bytes() == statistics.reserved_bytes
    for address in live:
        pool.free(address)
    check_invariants(pool)
    pool.close()


@BOTH
def test_trim_returns_memory_to_the_driver(make_pool: MakePool) -> None:
    pool = make_pool()
    meter = ProviderMeter(pool.provider)  # of this process only; others may use the device
    large = [pool.allocate(GIB) for _ in range(6)]
    small = pool.allocate(1000)
    assert meter.reserved_bytes() >= 6 * GIB
    for address in large:
        pool.free(address)
    assert meter.reserved_bytes() >= 6 * GIB, "kept for later allocations"
    assert pool.trim() >= 6 * GIB - 2 * MIB
    assert meter.reserved_bytes() < GIB / 2
    pool.free(small)
    pool.close()


@BOTH
def test_an_unreferenced_pool_returns_everything(make_pool: MakePool) -> None:
    pool = make_pool(initial_pool_size=4 * GIB)
    meter = ProviderMeter(pool.provider)
    pool.free(pool.allocate(GIB))
    del pool
    gc.collect()
    assert meter.reserved_bytes() <= -4 * GIB


def test_half_of_the_device_in_one_piece() -> None:
    pool = MemoryPool()
    free, _ = pool.provider.memory_info()
    size = free // 2 >> 22 << 22
    address = pool.allocate(size)
    ends = [words_at(pool.provider, address + at, MIB) for at in (0, size // 2, size - MIB)]
    for value, words in enumerate(ends):
        fill(words, value, 0)
    assert all(intact(words, value) for value, words in enumerate(ends))
    with pytest.raises(OutOfMemoryError, match="limit: none"):
        pool.allocate(free)
    pool.free(address)
    check_invariants(pool)
    pool.close()


# Calls that fail ----------------------------------------------------------------------------------


class InjectedError(DriverError):
    """Raised by the call that a test makes fail."""


class Failing:
    """Forwards calls to `inner`. The tally counts those in `names`, and makes one of them fail."""

    def __init__(self, inner: Any, names: set[str], tally: Tally) -> None:
        self._inner, self._names, self._tally = inner, names, tally

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._inner, name)
        if name not in self._names:
            return function

        def run(*arguments: Any) -> Any:
            self._tally.count(name)
            result = function(*arguments)
            self._tally.note(name, arguments, result)
            return result

        return run


class Tally:
    """The calls so far, and the driver objects that exist."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail_in: int | None = None
        self.handles: set[int] = set()
        self.ranges: set[int] = set()

    def count(self, name: str) -> None:
        self.calls.append(name)
        if self.fail_in is not None:
            self.fail_in -= 1
            if self.fail_in < 0:
                self.fail_in = None
                raise InjectedError(f"{name}: injected")

    def note(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        if name == "create":
            self.handles.add(int(result))
        elif name == "release":
            self.handles.remove(int(arguments[0]))
        elif name in ("reserve", "malloc"):
            self.ranges.add(result)
        elif name in ("free_addresses", "free"):
            self.ranges.remove(arguments[0])


PAGES = {"reserve", "free_addresses", "create", "release", "map", "set_access", "unmap"}
RUNTIME = {
    "malloc",
    "free",
    "eventRecord",
    "eventQuery",
    "eventSynchronize",
    "streamWaitEvent",
    "deviceSynchronize",
}


class DriverCallSequence:
    """Makes every kind of driver call, with data in every block; repeats failed steps."""

    def __init__(self, kind: type[CudaVirtualMemory] | type[CudaMalloc]) -> None:
        self.tally = Tally()
        provider: Any = CudaMalloc()
        if kind is CudaVirtualMemory:
            provider = CudaVirtualMemory(page_bytes=2 * MIB)
            provider._driver = Failing(provider._driver, PAGES, self.tally)
        provider._runtime = Failing(provider._runtime, RUNTIME, self.tally)
        self.provider = provider
        self.pool = MemoryPool(MemoryPoolConfig(max_pool_size=64 * MIB), provider)
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
        self.failures = 0

    def step(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except DriverError:  # the injected error, or one converted from it
            self.failures += 1
        finally:
            check_invariants(self.pool)
        result = action()  # only one call fails
        check_invariants(self.pool)
        return result

    def allocate(self, size: int, stream: int, value: int) -> int:
        address: int = self.step(lambda: self.pool.allocate(size, self.streams[stream]))
        self.write(address, size, stream, value)
        return address

    def write(self, address: int, size: int, stream: int, value: int, cycles: int = 20_000) -> None:
        with self.streams[stream]:
            fill(words_at(self.provider, address, size), value, cycles)

    def check(self, address: int, size: int, stream: int, value: int) -> None:
        with self.streams[stream]:
            assert intact(words_at(self.provider, address, size), value)

    def run(self) -> None:
        pool, streams = self.pool, self.streams
        sizes = [2 * MIB, 300 * KIB, 9 * MIB + 512, 4 * MIB]
        blocks = [self.allocate(size, 0, 10 + i) for i, size in enumerate(sizes)]
        for i in (0, 2):
            self.check(blocks[i], sizes[i], 0, 10 + i)
        for i in (0, 2):
            self.write(blocks[i], sizes[i], 0, 0, 5_000_000)  # still running when it is freed
            self.step(lambda i=i: pool.free(blocks[i]))
        other = self.allocate(9 * MIB, 1, 20)
        self.step(lambda: pool.used_on(other, streams[2]))
        self.check(other, 9 * MIB, 1, 20)
        self.step(lambda: pool.free(other))
        self.step(pool.statistics)

        buffers = []
        for value in range(10):
            buffer = self.step(lambda: pool.allocate_buffer(700 * KIB, streams[0]))
            with buffer.pinned() as address:
                self.write(address, 700 * KIB, 0, 30 + value)
            buffers.append(buffer)
        for buffer in buffers[::2]:
            self.step(buffer.close)
        self.step(pool.defragment)
        scattered = [self.allocate(2 * MIB, 0, 50 + i) for i in range(16)]
        for address in scattered[::2]:
            self.step(lambda address=address: pool.free(address))
        large = self.allocate(12 * MIB, 0, 70)
        with pytest.raises(OutOfMemoryError):
            self.step(lambda: pool.allocate(60 * MIB, streams[0]))
        for value, buffer in list(enumerate(buffers))[1::2]:
            with buffer.pinned() as address:
                self.check(address, 700 * KIB, 0, 30 + value)
            self.step(buffer.close)
        for i, address in list(enumerate(scattered))[1::2]:
            self.check(address, 2 * MIB, 0, 50 + i)
            self.step(lambda address=address: pool.free(address))
        self.check(large, 12 * MIB, 0, 70)
        self.step(lambda: pool.free(large))
        self.step(pool.trim)
        for i in (1, 3):
            self.check(blocks[i], sizes[i], 0, 10 + i)
            self.step(lambda i=i: pool.free(blocks[i]))
        self.step(pool.close)
        kept = {int(page) for page in getattr(self.provider, "_kept", ())}
        assert self.tally.handles == kept, "pages that the driver holds but no pool records"
        assert not self.tally.ranges
        assert len(kept) <= 1


@pytest.mark.parametrize("kind", [CudaVirtualMemory, CudaMalloc])
def test_every_call_of_the_driver_fails_once(
    kind: type[CudaVirtualMemory] | type[CudaMalloc],
) -> None:
    clean = DriverCallSequence(kind)
    clean.run()
    calls = list(clean.tally.calls)
    expected = RUNTIME - {"malloc", "free"} | PAGES
    if kind is CudaMalloc:
        expected = RUNTIME
    assert expected <= set(calls), f"the sequence misses {expected - set(calls)}"
    # Consecutive calls of one kind are equivalent: test the first, the middle and the last.
    numbers = chosen(calls)
    missed = []
    for number in numbers:
        sequence = DriverCallSequence(kind)
        sequence.tally.fail_in = number
        sequence.run()
        if sequence.tally.fail_in is not None:
            missed.append(f"{number} ({calls[number]})")
    # If streams finish earlier than in the first run, the pool makes fewer queries.
    assert len(missed) <= len(numbers) // 10, f"calls that were never made: {missed}"


def chosen(calls: list[str]) -> list[int]:
    """Indices of the first, middle and last call of each sequence of equal calls."""
    numbers: set[int] = set()
    start = 0
    for end in range(1, len(calls) + 1):
        if end == len(calls) or calls[end] != calls[start]:
            numbers |= {start, (start + end) // 2, end - 1}
            start = end
    return sorted(numbers)
