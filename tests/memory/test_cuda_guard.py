"""Guarded memory on the GPU, as CuPy's allocator."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cukit.memory.guard import ALIGNMENT

pytestmark = [pytest.mark.gpu, pytest.mark.unguarded]

STRAY = r"""
extern "C" __global__ void stray(float* out, const float* x, long long i) { *out = x[i] + 1.0f; }
"""


@pytest.fixture
def guard() -> Iterator[Any]:
    from cukit.memory.cuda_guard import CudaGuard

    found = CudaGuard(seed=3)
    with found.installed():
        yield found
    found.memory.trim()


def starts_its_pages(array: Any) -> bool:
    return bool(array.data.ptr % (2 << 20) == 0)


def test_arrays_have_their_own_pages(guard):
    import cupy

    arrays = [cupy.empty(100, np.uint8) for _ in range(20)]
    pages = {array.data.ptr >> 21 for array in arrays}
    assert len(pages) == 20
    assert {array.data.ptr % ALIGNMENT for array in arrays} == {0}
    assert {starts_its_pages(array) for array in arrays} == {False, True}
    assert cupy.empty(0).size == 0
    for array in arrays:
        array[...] = 7
    assert all((array == 7).all() for array in arrays)
    assert guard.memory.check() == []


def test_a_write_past_the_end_of_an_array_is_found(guard):
    import cupy

    stray = cupy.RawKernel(STRAY, "stray")
    arrays = [cupy.zeros(101, np.float32) for _ in range(20)]
    out = next(array for array in arrays if starts_its_pages(array))
    stray((1,), (1,), (np.uint64(out.data.ptr + out.nbytes + 8), out, np.int64(0)))
    (damage,) = guard.memory.check()
    assert damage.allocation.address == out.data.ptr
    assert damage.allocation.size == out.nbytes
    assert out.nbytes + 8 <= damage.first <= damage.last < out.nbytes + 12
    assert any(frame.filename == __file__ for frame in damage.allocation.call_site)


def test_uninitialised_memory_is_neither_zero_nor_repeated(guard):
    import cupy

    seen = set()
    for _ in range(10):
        seen.add(cupy.empty(1000, np.int32).tobytes())
        guard.memory.check()
    assert bytes(4000) not in seen
    assert len(seen) > 2


@pytest.mark.parametrize("blocking", [False, True])
def test_a_capture_allocates_and_its_graph_keeps_the_memory(guard, blocking):
    import cupy

    x = cupy.arange(1000, dtype=np.float32)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=not blocking)
    with stream:
        cupy.square(x + 1)  # compiles
        stream.synchronize()
        stream.begin_capture()
        result = cupy.square(x + 1)  # two arrays, one of them freed
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    expected = (np.arange(1000, dtype=np.float32) + 1) ** 2
    np.testing.assert_array_equal(result.get(), expected)
    assert guard.memory.check() == []
    others = [cupy.zeros(1000, np.float32) for _ in range(50)]
    x[...] = 2
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert (result == 9).all()
    assert not any(other.any() for other in others)
    assert guard.memory.check() == []
    del graph


def test_other_threads_and_streams(guard):
    from concurrent.futures import ThreadPoolExecutor

    import cupy

    def work(seed: int) -> bool:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x = cupy.full(10_000 + seed, seed, np.int32)
            for _ in range(50):
                x = x + 1
            stream.synchronize()
            return bool((x == seed + 50).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(40)))
    assert guard.memory.check() == []


def test_a_read_past_the_end_of_an_array_faults() -> None:
    """In a separate process, because a fault destroys the context."""
    code = f"""
import cupy, numpy as np
from cukit.memory.cuda_guard import CudaGuard
guard = CudaGuard(seed=3)
with guard.installed():
    arrays = [cupy.zeros(128, np.float32) for _ in range(20)]
    stray = cupy.RawKernel({STRAY!r}, "stray")
    at_end = next(x for x in arrays if x.data.ptr % (2 << 20))
    print("read behind", at_end.size, flush=True)
    stray((1,), (1,), (arrays[0], at_end, np.int64(128)))
    guard.memory.check()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "read behind 128" in done.stdout
    assert done.returncode != 0
    assert "cudaErrorIllegalAddress" in done.stderr
