"""Crashes, endless loops and Ctrl-C end only the launch; uninitialised values show in results."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import cukit
from cukit.core.kernel import KernelSpec, load_kernel
from cukit.errors import EmulatorError, LaunchError

ROOT = Path(__file__).parents[2]

SOURCE = """
namespace {
constexpr int kThreads = 32;
}
extern "C" __global__ void __launch_bounds__(2 * kThreads, 1) copy(const float* x, float* out) {
  out[threadIdx.x] = x[threadIdx.x];
}
extern "C" __global__ void crash(const float* x, float* out) {
  out[static_cast<long long>(x[threadIdx.x]) << 40] = 1.0f;
}
extern "C" __global__ void spin(const float* x, float* out) {
  for (int i = 1; i != 0; i = x[0] < 2.0f ? i : 0) {
  }
  out[0] = 1.0f;
}
extern "C" __global__ void hold(const float* x, float* out) {
  volatile float* results = out;
  const volatile float* inputs = x;
  results[1] = 1.0f;
  while (inputs[1] == 1.0f) {
  }
  results[0] = 1.0f;
}
extern "C" __global__ void sum(const float* x, float* out) {
  float total;
  for (int i = 0; i < kThreads; ++i) total += x[i];
  out[threadIdx.x] = total;
}
extern "C" __global__ void large(const float* x, float* out) {
  __shared__ float rows[13000];
  rows[threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = rows[threadIdx.x];
}
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "guards.cu").write_text(SOURCE)
    return str(tmp_path / "guards.cu")


def launch(source: str, entry: str, threads: int = 32, **options: object) -> np.ndarray:
    with cukit.backend("emulator", **options):
        return launch_here(source, entry, threads)


def launch_here(source: str, entry: str, threads: int = 32) -> np.ndarray:
    """Launch with the active backend."""
    x, out = np.ones(64, np.float32), np.zeros(64, np.float32)
    load_kernel(KernelSpec(source, entry, (), threads))((2,), (x, out))
    return out


@pytest.mark.emulator
@pytest.mark.parametrize("checked", [True, False])
def test_launches_work_after_a_crash(source, checked):
    before = {number: signal.getsignal(number) for number in (signal.SIGSEGV, signal.SIGINT)}
    for _ in range(3):
        with pytest.raises(EmulatorError, match=r"thread \(0, 0, 0\) at .*guards\.cu:9"):
            launch(source, "crash", checked=checked)
        assert launch(source, "copy", checked=checked)[:32].all()
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.emulator
def test_a_crash_in_one_thread_does_not_affect_others(source):
    launch(source, "copy")
    results: list[object] = []

    def run(entry: str) -> None:
        try:
            results.append(launch_here(source, entry).sum())
        except EmulatorError as error:
            results.append("wild pointer" in str(error))

    threads = [threading.Thread(target=run, args=(e,)) for e in ("crash", "copy") * 3]
    with cukit.backend("emulator", checked=False):  # for all threads of the process
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(map(float, results)) == [1.0] * 3 + [32.0] * 3


URGENT = """
import os, signal, sys, threading
sys.path.insert(0, {root!r})
from cukit.errors import EmulatorError
from tests.emulator.test_guards import launch
launch({source!r}, "copy")
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGURG)).start()
try:
    launch({source!r}, "spin", patience=2)
except EmulatorError as error:
    print("ended:", error)
"""


@pytest.mark.emulator
def test_an_endless_loop_is_ended_despite_a_foreign_sigurg(source):
    """The emulator's timer uses the same signal, which is ignored by default."""
    code = URGENT.format(root=str(ROOT), source=source)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "CUKIT_QUIET": "1"},
    )
    assert done.stdout.startswith("ended: "), done.stderr
    assert "no progress" in done.stdout


INTERRUPTED = """
import os, signal, sys, threading
sys.path.insert(0, {root!r})
from tests.emulator.test_guards import launch
launch({source!r}, "copy")
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    launch({source!r}, "spin", checked={checked}, patience=600)
except KeyboardInterrupt:
    print("interrupted", launch({source!r}, "copy").sum())
"""


@pytest.mark.emulator
@pytest.mark.parametrize("checked", [True, False])
def test_ctrl_c_ends_a_launch(source, checked):
    code = INTERRUPTED.format(root=str(ROOT), source=source, checked=checked)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUKIT_QUIET": "1"},
    )
    assert done.stdout.strip() == "interrupted 32.0", done.stderr


@pytest.mark.emulator
@pytest.mark.parametrize("checked", [True, False])
def test_ctrl_c_is_left_to_the_handler_of_the_program(source, checked):
    """A program with its own SIGINT handler handles Ctrl-C itself, during a launch too."""
    seen = []
    x, out = np.ones(64, np.float32), np.zeros(64, np.float32)
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(out[:2].tolist()))
    try:
        with (
            cukit.backend("emulator", checked=checked, patience=100),
            ThreadPoolExecutor(1) as pool,
        ):
            kernel = load_kernel(KernelSpec(source, "hold", (), 1))
            launched = pool.submit(kernel, (1,), (x, out))
            while not (out[1] or launched.done()):
                time.sleep(0.01)
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.5)
            x[1] = 0
            launched.result()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [[0, 1]], "the handler was called during the launch"
    assert out[0] == 1


@pytest.mark.emulator
def test_uninitialised_values_show_in_the_result(source):
    got = launch(source, "sum")[:32]
    assert not (np.abs(got) < 1e30).any()


@pytest.mark.emulator
def test_launch_bounds_and_static_shared_memory_are_checked(source):
    assert launch(source, "copy", 64).sum() == 64
    with pytest.raises(LaunchError, match="the kernel's __launch_bounds__ allow 64"):
        launch(source, "copy", 96)
    with pytest.raises(LaunchError, match="52000 bytes of static shared memory"):
        launch(source, "large")


@pytest.mark.emulator
def test_an_array_of_the_wrong_type_is_rejected(source):
    x, out = np.ones(32), np.zeros(32, np.float32)
    message = "argument 0 is an array of float64, the kernel takes `const float*`"
    with cukit.backend("emulator"), pytest.raises(LaunchError) as caught:
        load_kernel(KernelSpec(source, "copy", (), 32))((1,), (x, out))
    assert message in str(caught.value)
