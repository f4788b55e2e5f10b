"""Launches that start before the preceding kernel has ended."""

from __future__ import annotations

import ctypes
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from cukit.core import dependent_launch
from cukit.core.dependent_launch import DependentFunction, _Attribute, _Config
from cukit.core.device import current_device
from cukit.errors import LaunchError
from cukit.moe import expert_order
from cukit.reference import moe as reference


def test_structures_have_the_layout_of_the_driver():
    assert ctypes.sizeof(_Attribute) == 72
    assert _Attribute.value.offset == 8
    assert (_Config.stream.offset, _Config.attributes.offset) == (32, 40)
    assert (_Config.num_attributes.offset, ctypes.sizeof(_Config)) == (48, 56)


def test_threads_launch_on_their_own_streams(monkeypatch):
    """They share one function, since launches are memoised per description."""
    stream_of = threading.local()
    wrong = []

    def launch(config, *_):
        found = ctypes.cast(config, ctypes.POINTER(_Config)).contents.stream
        if found != stream_of.stream.ptr:
            wrong.append(found)
        return 0

    monkeypatch.setattr(dependent_launch, "_driver", lambda: (launch, lambda: stream_of.stream))
    function = DependentFunction(SimpleNamespace(ptr=1))

    def work(stream):
        stream_of.stream = SimpleNamespace(ptr=stream)
        for _ in range(20_000):
            function((1,), (1, 1, 1), (), 0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(stream,)) for stream in (111, 222)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


@pytest.mark.gpu
def test_writes_of_the_first_kernel_are_visible_to_the_second():
    """Alternating launches on two streams, each with preceding work."""
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)
    choices = [rng.integers(0, 64, (tokens, 8)).astype(np.int32) for tokens in (5000, 70, 33000)]
    placed = [cupy.asarray(each) for each in choices]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    cupy.cuda.Device().synchronize()
    results = []
    for turn in range(30):
        with streams[turn % 2]:
            cupy.ones(1 << 20).sum()
            results.append(expert_order(placed[turn % 3], 64))
    cupy.cuda.Device().synchronize()
    for turn, result in enumerate(results):
        expected = reference.expert_order(choices[turn % 3], 64)
        for got, wanted in zip(result, expected, strict=True):
            np.testing.assert_array_equal(got.get(), wanted)


@pytest.mark.gpu
def test_a_rejected_launch_raises():
    cupy = pytest.importorskip("cupy")
    if current_device().compute_capability < (9, 0):
        pytest.skip("not on this GPU")
    kernel = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
    with pytest.raises(LaunchError, match="cuLaunchKernelEx: CUDA error"):
        DependentFunction(kernel.kernel)((1,), (4096, 1, 1), (), 0)
