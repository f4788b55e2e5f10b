"""KernelBenchmark: checks, records and partial files, on this machine's device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import cukit.analyzer
from cukit.analyzer import KernelBenchmark
from cukit.analyzer.benchmark import Sampling
from cukit.analyzer.correctness import array_module
from cukit.analyzer.results import CaseKey, read
from cukit.analyzer.suite import SUITE
from cukit.errors import ConfigError

KEY: CaseKey = ("user", "double", "1000", "float32")
QUICK = Sampling(rounds=1, budget_ms=1.0, min_samples=3, pause_s=0.0)
CPU = {"gpu": "CPU", "ceilings": {"copy_gbps": 10.0, "bf16_gemm_tflops": 1.0}}


@pytest.fixture
def benchmark() -> KernelBenchmark:
    return KernelBenchmark(sampling=QUICK, environment=CPU)


def test_implementations_are_timed_and_checked_side_by_side(benchmark: KernelBenchmark) -> None:
    xp = array_module()
    x = xp.arange(1000, dtype=xp.float32)
    impls = {"good": lambda: 2 * x, "bad": lambda: 2.2 * x}
    good, bad = benchmark.compare(KEY, impls, lambda: x + x, bytes=8000, flops=1000)
    assert (good["impl"], good["correct"], good["error"]) == ("good", True, 0.0)
    assert (bad["impl"], bad["correct"]) == ("bad", False)
    assert bad["error"] == pytest.approx(0.1, rel=1e-3)
    assert good["timer"] == ("events" if benchmark.on_gpu else "wall")
    assert good["gbps"] == pytest.approx(8000 / good["median_us"] / 1e3, rel=0.05, abs=0.06)
    assert good["floor_us"] == 0.8, "8 kB at 10 GB/s"
    assert good["range_us"][0] <= good["median_us"] + 0.01
    assert benchmark.results["records"] == [good, bad]


def test_exceptions_are_reported_or_propagate(benchmark: KernelBenchmark) -> None:
    def fail() -> None:
        raise RuntimeError("out of luck")

    xp = array_module()
    seen = []
    records = benchmark.compare(
        KEY,
        {"broken": fail, "good": lambda: xp.ones(3)},
        lambda: xp.ones(3),
        on_failure=lambda name, error: seen.append((name, str(error))),
    )
    assert [record["impl"] for record in records] == ["good"]
    assert seen == [("broken", "out of luck")]
    with pytest.raises(RuntimeError, match="out of luck"):
        benchmark.compare(KEY, {"broken": fail}, lambda: xp.ones(3))


@pytest.mark.parametrize("check_fails", [False, True])
def test_an_implementation_that_fails_later_gets_no_record(check_fails: bool) -> None:
    """In the warm-up, or in the check after the timing."""
    xp = array_module()
    timed = []

    def call() -> Any:
        timed.append(0)
        if len(timed) == 2 and not check_fails:
            raise RuntimeError("second call")
        return xp.ones(3)

    def view(out: Any) -> Any:
        if len(timed) > 1:
            raise RuntimeError("second check")
        return out

    once = Sampling(rounds=1, min_samples=3, max_samples=3, pause_s=0.0)
    benchmark = KernelBenchmark(1, sampling=once, environment=CPU)
    seen = []
    records = benchmark.compare(
        KEY,
        {"broken": call},
        lambda: xp.ones(3),
        on_failure=lambda name, error: seen.append(str(error)),
        views={"broken": view} if check_fails else None,
    )
    assert not records
    assert seen == ["second check" if check_fails else "second call"]


def test_warm_up_and_sample_counts_are_respected() -> None:
    xp = array_module()
    benchmark = KernelBenchmark(benchmark_iters=30, environment=CPU)
    (record,) = benchmark.compare(KEY, {"good": lambda: xp.ones(3)}, lambda: xp.ones(3))
    assert 30 <= record["samples"] <= 120

    def calls(warmup_iters: int) -> int:
        made = []
        once = Sampling(rounds=1, min_samples=3, max_samples=3, pause_s=0.0)
        benchmark = KernelBenchmark(warmup_iters, sampling=once, environment=CPU)
        benchmark.compare(KEY, {"good": lambda: made.append(1) or xp.ones(3)}, lambda: xp.ones(3))
        return len(made)

    assert calls(7) - calls(0) == 7
    for arguments in ({"warmup_iters": -1}, {"benchmark_iters": 0}, {"timers": ["sundial"]}):
        with pytest.raises(ConfigError, match="KernelBenchmark"):
            KernelBenchmark(environment=CPU, **arguments)  # type: ignore[arg-type]


def test_the_small_suite_runs_and_is_correct(benchmark: KernelBenchmark) -> None:
    results = benchmark.run_full_suite(small=True)
    assert all(record["correct"] for record in results["records"])
    assert {record["op"] for record in results["records"]} == set(SUITE)
    for name in SUITE:
        assert hasattr(benchmark, f"benchmark_{name}"), "every family has its own method"
    (matmul,) = benchmark.benchmark_matmul(small=True)
    assert matmul["case"] == "48x32x64"
    keys = [case.key for cases in SUITE.values() for case in cases(False)]
    assert len(keys) == len(set(keys))


def test_a_killed_run_keeps_its_measurements(tmp_path: Path) -> None:
    """SIGKILL during the third case."""
    path = tmp_path / "results.json"
    script = (
        "import sys, time\n"
        "from tests.analyzer.test_benchmark import CPU, QUICK\n"
        "from cukit.analyzer import KernelBenchmark\n"
        "from cukit.analyzer.correctness import array_module\n"
        "xp = array_module()\n"
        f"b = KernelBenchmark(sampling=QUICK, environment=CPU, export={str(path)!r})\n"
        "for i in range(2):\n"
        "    b.compare(('user', 'op', str(i), 'float32'), {'a': lambda: xp.ones(3)},"
        " lambda: xp.ones(3))\n"
        "print('ready', flush=True)\n"
        "b.compare(('user', 'op', '2', 'float32'), {'a': lambda: time.sleep(60)},"
        " lambda: xp.ones(3))\n"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.readline().strip() == b"ready"
        time.sleep(0.05)
        os.kill(run.pid, signal.SIGKILL)
    content = read(path)
    assert [record["case"] for record in content["records"]] == ["0", "1"]
    assert json.loads(path.read_text())["environment"] == CPU


def test_the_package_exports_its_names() -> None:
    assert cukit.analyzer.KernelBenchmark is KernelBenchmark
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = cukit.analyzer.Nothing


@pytest.mark.gpu
@pytest.mark.timing
def test_every_clock_and_the_energy_on_the_gpu() -> None:
    import cupy

    benchmark = KernelBenchmark(timers=("graph replay", "wall"), energy=True, environment=CPU)
    x, out = (cupy.ones(1 << 26, cupy.float32) for _ in range(2))
    (record,) = benchmark.compare(
        KEY, {"copy": lambda: cupy.copyto(out, x)}, lambda: None, bytes=2 << 28
    )
    others = record["other_us"]
    assert others["graph replay"] == pytest.approx(record["median_us"], rel=0.1)
    assert others["wall"] > 0.9 * record["median_us"]
    assert record["joules_per_call"] is None or record["joules_per_call"] > 0
