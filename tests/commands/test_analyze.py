"""`cukit analyze`: kernels of a script from a simulated trace, and kernels from their code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cukit.analyzer.cupti import KernelRecord
from cukit.analyzer.schema import Counters
from cukit.analyzer.schema_json import from_json
from cukit.analyzer.trace_summary import analyses_of, total_us
from cukit.cli import run
from cukit.commands import analyze as command
from cukit.core.device import cupy_module, typical_device
from cukit.core.source import kernels_root
from tests.analyzer.stub_trace import StubTrace

Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.skipif(cupy_module() is None, reason="CUDA scripts import CuPy")

KERNEL = r"""
// __global__ void commented(float* x)
template <int N> __device__ float twice(float x) { return N * x; }
extern "C" __global__ void __launch_bounds__(128, 2) scale(float* x, int n) {
  const int i = blockIdx.x * 128 + threadIdx.x;
  if (i < n) x[i] = twice<2>(x[i]);
}
"""

SCRIPT = '''
import sys

import cupy

print("script arguments:", sys.argv[1:] if __name__ == "__main__" else "")
kernel = cupy.RawKernel(r"""extern "C" __global__ void f(float* x) { x[threadIdx.x] = 1; }""", "f")
calls = []


def step():
    calls.append(1)
    print("a step")


def fail():
    raise ValueError("out of luck")


def give_up():
    sys.exit("no data to train on")


number = 3
'''


def record(name: str, start_us: float, duration_us: float, blocks: int = 132) -> KernelRecord:
    start = int(start_us * 1e3)
    end = start + int(duration_us * 1e3)
    return KernelRecord(name, (blocks, 1, 1), (256, 1, 1), 64, 1024, 0, 0, start, end, 7)


RECORDS = [
    record("small", 0, 2.0),
    record("large", 3, 30.0),
    record("small", 40, 4.0, blocks=7),
    record("large", 50, 34.0),
    record("small", 90, 3.0),
]


def test_launches_of_a_trace_are_grouped_by_name() -> None:
    large, small = analyses_of(RECORDS, typical_device("sm_90"))
    assert (large.name, small.name) == ("large", "small")
    assert (total_us(large), total_us(small)) == (64.0, 9.0)
    assert large.warm is not None
    assert (large.warm.samples, large.warm.median_us, large.warm.timer) == (2, 32.0, "cupti")
    assert small.launches[0].grid == (132, 1, 1), "the grid with the longer total time: 5 us, not 4"
    assert small.launches[0].device_us == 3.0
    assert small.throughput is None
    assert "counters" in small.missing["throughput"]
    resources = large.launches[0].resources
    assert resources is not None
    assert resources.spill_store_bytes is None, "not part of a trace"


def test_counters_give_a_trace_its_bandwidth() -> None:
    counters = {"large": Counters("ncu", dram_read_bytes=3e7, dram_write_bytes=2e6)}
    large, small = analyses_of(RECORDS, typical_device("sm_90"), counters)
    assert large.throughput is not None
    assert large.throughput.gbps == pytest.approx(1000.0)
    assert small.missing["counters"] == "ncu measured no kernel small"
    uneven = [record("copy", 0, 1.0), record("copy", 10, 1.0), record("copy", 20, 7.0)]
    counters = {"copy": Counters("ncu", dram_read_bytes=3e6), "large": Counters("ncu")}
    large, copy = analyses_of([*RECORDS[1:2], *uneven], typical_device("sm_90"), counters)
    assert copy.throughput is not None
    assert copy.throughput.gbps == pytest.approx(1000.0), "mean bytes over the mean time"
    assert large.throughput is None
    assert large.missing["throughput"] == "ncu reported no traffic to device memory"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script, with a simulated GPU whose trace is RECORDS."""
    monkeypatch.setattr(command, "KernelTrace", lambda: StubTrace(RECORDS))
    monkeypatch.setattr(command, "current_device", lambda: typical_device("sm_90"))
    monkeypatch.setattr("cukit.analyzer.machine._memory_gbps", lambda: None)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_function_is_warmed_up_and_repeated(
    script: Path, tmp_path: Path, capsys: Capture
) -> None:
    saved = tmp_path / "analysis.json"
    assert run(["analyze", f"{script}:step", "--repeat", "3", "--out", str(saved)]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("a step") == 4
    assert captured.err.count("script arguments:") == 1
    assert "a step" not in captured.out
    lines = [line.split() for line in captured.out.splitlines()]
    assert lines[1][:4] == ["large", "2", "64.0", "87.7%"]
    report = from_json(saved.read_text())
    assert [analysis.name for analysis in report.analyses] == ["large", "small"]
    assert report.environment.gpu == "H200"


def test_a_whole_script_is_analyzed_as_json(script: Path, capsys: Capture) -> None:
    assert run(["analyze", str(script), "--json"]) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["analyses"]) == 2
    assert captured.err.count("script arguments: []") == 1


def test_counters_come_from_a_run_under_ncu(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def run_ncu(arguments: list[str]) -> dict[str, Counters]:
        assert arguments[1:] == ["-m", "cukit.analyzer.script", f"{script}:step"]
        return {"large": Counters("ncu", dram_read_bytes=3.2e7)}

    monkeypatch.setattr(command, "run_ncu", run_ncu)
    assert run(["analyze", f"{script}:step", "--counters"]) == 0
    assert "1000" in capsys.readouterr().out


def test_a_script_that_raises_shows_its_own_traceback(script: Path, capsys: Capture) -> None:
    assert run(["analyze", f"{script}:fail"]) == 1
    error = capsys.readouterr().err
    assert "ValueError: out of luck" in error
    assert "in fail" in error
    assert run(["analyze", f"{script}:give_up"]) == 1
    assert "no data to train on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nothing", "has no 'nothing'; known"),
        ("number", "is neither a function nor a kernel but 3"),
    ],
)
def test_names_that_cannot_be_run_are_rejected(
    name: str, complaint: str, script: Path, capsys: Capture
) -> None:
    assert run(["analyze", f"{script}:{name}"]) == 2
    assert complaint in capsys.readouterr().err


def test_a_raw_kernel_of_a_script_is_described(script: Path, capsys: Capture) -> None:
    assert run(["analyze", f"{script}:kernel", "--arch", "sm_80", "--block", "32", "--json"]) == 0
    (analysis,) = json.loads(capsys.readouterr().out)["analyses"]
    assert (analysis["name"], analysis["arch"]) == ("f", "sm_80")


def test_a_source_file_is_described_for_any_architecture(tmp_path: Path, capsys: Capture) -> None:
    source = tmp_path / "scale.cu"
    source.write_text(KERNEL)
    for arch in ("sm_75", "sm_120"):
        arguments = ["--arch", arch, "--block", "128", "--grid", "4096", "--json"]
        assert run(["analyze", str(source), *arguments]) == 0
        (analysis,) = json.loads(capsys.readouterr().out)["analyses"]
        assert analysis["name"] == "scale"
        assert analysis["launches"][0]["resources"]["max_threads_per_block"] == 128
    assert run(["analyze", str(source), "--block", "128"]) == 0
    assert "scale" in capsys.readouterr().out
    assert run(["analyze", str(source)]) == 2
    assert "256 threads per block, but its __launch_bounds__" in capsys.readouterr().err


def test_a_source_of_cukit_is_described_in_the_variants_that_run(capsys: Capture) -> None:
    source = kernels_root() / "layers" / "rms_norm.cu"
    assert run(["analyze", str(source), "--arch", "sm_80"]) == 0
    output = capsys.readouterr().out
    assert "rms_norm(DTYPE=bfloat16" in output
    assert "0×0×0" not in output


def test_a_cubin_needs_the_name_of_a_kernel(tmp_path: Path, capsys: Capture) -> None:
    from cukit.analyzer.timing import SPIN
    from cukit.core.compiler import compile_kernel

    path = str(compile_kernel(SPIN, "sm_90a").path)
    assert run(["analyze", path]) == 2
    assert "--entry" in capsys.readouterr().err
    assert run(["analyze", path, "--entry", "spin", "--block", "1", "--json"]) == 0
    assert run(["analyze", str(tmp_path / "none.cubin"), "--entry", "f"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_a_source_with_several_kernels_needs_a_name(tmp_path: Path, capsys: Capture) -> None:
    source = tmp_path / "two.cu"
    source.write_text(KERNEL + KERNEL.replace("scale", "shift"))
    assert run(["analyze", str(source)]) == 2
    assert "scale, shift" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_script_is_traced_on_the_gpu(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "user.py"
    path.write_text(
        "import cupy\nx = cupy.ones(1 << 20, cupy.float32)\n"
        'k = cupy.RawKernel(\'extern "C" __global__ void twice(float* x)'
        "{ x[blockIdx.x * 256 + threadIdx.x] *= 2; }', 'twice')\n"
        "def step():\n    for _ in range(5):\n        k((4096,), (256,), (x,))\n    x.sum()\n"
    )
    code = run(["analyze", f"{path}:step", "--json"])
    captured = capsys.readouterr()
    if code == 2 and "CUPTI" in captured.err:
        pytest.skip(captured.err)
    assert code == 0
    by_name = {a["name"]: a for a in json.loads(captured.out)["analyses"]}
    assert by_name["twice"]["warm"]["samples"] == 5
    assert len(by_name) >= 2
