"""The pool as CuPy's allocator: arrays on several streams, garbage collections at any time."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cukit.errors import ConfigError, OutOfMemoryError
from cukit.memory import MemoryPool
from tests.memory.device_work import count_wrong, fill, in_thread, intact, words_at
from tests.memory.invariants import check_invariants

cupy = pytest.importorskip("cupy")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("provider", ["cuda-vmm", "cuda-malloc"], indirect=True),
]

MIB = 1 << 20
MakePool = Callable[..., MemoryPool]


def test_install_affects_every_thread_until_uninstalled(make_pool: MakePool) -> None:
    pool = make_pool()
    theirs = cupy.arange(1000)
    pool.install()
    try:
        ours = cupy.arange(MIB, dtype=np.uint32)
        assert pool.owns(ours.data.ptr)
        assert not pool.owns(theirs.data.ptr)
        assert int((ours[:1000] + theirs).sum()) == 999_000
        of_thread: list[Any] = []
        in_thread(lambda: of_thread.append(cupy.ones(100)))
        assert pool.owns(of_thread[0].data.ptr)
        assert cupy.empty(0).size == 0
        with pytest.raises(ConfigError, match="not installed"):
            make_pool().uninstall()
    finally:
        pool.uninstall()
    with pytest.raises(ConfigError, match="not installed"):
        pool.uninstall()
    assert not pool.owns(cupy.ones(100).data.ptr)
    assert bool((ours == cupy.arange(MIB, dtype=np.uint32)).all())
    before = pool.statistics().live_bytes
    view = ours[5:]
    del ours
    assert pool.statistics().live_bytes == before, "a view keeps the memory"
    del view
    assert pool.statistics().live_bytes == before - 4 * MIB
    check_invariants(pool)


def test_use_affects_one_thread_and_nests(make_pool: MakePool) -> None:
    pool, inner = make_pool(), make_pool()
    seen: list[bool] = []
    with pool.use():
        first = cupy.ones(10)
        with inner.use():
            second = cupy.ones(10)
        third = cupy.ones(10)
        in_thread(lambda: seen.append(pool.owns(cupy.ones(10).data.ptr)))
        with pytest.raises(ConfigError, match="install"):
            pool.install()
    assert [pool.owns(a.data.ptr) for a in (first, second, third)] == [True, False, True]
    assert inner.owns(second.data.ptr)
    assert seen == [False]
    assert not pool.owns(cupy.ones(10).data.ptr)


def test_out_of_memory_is_both_errors_and_the_pool_remains_usable(make_pool: MakePool) -> None:
    pool = make_pool(max_pool_size=32 * MIB, call_site_depth=4)
    with pool.use():
        kept = cupy.empty(20 * MIB, np.uint8)
        with pytest.raises(OutOfMemoryError) as ours:
            cupy.empty(16 * MIB, np.uint8)
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            cupy.zeros((1 << 40,), np.uint8)
        assert ours.value.report.requested == 16 * MIB
        text = str(ours.value)
        assert "cannot allocate 16.00 MiB" in text
        assert "(limit: 32.00 MiB)" in text
        assert "live: 20.00 MiB in 1 from" in text
        assert "a larger max_pool_size: the device has the memory" in text
        del kept
        assert cupy.empty(30 * MIB, np.uint8).nbytes == 30 * MIB
    assert pool.statistics().num_out_of_memory == 2
    assert pool.statistics().peak_reserved_bytes <= 32 * MIB
    check_invariants(pool)


def test_streams_share_memory_in_order(make_pool: MakePool) -> None:
    """Delayed kernels on four streams, in less memory than the streams would need separately."""
    pool = make_pool(max_pool_size=96 * MIB)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    wrong = [cupy.zeros(1, np.uint32) for _ in streams]
    cupy.cuda.Device().synchronize()
    numbers = random.Random(0)
    live: list[tuple[Any, int, int]] = []

    def check_and_drop(array: Any, value: int, home: int, away: int) -> None:
        if away != home:
            streams[away].wait_event(streams[home].record())
            pool.used_on(array.data.ptr, streams[away])
        with streams[away]:
            count_wrong(array, value, wrong[away])

    with pool.use():
        for step in range(800):
            if len(live) > 12 or (live and numbers.random() < 0.45):
                array, value, home = live.pop(numbers.randrange(len(live)))
                check_and_drop(array, value, home, numbers.randrange(4))
                del array
            else:
                home = numbers.randrange(4)
                with streams[home]:
                    array = cupy.empty(numbers.randrange(1, MIB), np.uint32)
                    fill(array, step)
                live.append((array, step, home))
                del array
        while live:
            check_and_drop(*live.pop(), 0)
    for stream in streams:
        stream.synchronize()
    assert [int(count[0]) for count in wrong] == [0] * 4
    check_invariants(pool)
    pool.trim()
    assert pool.statistics().reserved_bytes == 0
    assert pool.statistics().pending_bytes == 0


def test_streams_that_reuse_a_handle_are_distinguished(make_pool: MakePool) -> None:
    """The driver gives a destroyed stream's handle to the next one."""
    pool = make_pool(max_pool_size=16 * MIB)
    keys, handles = set(), set()
    wrong = cupy.zeros(1, np.uint32)
    cupy.cuda.Device().synchronize()
    for step in range(40):
        stream = cupy.cuda.Stream(non_blocking=True)
        handles.add(stream.ptr)
        with stream, pool.use():
            array = cupy.empty(3 * MIB, np.uint32)  # a second one would not fit
            fill(array, step)
            count_wrong(array, step, wrong)
            keys.add(pool.provider.current_stream())
            if step % 2:
                del array
        if step % 2 == 0:
            del stream
            del array  # freed on a stream that no longer exists
    assert len(keys) == 40
    assert len(handles) < 40, "no handle was reused: nothing was tested"
    cupy.cuda.Device().synchronize()
    assert int(wrong[0]) == 0
    check_invariants(pool)


class _Cycle:
    """A reference cycle, which only the garbage collector frees."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.me = self


def test_collections_at_every_moment(make_pool: MakePool) -> None:
    pool = make_pool(max_pool_size=64 * MIB)
    kept: list[tuple[Any, int]] = []
    before = gc.get_threshold()
    gc.set_threshold(3, 1, 1)
    try:
        with pool.use():
            for number in range(600):
                _Cycle(cupy.empty(1 + 97_777 * number % (3 * MIB), np.uint8))
                if number % 40 == 0:
                    array = cupy.empty(100_000 + number, np.uint32)
                    fill(array, number)
                    kept.append((array, number))
                    pool.defragment()
                    pool.trim()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert pool.statistics().num_live == len(kept)
    assert all(intact(array, number) for array, number in kept)
    check_invariants(pool)


def test_work_queued_before_unpin_is_waited_for(make_pool: MakePool) -> None:
    pool = make_pool(enable_defrag=False, block_size=32 * MIB)
    stream = cupy.cuda.Stream(non_blocking=True)
    buffers = [pool.allocate_buffer(200_000, stream) for _ in range(40)]
    for buffer in buffers[::2]:
        buffer.close()
    before = [buffer.pin() for buffer in buffers[1::2]]
    with stream:
        for value, address in enumerate(before):
            fill(words_at(pool.provider, address, 200_000), value)
    for buffer in buffers[1::2]:
        buffer.unpin()
    assert pool.defragment().bytes_moved > 0
    after = [buffer.pin() for buffer in buffers[1::2]]
    assert after != before
    for value, address in enumerate(after):
        assert intact(words_at(pool.provider, address, 200_000), value)
    check_invariants(pool)


def test_use_in_a_forked_child_is_an_error(make_pool: MakePool) -> None:
    pool = make_pool()
    with pool.use():
        array = cupy.ones(1000)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            del array
            pool.allocate(512)
        except BaseException as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    message = os.read(reader, 1000)
    os.close(reader)
    assert b"CUDA cannot be used after fork" in message
    assert float(array.sum()) == 1000
