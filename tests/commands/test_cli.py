"""The command line: output, exit codes, and a one-line message for every invalid input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import cukit
from cukit.cli import run
from cukit.commands import doctor as doctor_module
from cukit.commands.doctor import PACKAGES, Status, examine
from cukit.core.driver import Driver
from cukit.registry import ops

ROOT = Path(__file__).parents[2]
SORTS = ROOT / "tests" / "emulator" / "public_style" / "sorts.cu"
Capture = pytest.CaptureFixture[str]


def test_python_dash_m_runs_the_command_line() -> None:
    command = [sys.executable, "-m", "cukit", "--version"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() == (
        cukit.__version__
    )


def test_without_arguments_help_is_shown(capsys: Capture) -> None:
    assert run([]) == 0
    output = capsys.readouterr().out
    for command in ("doctor", "list", "compile", "bench", "distill", "generate"):
        assert command in output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["compile", "--arch", "sm_55"], "unknown architecture 'sm_55'"),
        (["compile", "--arch", "hopper"], "got 'hopper'"),
        (["compile", "--arch", ","], "names no architecture"),
        (["compile", "--op", "rms_nrom"], "did you mean rms_norm"),
        (["compile", "--jobs", "0"], "--jobs"),
        (["list", "--family", "nonsense"], "no family 'nonsense'"),
        (["bench", "gemm", "--family", "layers"], "two families, gemm and --family layers"),
        (["check", "nowhere.cu"], "cannot read nowhere.cu: No such file"),
        (["check", str(SORTS)], "sorts.cu has several kernels, name the entry: bitonic_shared("),
        (["check", str(SORTS), "--entry", "top_k<1>", "--grid", "4,0"], "grid must be an integer"),
        (["check", str(SORTS), "--grid", "1,2,3,4"], "--grid: expected one to three extents"),
        (["check", str(SORTS), "--arg", "float33:4"], "unknown dtype 'float33'"),
        (["check", str(SORTS), "--arg", "float32:4:purple"], "'purple' is neither random"),
        (["check", str(SORTS), "--arg", "float32"], "expected dtype:shape[:fill]"),
        (["check", str(SORTS), "--arg", "int32=x"], "'x' is not a valid int32"),
        (["check", str(SORTS), "--constant", "c"], "expected name=dtype:shape[:fill]"),
        (
            ["check", str(SORTS), "--constant", "c=null"],
            "c=null: a variable has a value",
        ),
        (["check", str(SORTS), "--constant", "c=float33:4"], "--constant c float33:4: unknown"),
        (["check", str(SORTS), "--arg", "int4=300"], "'300' is not a valid int4"),
        (["check", str(SORTS), "--arg", "int32:4:nan"], "'nan' is neither random"),
        (["check", str(SORTS), "--arch", "sm_1"], "sm_1"),
        (["doctor", "--nonsense"], "--nonsense"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(
    arguments: list[str], complaint: str, capsys: Capture
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("cukit: ")
    assert complaint in captured.err
    assert captured.err.count("\n") == 1


def test_an_unwritable_cache_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("in the way")
    monkeypatch.setenv("CUKIT_CACHE_DIR", str(occupied))
    assert run(["compile", "--arch", "sm_90a", "--op", "silu_and_mul", "--jobs", "1"]) == 2
    assert "CUKIT_CACHE_DIR" in capsys.readouterr().err


def test_list_shows_every_op(capsys: Capture) -> None:
    assert run(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [op.name for op in ops()]
    (row,) = [row for row in rows if row["name"] == "rms_norm"]
    assert row["dtypes"] == ["float32", "float16", "bfloat16"]
    assert run(["list", "--family", "gemm"]) == 0
    table = capsys.readouterr().out
    assert "matmul" in table
    assert "rms_norm" not in table


def test_compile_fills_the_cache_that_launches_read(kernel_cache: Path, capsys: Capture) -> None:
    arguments = ["compile", "--arch", "sm_90", "--op", "silu_and_mul", "--json"]
    assert run(arguments) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["errors"] == []
    assert {row["arch"] for row in first["kernels"]} == {"sm_90a"}, "as Hopper GPUs load it"
    for row in first["kernels"]:
        assert not row["cached"]
        assert row["registers"] > 0
        assert row["blocks_per_sm"] >= 1
        assert 0 < row["occupancy"] <= 1
    assert len(list(kernel_cache.glob("kernels/*.cubin"))) == len(first["kernels"])
    assert run(arguments) == 0
    assert all(row["cached"] for row in json.loads(capsys.readouterr().out)["kernels"])


@pytest.mark.usefixtures("kernel_cache")
def test_a_kernel_that_does_not_compile_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    from cukit.commands import compile as compile_module
    from cukit.errors import CompileError

    def fail(spec: object, arch: str) -> None:
        raise CompileError("silu_and_mul.cu(7): error: expected a ';'")

    monkeypatch.setattr(compile_module, "compile_kernel", fail)
    assert run(["compile", "--arch", "sm_80", "--op", "silu_and_mul", "--jobs", "1"]) == 1
    assert "silu_and_mul.cu(7)" in capsys.readouterr().out


def test_doctor_reports_no_problem_on_this_machine(capsys: Capture) -> None:
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in ("driver", "CuPy", "NVRTC", "CUDA headers", "cuBLAS", "kernel cache"):
        assert part in text
    assert run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["sane"] is True


def test_doctor_names_the_command_that_fixes_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without CuPy: every missing part is reported with the command that installs it."""

    def no_cupy(purpose: str) -> None:
        raise ImportError(f"{purpose} needs CuPy")

    monkeypatch.setattr(doctor_module, "find_driver", lambda: Driver("580.1", 13))
    monkeypatch.setattr("cukit.core.device.require_cupy", no_cupy)
    monkeypatch.setattr("cukit.core.device.cupy_module", lambda: None)
    broken = {f.name: f for f in examine() if f.status is Status.BROKEN}
    assert broken["CuPy"].remedy == "python -m pip install cupy-cuda13x"
    assert broken["cuBLAS"].remedy == "python -m pip install 'nvidia-cublas>=13,<14'"
    assert all(finding.remedy for finding in broken.values())


def test_doctor_reports_an_unwritable_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("in the way")
    monkeypatch.setenv("CUKIT_CACHE_DIR", str(occupied))
    assert run(["doctor"]) == 1
    assert "CUKIT_CACHE_DIR" in capsys.readouterr().out


@pytest.mark.parametrize("cuda", PACKAGES)
def test_suggested_commands_install_the_extras(cuda: int) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    extra = text.partition(f"\ncuda{cuda} = [")[2].partition("\n]")[0]
    for packages in PACKAGES[cuda].values():
        for package in packages.replace("'", "").split():
            assert f'"{package}' in extra, f"{package} is not in the extra cuda{cuda}"


CLEAN = """__global__ void twice(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= 2;
}
"""


@pytest.mark.emulator
def test_check_reports_the_errors_of_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    launch = ["--grid", "2", "--block", "16", "--arg", "float32:20:ones", "--arg", "int32=20"]
    (tmp_path / "clean.cu").write_text(CLEAN)
    assert run(["check", "clean.cu", *launch]) == 0
    assert capsys.readouterr().out == "clean.cu: no errors found\n"
    (tmp_path / "bug.cu").write_text(CLEAN.replace("i < n", "i <= n"))
    assert run(["check", "bug.cu", *launch]) == 1
    assert "thread (4, 0, 0) at bug.cu:3" in capsys.readouterr().out
    (tmp_path / "wrong.cu").write_text(CLEAN.replace("x[i]", "y[i]"))
    assert run(["check", "wrong.cu", *launch]) == 2
    complaint = capsys.readouterr().err
    assert "wrong.cu:3:" in complaint
    assert [line for line in complaint.splitlines() if line.startswith("cukit: wrong.cu")]
