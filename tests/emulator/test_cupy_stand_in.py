"""CuPy's kernels without a GPU: emulate_cupy and the pytest plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cukit
from cukit.errors import EmulatorError, LaunchError

pytestmark = pytest.mark.emulator

ROOT = Path(__file__).parents[2]
PLUGIN = "cukit.emulator.pytest_plugin"

ADD = r"""
extern "C" __global__ void add(const float* a, const float* b, float* c, int n) {
  int i = blockDim.x * blockIdx.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}"""


@pytest.fixture(name="cp")
def emulated_cupy() -> Iterator[Any]:
    with cukit.emulate_cupy() as module:
        yield module


def test_raw_kernels_are_launched_and_checked(cp: Any) -> None:
    a = cp.arange(100, dtype=cp.float32)
    out = cp.empty(100, cp.float32)
    for unwritten in (out, cp.empty((3, 5), cp.float32, order="F")):
        assert bool(cp.isnan(unwritten).all()), "unwritten elements are NaN"
    add = cp.RawKernel(ADD, "add")
    add((4,), (32,), (a, 2 * a, out, a.size))
    assert (out == 3 * a).all()
    assert isinstance(out.sum(), cp.ndarray)
    assert type(cp.asnumpy(out)) is np.ndarray
    with pytest.raises(EmulatorError, match=r"past the end of argument 2[^\n]*\n.*add\.cu:4"):
        add((4,), (32,), (a, a, out[:50].copy(), 100))


def test_arguments_that_a_gpu_cannot_access_are_rejected(cp: Any) -> None:
    add, x = cp.RawKernel(ADD, "add"), cp.zeros(4, cp.float32)
    with pytest.raises(TypeError, match="argument 0 is a NumPy array"):
        add((1,), (4,), (np.zeros(4, np.float32), x, x, 4))
    with pytest.raises(LaunchError, match="takes 4 arguments, got 1"):
        add((1,), (4,), (x,))
    with pytest.raises(LaunchError, match="max_dynamic_shared_size_bytes"):
        add((1,), (4,), (x, x, x, 4), shared_mem=1 << 16)
    add((1,), (4,), (x.data.ptr, x, x, 4))


def test_raw_modules_have_templates_and_variables(cp: Any) -> None:
    module = cp.RawModule(
        code="__constant__ float c[3];\n"
        "template <typename T> __global__ void mul(T* x) { x[threadIdx.x] *= c[threadIdx.x]; }",
        name_expressions=["mul<float>", "mul<double>"],
    )
    cp.ndarray(3, cp.float32, module.get_global("c"))[...] = cp.arange(3, dtype=cp.float32)
    x = cp.ones(3, cp.float64)
    module.get_function("mul<double>")((1,), (3,), (x,))
    assert x.tolist() == [0, 1, 2]


def test_elementwise_kernels_equal_numpy(cp: Any) -> None:
    blend = cp.ElementwiseKernel(
        "T x, raw T y, float32 w", "T z", "z = w * x + twice(y[_ind.size() - 1 - i])", "blend",
        preamble="template <typename T> __device__ T twice(T v) { return v + v; }",
    )  # fmt: skip
    x, y = cp.arange(6, dtype=cp.float64).reshape(2, 3), cp.arange(6, dtype=cp.float64)
    expected = 0.5 * x + 2 * y[::-1].reshape(2, 3)
    np.testing.assert_allclose(blend(x, y, 0.5), expected)
    np.testing.assert_allclose(blend(x[:, :1], y, 0.5).shape, (2, 1))
    threads = cp.ElementwiseKernel("T x", "int32 y", "y = blockDim.x", "threads")
    assert set(threads(x, block_size=96).ravel().tolist()) == {96}
    with pytest.raises(TypeError, match="type is mismatched"):
        blend(x, y.astype(cp.float32), 0.5)
    overrun = cp.ElementwiseKernel("T x", "raw T y", "y[i + 9] = x", "overrun")
    with pytest.raises(EmulatorError, match="past the end"):
        overrun(x, y)


def test_reduction_kernels_equal_numpy(cp: Any) -> None:
    norm = cp.ReductionKernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "norm")
    x = cp.arange(24, dtype=cp.float32).reshape(2, 3, 4)
    np.testing.assert_allclose(norm(x), np.linalg.norm(x.get()), rtol=1e-6)
    axes = np.sqrt((x.get() ** 2).sum((0, 2)))
    np.testing.assert_allclose(norm(x, axis=(0, 2)), axes, rtol=1e-6)
    assert norm(x, axis=1, keepdims=True).shape == (2, 1, 4)


def test_unsupported_features_of_cupy_are_reported(cp: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"cupy\.cuda\.Graph is not emulated"):
        cp.cuda.Graph()
    with pytest.raises(NotImplementedError, match="compiled code"):
        cp.RawModule(path="kernel.cubin")


def test_the_previous_state_is_restored() -> None:
    cupy = pytest.importorskip("cupy")
    before = dict(vars(cupy))
    with cukit.emulate_cupy(arch="sm_80") as module:
        assert module is cupy
        assert module.cuda.Device().compute_capability == "80"
        assert vars(cupy) != before
    assert vars(cupy) == before


SUITE = """
import cupy as cp
from cupy import RawKernel

reverse = RawKernel(r'''
extern "C" __global__ void reverse(int* x) {
  __shared__ int s[64];
  s[threadIdx.x] = x[threadIdx.x];
  SYNC
  x[threadIdx.x] = s[63 - threadIdx.x];
}''', "reverse")

def test_reverse():
    x = cp.arange(64, dtype=cp.int32)
    reverse((1,), (64,), (x,))
    assert x[0] == 63
"""


def run_suite(folder: Path, suite: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_suite.py").write_text(suite)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--cukit-emulate"]
    if not any(each.value == PLUGIN for each in entry_points(group="pytest11")):
        command += ["-p", PLUGIN]  # the installed version is older than the plugin
    return subprocess.run(
        [*command, *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("barrier", [True, False])
def test_the_pytest_plugin_reports_a_race(tmp_path: Path, barrier: bool) -> None:
    sync = "__syncthreads();" if barrier else "__syncwarp();"
    result = run_suite(tmp_path, SUITE.replace("SYNC", sync))
    assert result.returncode == (0 if barrier else 1), result.stdout
    if not barrier:
        assert "EmulatorError: reverse: " in result.stdout


COUNT_SUITE = """
from cupy import RawKernel
import cupy as cp
count = RawKernel('extern "C" __global__ void count(int* total) { *total += 1; }', "count")

def test_count():
    total = cp.zeros(1, cp.int32)
    count((1,), (32,), (total,))
"""


@pytest.mark.parametrize("global_races", [True, False])
def test_the_pytest_plugin_reports_races_in_global_memory_on_request(
    tmp_path: Path, global_races: bool
) -> None:
    result = run_suite(tmp_path, COUNT_SUITE, *["--cukit-global-races"] * global_races)
    assert result.returncode == int(global_races), result.stdout
