"""Launches that start before the preceding kernel has ended."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import cukit as ck
from cukit.core import backend, dependent_launch
from cukit.core.dependent_launch import DependentFunction, _Attribute, _Config
from cukit.core.device import current_device
from cukit.core.kernel import Launch
from cukit.core.source import kernels_root, read_source
from cukit.errors import LaunchError
from cukit.graph_memory import Transition, graph_diffusion
from cukit.moe import expert_order, topk_router
from cukit.reference import moe as reference
from cukit.sequence import gated_scan, gated_scan_backward
from tests.recorder import Recorder


def test_structures_have_the_layout_of_the_driver():
    assert ctypes.sizeof(_Attribute) == 72
    assert _Attribute.value.offset == 8
    assert (_Config.stream.offset, _Config.attributes.offset) == (32, 40)
    assert (_Config.num_attributes.offset, ctypes.sizeof(_Config)) == (48, 56)


def test_threads_launch_on_their_own_streams(monkeypatch):
    """Threads share one DependentFunction, since launches are memoised per description."""
    stream_of = threading.local()
    launched = []

    def launch(config, *_):
        found = ctypes.cast(config, ctypes.POINTER(_Config)).contents.stream
        launched.append((stream_of.stream.ptr, found))
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
    assert Counter(launched) == {(111, 111): 20_000, (222, 222): 20_000}


def scan(channels):
    x = np.zeros((1, 4096, 2, 64), np.float16)
    decay = np.zeros((1, 4096, 2, *((64,) if channels else ())), np.float32)
    state = np.zeros((1, 2, 64, 64), np.float32)
    gated_scan(x, x, x, decay, initial_state=state)
    gated_scan_backward(x, x, x, x, decay, initial_state=state, grad_final_state=state)


def route(**options):
    topk_router(np.zeros((4096, 64), np.float32), 4, **options)


def diffuse():
    offsets = np.arange(4097, dtype=np.int32)
    edges = Transition(offsets, offsets[:-1].copy(), np.zeros(4096, np.float32))
    graph_diffusion(np.zeros((4096, 512), np.float32), edges, steps=4)


def attend(heads):
    q = np.zeros((2, 1, heads, 576), ml_dtypes.bfloat16)
    cache, table = np.zeros((200, 64, 1, 576), q.dtype), np.zeros((2, 100), np.int32)
    ck.mla_attention(q, cache, table, np.full(2, 6000, np.int32))


def verify():
    ck.speculative_verify(np.zeros((8, 3), np.int32), np.zeros((8, 4, 512), np.float32))


CHAINS = {
    "scan": lambda: scan(channels=False),
    "scan, channels": lambda: scan(channels=True),
    "order": lambda: expert_order(np.zeros((4096, 4), np.int32), 64),
    "router": lambda: route(losses=True),
    "router, capacity": lambda: route(capacity=8),
    "drafts": verify,
    "diffusion": diffuse,
    "mla": lambda: attend(16),
    "mla, 128 heads": lambda: attend(128),
}
CASES = [*((name, "sm_90") for name in CHAINS), ("scan", "sm_80"), ("scan, channels", "sm_80")]


@pytest.fixture
def record(monkeypatch):
    """A function that makes the calls of a chain and returns their launches and arrays."""
    launches = []

    def call(launch, *arrays, trailing_args=()):
        launches.append((launch, arrays))

    monkeypatch.setattr(Launch, "__call__", call)

    def run(name, arch):
        launches.clear()
        previous = backend.activate(Recorder(arch))
        try:
            CHAINS[name]()
        finally:
            backend.activate(previous)
        return list(launches)

    return run


def qualifiers(spec):
    """For each parameter of a kernel: whether it is `const`, and whether it is `__restrict__`."""
    text = re.sub(r"//[^\n]*", "", read_source(spec.source))
    (parameters,) = re.findall(rf"__global__[^;{{]*?\b{spec.entry}\(([^{{]*)\) {{", text)
    return [("const " in each, "__restrict__" in each) for each in parameters.split(",")]


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_arrays_written_earlier_in_a_chain_are_not_restrict(record, name, arch):
    """The compiler may load a `const __restrict__` array before the wait for the previous grid, or
    through the non-coherent cache."""
    written, found = [], []
    for launch, arrays in record(name, arch):
        if not launch.dependent:
            written.clear()
        spec = launch.kernel.spec
        flags = qualifiers(spec)
        for index, (array, (const, restrict)) in enumerate(zip(arrays, flags, strict=False)):
            if not isinstance(array, np.ndarray) or array.dtype.names:
                continue
            if const and restrict and any(np.shares_memory(array, each) for each in written):
                found.append(f"{spec.source}: parameter {index} of {spec.entry}")
        written += [
            array
            for array, (const, _) in zip(arrays, flags, strict=False)
            if not const and isinstance(array, np.ndarray)
        ]
    assert not found


def test_every_kernel_that_waits_is_in_a_recorded_chain(record):
    waiting = {
        str(path.relative_to(kernels_root()))
        for path in kernels_root().rglob("*.cu")
        if "wait_for_previous_grids()" in path.read_text()
    }
    recorded = {
        launch.kernel.spec.source
        for case in CASES
        for launch, _ in record(*case)
        if launch.dependent
    }
    assert recorded == waiting


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
        pytest.skip("needs compute capability 9.0")
    kernel = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
    with pytest.raises(LaunchError, match="cuLaunchKernelEx: CUDA error"):
        DependentFunction(kernel.kernel)((1,), (4096, 1, 1), (), 0)
