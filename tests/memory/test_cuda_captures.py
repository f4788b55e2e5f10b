"""CUDA graphs: memory allocated during a capture is reserved for the graph while it exists."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from cukit.memory import MemoryPool
from tests.memory.device_work import fill, intact, words_at
from tests.memory.invariants import check_invariants

cupy = pytest.importorskip("cupy")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("provider", ["cuda-vmm", "cuda-malloc"], indirect=True),
]

MIB = 1 << 20
COUNT = MIB
"""float32 elements of the arrays: 4 MiB each."""
MakePool = Callable[..., MemoryPool]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compiles and loads the kernels of device_work before any capture."""
    words = cupy.empty(1, np.uint32)
    fill(words, 0, 0)
    assert intact(words, 0)


def settled_bytes(pool: MemoryPool, expected: int) -> int:
    """Reserved bytes after trimming. Waits up to 10 s, because a driver thread destroys graphs."""
    deadline = time.monotonic() + 10
    while True:
        gc.collect()
        pool.trim()
        held = pool.statistics().reserved_bytes
        if held == expected or time.monotonic() > deadline:
            return held
        time.sleep(0.01)


def ready(source: Any, stream: Any) -> None:
    """Compiles and loads the CuPy kernels that the captures use."""
    cupy.sqrt(source * 2 + 1)
    stream.synchronize()


def others(sizes: range) -> list[Any]:
    """Arrays of NaN outside the graph: a launch must neither read nor write them."""
    return [cupy.full(COUNT - size, np.nan, np.float32) for size in sizes]


@pytest.mark.parametrize("mode", ["Relaxed", "ThreadLocal", "Global"])
def test_a_graph_keeps_its_memory_until_it_is_gone(make_pool: MakePool, mode: str) -> None:
    pool = make_pool(max_pool_size=256 * MIB)
    stream = cupy.cuda.Stream(non_blocking=True)
    with pool.use(), stream:
        source = cupy.arange(COUNT, dtype=np.float32)
        ready(source, stream)
        pool.trim()  # so that the capture needs new pages
        stream.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
        doubled = source * 2
        address = doubled.data.ptr
        larger = doubled + 1
        del doubled
        result = cupy.sqrt(larger)
        assert result.data.ptr == address, "reused inside the capture"
        graph = stream.end_capture()
        private = {address, larger.data.ptr}
        del larger

        for turn in range(3):
            outside = others(range(20))
            assert not private & {array.data.ptr for array in outside}
            source += 1
            graph.launch(stream)
            outside += others(range(20, 30))
            wanted = np.sqrt(2 * (np.arange(COUNT, dtype=np.float32) + turn + 1) + 1)
            np.testing.assert_allclose(result.get(), wanted, rtol=1e-6)
            assert all(bool(cupy.isnan(array).all()) for array in outside)
            del outside
            pool.defragment()
            pool.trim()
        check_invariants(pool)

        # The graph outlives its result, and still writes to it.
        del result
        outside = others(range(20))
        graph.launch(stream)
        assert all(bool(cupy.isnan(array).all()) for array in outside)
        del outside, graph
        page = pool.provider.page_bytes
        assert settled_bytes(pool, 2 * page) == 2 * page, "the source, and nothing else"
    check_invariants(pool)


def test_pages_are_remapped_during_a_capture(make_pool: MakePool) -> None:
    """At the limit, an allocation in a capture is served by remapping scattered pages."""
    pool = make_pool(max_pool_size=64 * MIB)
    if not pool.provider.can_remap:
        pytest.skip("nothing can be remapped")
    stream = cupy.cuda.Stream(non_blocking=True)
    with pool.use(), stream:
        blocks = [cupy.full(MIB // 2, value, np.uint32) for value in range(32)]
        stream.synchronize()
        del blocks[::2]
        with pool._locked():
            pool._supply.settle_waiting()  # waiting is forbidden during the capture
        before = pool.statistics().pages_remapped
        stream.begin_capture()
        words = cupy.empty(5 * MIB, np.uint32)
        fill(words, 3)
        graph = stream.end_capture()
        assert pool.statistics().pages_remapped > before
        graph.launch(stream)
        assert intact(words, 3)
        for block, value in zip(blocks, range(1, 32, 2), strict=True):
            assert bool((block == value).all())
    check_invariants(pool)


def test_a_stream_that_joins_a_capture_has_private_memory_too(make_pool: MakePool) -> None:
    pool = make_pool(max_pool_size=256 * MIB)
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with pool.use():
        with first:
            source = cupy.arange(COUNT, dtype=np.float32)
            ready(source, first)
            first.begin_capture()
            doubled = source * 2
        second.wait_event(first.record(cupy.cuda.Event(disable_timing=True)))
        with second:
            larger = doubled + 1
        first.wait_event(second.record(cupy.cuda.Event(disable_timing=True)))
        with first:
            result = cupy.sqrt(larger)
            graph = first.end_capture()
        private = {doubled.data.ptr, larger.data.ptr}
        del doubled, larger
        for stream in (first, second):
            with stream:
                outside = others(range(10))
                assert not private & {array.data.ptr for array in outside}
                graph.launch(stream)
                stream.synchronize()
                assert all(bool(cupy.isnan(array).all()) for array in outside)
        wanted = np.sqrt(2 * np.arange(COUNT, dtype=np.float32) + 1)
        np.testing.assert_allclose(result.get(), wanted, rtol=1e-6)
    check_invariants(pool)


@pytest.mark.parametrize("per_thread", [False, True])
def test_a_stream_may_be_new_when_it_is_captured(make_pool: MakePool, *, per_thread: bool) -> None:
    """The driver does not return the id of a stream under capture."""
    pool = make_pool(max_pool_size=256 * MIB)
    words = cupy.empty(MIB, np.uint32)
    kept: list[Any] = []

    def work() -> None:
        own = cupy.cuda.Stream.ptds if per_thread else cupy.cuda.Stream(non_blocking=True)
        with pool.use(), own:
            own.begin_capture()
            temporary = cupy.empty(MIB, np.uint32)
            address = temporary.data.ptr
            fill(temporary, 1)
            del temporary
            assert cupy.empty(MIB, np.uint32).data.ptr == address, "reused inside the capture"
            fill(words, 2)
            graph = own.end_capture()
            outside = [cupy.full(MIB, 3, np.uint32) for _ in range(20)]
            assert address not in {array.data.ptr for array in outside}
            graph.launch(own)
            own.synchronize()
            assert intact(words, 2)
            assert all(bool((array == 3).all()) for array in outside)
            kept.append(graph)

    with ThreadPoolExecutor(1) as thread:  # a thread whose default stream the pool has not seen
        thread.submit(work).result()
    kept.clear()
    assert settled_bytes(pool, 0) == 0
    check_invariants(pool)


def test_an_array_of_a_destroyed_stream_may_be_freed_during_a_capture(make_pool: MakePool) -> None:
    """Only a synchronisation, which is forbidden during capture, shows that the destroyed stream's
    work is complete."""
    pool = make_pool(max_pool_size=64 * MIB)
    stream, gone = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with pool.use():
        with gone:
            old = cupy.empty(2 * COUNT, np.uint32)
            fill(old, 1, 20_000_000)
        del gone
        with stream:
            words = cupy.empty(MIB, np.uint32)
            stream.begin_capture()
            fill(words, 2)
            del old
            graph = stream.end_capture()
            large = cupy.empty(14 * MIB, np.uint32)  # does not fit without the memory of `old`
            fill(large, 5, 0)
            graph.launch(stream)
            assert intact(words, 2)
            cupy.cuda.Device().synchronize()
            assert intact(large, 5)
    check_invariants(pool)


def test_memory_freed_during_a_capture_is_reusable(make_pool: MakePool) -> None:
    """Memory allocated before a capture and freed during it is reusable on other streams once its
    own stream's work is complete."""
    pool = make_pool(max_pool_size=64 * MIB)
    stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with pool.use():
        with stream:
            old = cupy.empty(2 * COUNT, np.uint32)
            fill(old, 1)
            small = cupy.empty(100, np.uint32)
            stream.begin_capture()
            fill(small, 2, 0)
            del old
            graph = stream.end_capture()
        with other:
            words = cupy.empty(15 * MIB, np.uint32)  # does not fit without the memory of `old`
            fill(words, 5, 0)
            graph.launch(other)
            assert intact(words, 5)
            assert intact(small, 2)
    check_invariants(pool)


def test_an_aborted_capture_keeps_no_memory(make_pool: MakePool) -> None:
    pool = make_pool(max_pool_size=64 * MIB)
    stream = cupy.cuda.Stream(non_blocking=True)
    with pool.use(), stream:
        words = cupy.empty(MIB, np.uint32)
        fill(words, 1)
        stream.synchronize()
        stream.begin_capture()
        inside = cupy.empty(MIB, np.uint32)
        fill(inside, 2)
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            stream.synchronize()
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            stream.end_capture()
        del inside
        expected = words.nbytes
        assert settled_bytes(pool, expected) == expected
        assert intact(words, 1)
    check_invariants(pool)


def test_a_buffer_used_by_a_graph_does_not_move(make_pool: MakePool) -> None:
    pool = make_pool(enable_defrag=False, block_size=32 * MIB)
    stream = cupy.cuda.Stream(non_blocking=True)
    buffers = [pool.allocate_buffer(200_000, stream) for _ in range(30)]
    with stream:
        stream.begin_capture()
        seen = buffers[21].array((50_000,), np.uint32)
        fill(seen, 4)
        graph = stream.end_capture()
        del seen
    address = buffers[21].pin()
    buffers[21].unpin()
    for buffer in buffers[:20]:
        buffer.close()
    assert pool.defragment().bytes_moved > 0
    assert buffers[21].pin() == address
    graph.launch(stream)
    stream.synchronize()
    assert intact(words_at(pool.provider, address, 200_000), 4)
    check_invariants(pool)
