"""Launch arguments are checked against the cubin, and plans are cached by description."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import cukit
from cukit.core import kernel
from cukit.core.compiler import KernelSpec, compile_kernel
from cukit.core.kernel import NULL, Launch, Launches, by_value, check_arguments, int32s, launch_plan
from cukit.errors import LaunchError


class FakeGpuArray:
    """A stub that passes as a CuPy array."""

    __cuda_array_interface__ = None


@pytest.fixture
def column_sum():
    """Parameters: two pointers and two ints."""
    pytest.importorskip("cupy", reason="compiling needs NVRTC, which comes with CuPy")
    spec = KernelSpec(
        "common/column_sum.cu", "column_sum", (("DTYPE", "float32"), ("THREADS", 512)), 512
    )
    return compile_kernel(spec, "sm_80")


def test_matching_arguments_are_accepted(column_sum):
    check_arguments(column_sum, (FakeGpuArray(), NULL, np.int32(1), np.int32(2)))


@pytest.mark.parametrize(
    "args",
    [
        (FakeGpuArray(), NULL, np.int32(1)),
        (FakeGpuArray(), NULL, np.int64(1), np.int32(2)),
        (FakeGpuArray(), np.float32(0), np.int32(1), np.int32(2)),
    ],
    ids=["too few", "too wide", "no pointer"],
)
def test_mismatched_arguments_are_rejected_before_the_launch(column_sum, args):
    with pytest.raises(LaunchError, match=r"takes 4 parameters of \(8, 8, 4, 4\) bytes"):
        check_arguments(column_sum, args)


def test_python_numbers_are_rejected(column_sum):
    with pytest.raises(LaunchError, match="argument 2 is a int"):
        check_arguments(column_sum, (FakeGpuArray(), NULL, 1, 2))


def test_plans_are_made_once_per_description(monkeypatch):
    device_ids = [0]
    monkeypatch.setattr(kernel, "_device_getter", lambda: lambda: device_ids[0])
    calls = []

    @launch_plan
    def prepare(array, option):
        calls.append((array.shape, option))
        return len(calls)

    a, b = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    assert prepare(a, 1) == prepare(b, 1) == 1
    assert prepare(a, 2) == 2
    assert prepare(a.astype(np.float16), 1) == 3
    assert prepare(np.zeros((3, 2), np.float32).T, 1) == 4
    device_ids[0] = 1
    assert prepare(a, 1) == 5


def test_specs_do_not_share_their_shared_memory_limit(column_sum, monkeypatch):
    """CuPy returns the same function for every load of a cubin."""
    function = SimpleNamespace(kernel=None, max_dynamic_shared_size_bytes=48 << 10)
    module = SimpleNamespace(get_function=lambda entry: function)
    cupy = SimpleNamespace(RawModule=lambda path: module)
    monkeypatch.setattr(kernel, "require_cupy", lambda purpose: cupy)
    for shared_kib, limit_kib in ((0, 48), (100, 100), (60, 100), (200, 200)):
        spec = replace(column_sum.spec, shared_bytes=shared_kib << 10)
        kernel.Kernel(replace(column_sum, spec=spec))
        assert function.max_dynamic_shared_size_bytes == limit_kib << 10


def test_a_plan_of_none_is_cached_too(monkeypatch):
    monkeypatch.setattr(kernel, "_device_getter", lambda: lambda: 0)
    calls = []
    prepare = launch_plan(lambda array: calls.append(array.shape))
    assert prepare(np.zeros(3)) is prepare(np.ones(3)) is None
    assert calls == [(3,)]


class RecordingKernel:
    """A stub of a Kernel that records its checks and launches."""

    block = (32, 1, 1)
    shared_bytes = 16

    def __init__(self):
        self.checked, self.launched = [], []

    def check(self, args):
        self.checked.append(args)

    def function(self, *launch):
        self.launched.append(launch)


def test_a_launch_checks_its_arguments_once_and_keeps_their_order():
    kernel = RecordingKernel()
    launch = Launch(kernel, (4,), (np.int32(7),))
    (rows,) = launch.scalars
    launch("x", "y", trailing_args=("factor",))
    launch("x", "y", trailing_args=("other",))
    assert kernel.checked == [("x", "y", rows, "factor")]
    assert kernel.launched == [
        ((4,), (32, 1, 1), ("x", "y", rows, "factor"), 16),
        ((4,), (32, 1, 1), ("x", "y", rows, "other"), 16),
    ]


def test_launches_of_one_kernel_are_checked_once():
    kernel = RecordingKernel()
    launches = Launches(kernel)
    for number in (7, 8):
        launches((number,), (np.int32(number),))("x")
    assert [args[0] for args in kernel.checked] == ["x"]
    assert [grid for grid, *_ in kernel.launched] == [(7,), (8,)]


def test_a_plan_is_cached_by_the_description_without_lengths(monkeypatch):
    monkeypatch.setattr(kernel, "_device_getter", lambda: lambda: 0)
    planned, prepared = [], []

    def plan(array):
        planned.append(array.shape)
        return array.ndim

    def prepare(axes, array):
        prepared.append((axes, array.shape))
        return len(prepared)

    recall = launch_plan(prepare, plan=plan, shorten=lambda key: len(key[1][0]))
    shapes = [(3,), (4,), (4, 1), (3,)]
    assert [recall(np.zeros(shape)) for shape in shapes] == [1, 2, 3, 1]
    assert planned == [(3,), (4, 1)]
    assert prepared == [(1, (3,)), (1, (4,)), (2, (4, 1))]
    assert recall.__wrapped__(np.zeros(3)) == 4
    recall.forget()
    assert recall(np.zeros(3)) == 5
    assert planned == [(3,), (4, 1), (3,), (3,)]


def test_cupy_still_passes_values_by_address():
    """Otherwise launches work, but slowly: CuPy wraps every value again (core.kernel.by_value)."""
    function = pytest.importorskip("cupy.cuda.function", reason="CPointer is a class of CuPy")
    settings = np.arange(3.0).view(np.dtype((np.void, 24)))
    for value in (np.int32(-7), np.int64(1 << 40), np.float32(1.5), settings):
        wrapped = by_value(value)
        assert isinstance(wrapped, function.CPointer)
        assert wrapped.nbytes == value.nbytes
        assert ctypes.string_at(wrapped.ptr, value.nbytes) == value.tobytes()


def test_a_value_is_copied():
    pytest.importorskip("cupy", reason="values are wrapped for CuPy only")
    value = np.arange(3.0).view(np.dtype((np.void, 24)))
    before, wrapped = value.tobytes(), by_value(value)
    value.view(np.float64)[:] = 9.0
    assert ctypes.string_at(wrapped.ptr, 24) == before


def test_equal_numbers_of_different_types_are_distinct():
    pytest.importorskip("cupy")
    values = [by_value(kind(4)) for kind in (np.int32, np.int64, np.float32)]
    assert [value.nbytes for value in values] == [4, 8, 4]
    for zero in (np.float32(-0.0), np.float32(0.0)):
        assert ctypes.string_at(by_value(zero).ptr, 4) == zero.tobytes()


def test_int32s_packs_and_checks_integers():
    pytest.importorskip("cupy")
    given = (-7, 0, 2**31 - 1, np.int64(5))
    arguments = int32s(*given)
    assert [argument.nbytes for argument in arguments] == [4] * 4
    for argument, want in zip(arguments, given, strict=True):
        assert ctypes.string_at(argument.ptr, 4) == np.int32(want).tobytes()
    with pytest.raises(LaunchError, match="got \\(1, 2147483648\\)"):
        int32s(1, 2**31)
    with cukit.backend("emulator"):
        assert int32s(3, -4) == (3, -4)
        assert all(type(value) is np.int32 for value in int32s(3, -4))


def test_values_are_checked_like_scalars(column_sum):
    rows, cols = by_value(np.int32(1)), by_value(np.int32(2))
    check_arguments(column_sum, (FakeGpuArray(), by_value(np.intp(0)), rows, cols))
    with pytest.raises(LaunchError, match=r"passes 4 of \(8, 8, 8, 4\)"):
        check_arguments(column_sum, (FakeGpuArray(), NULL, by_value(np.int64(1)), cols))


def test_an_empty_grid_is_checked_and_not_launched():
    kernel = RecordingKernel()
    Launch(kernel, (4, 0))("x")
    assert kernel.checked == [("x",)]
    assert kernel.launched == []
