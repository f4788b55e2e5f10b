"""Threads that share a GPU's pool: default streams, arrays of other threads, destroyed streams."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from cukit.memory import MemoryPool, Provider
from tests.memory.device_work import count_wrong, fill, in_thread, intact
from tests.memory.invariants import check_invariants

cupy = pytest.importorskip("cupy")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("provider", ["cuda-vmm", "cuda-malloc"], indirect=True),
]

MIB = 1 << 20
MakePool = Callable[..., MemoryPool]


def test_each_thread_has_its_own_default_stream(make_pool: MakePool) -> None:
    """The streams share a handle. After the threads end, any stream may reuse their memory."""
    pool = make_pool(max_pool_size=128 * MIB)
    wrong = cupy.zeros(1, np.uint32)
    cupy.cuda.Device().synchronize()
    keys: list[Any] = []
    handed_over: list[Any] = []
    together = threading.Barrier(4)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with cupy.cuda.Stream.ptds, pool.use():
                keys.append(pool.provider.current_stream())
                together.wait(60)
                for step in range(60):
                    value = 1000 * seed + step
                    array = cupy.empty(MIB // 2 + step, np.uint32)
                    fill(array, value)
                    count_wrong(array, value, wrong)
                    if step % 20 == 0:
                        handed_over.append(array)
                    del array
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(set(keys)) == 4
    assert int(wrong[0]) == 0
    handed_over.clear()
    pool.free(pool.allocate(128 * MIB))
    check_invariants(pool)


def test_a_reused_thread_id_is_another_stream(make_pool: MakePool) -> None:
    """A new thread may have the id of a thread that has ended, but has another default stream."""
    pool = make_pool(max_pool_size=8 * MIB)
    box: list[Any] = []
    numbers: list[int] = []
    fill(cupy.empty(1, np.uint32), 0)  # compiled before anything is timed

    def leave() -> None:
        with cupy.cuda.Stream.ptds, pool.use():
            array = cupy.empty(MIB, np.uint32)
            fill(array, 1, 200_000_000)  # a tenth of a second
            box.append(array)
        numbers.append(threading.get_ident())

    def drop() -> None:
        with cupy.cuda.Stream.ptds:
            pool.provider.current_stream()  # registers the thread's default stream
            box.clear()
        numbers.append(threading.get_ident())

    for _ in range(30):  # usually the first thread's id is reused
        numbers.clear()
        in_thread(leave)
        in_thread(drop)
        with pool.use(), cupy.cuda.Stream(non_blocking=True) as stream:
            array = cupy.empty(MIB, np.uint32)
            fill(array, 7, 0)
            stream.synchronize()
            cupy.cuda.Device().synchronize()
            assert intact(array, 7), "reused while the kernel of an ended thread wrote to it"
            del array
        if numbers[0] == numbers[1]:
            return
    pytest.fail("no thread id was reused: nothing was tested")


def test_threads_exchange_arrays(make_pool: MakePool) -> None:
    pool = make_pool(max_pool_size=256 * MIB)
    wrong = cupy.zeros(1, np.uint32)
    cupy.cuda.Device().synchronize()
    box: list[tuple[Any, int, Any]] = []
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        numbers = random.Random(seed)
        stream = cupy.cuda.Stream(non_blocking=True)
        try:
            with stream:
                for step in range(150):
                    value = 1000 * seed + step
                    array = cupy.empty(int(2 ** numbers.uniform(4, 20)), np.uint32)
                    fill(array, value, 10_000)
                    if numbers.random() < 0.5:
                        box.append((array, value, stream.record()))
                    else:
                        count_wrong(array, value, wrong)
                    del array
                    if len(box) > 10:
                        try:
                            array, value, event = box.pop(0)
                        except IndexError:
                            continue
                        stream.wait_event(event)
                        pool.used_on(array.data.ptr, stream)
                        count_wrong(array, value, wrong)
                        del array
                    if numbers.random() < 0.02:
                        pool.defragment()
                stream.synchronize()
        except BaseException as error:
            errors.append(error)

    pool.install()
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        pool.uninstall()
    assert not errors
    for array, value, _ in box:
        assert intact(array, value)
    box.clear()
    assert int(wrong[0]) == 0
    check_invariants(pool)


def test_streams_are_destroyed_while_other_threads_query_them(
    make_pool: MakePool, provider: Provider
) -> None:
    # Five arrays are live at a time, and a few are pending. Each can be in a different segment of
    # 48 MiB, and the rest of a segment can be neither returned to cudaMalloc nor remapped.
    pool = make_pool(max_pool_size=(128 if provider.can_remap else 512) * MIB)
    wrong = cupy.zeros(1, np.uint32)
    cupy.cuda.Device().synchronize()

    def work(seed: int) -> None:
        for step in range(150):
            value = 1000 * seed + step
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream, pool.use():
                array = cupy.empty(MIB + step, np.uint32)
                fill(array, value, 5_000)
                count_wrong(array, value, wrong)
                del array
            del stream

    with ThreadPoolExecutor(5) as threads:
        running = [threads.submit(work, seed) for seed in range(5)]
        while not all(each.done() for each in running):
            pool.free(pool.allocate(48 * MIB))  # reuses memory freed on other streams
            pool.defragment()
    for each in running:
        each.result()
    cupy.cuda.Device().synchronize()
    assert int(wrong[0]) == 0
    check_invariants(pool)
