"""Selecting the emulator, its options, compilation, and errors."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import cukit
from cukit.core import backend as core_backend
from cukit.core.device import current_device
from cukit.core.kernel import KernelSpec, load_kernel
from cukit.core.source import kernels_root
from cukit.emulator.builder import build_kernel, runtime_units
from cukit.emulator.settings import Settings, settings_from
from cukit.emulator.toolchain import (
    RUNTIME_SOURCES,
    Compiler,
    find_compiler,
    include_flags,
    runtime_flags,
)
from cukit.errors import CompileError, ConfigError, EmulatorError, LaunchError

ROOT = Path(__file__).parents[2]

COPY = """
#include "common/platform.cuh"
extern "C" __global__ void copy(const float* x, float* out, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) out[i] = x[i];
}
"""


@pytest.fixture
def copy_kernel(tmp_path: Path) -> KernelSpec:
    (tmp_path / "copy.cu").write_text(COPY)
    return KernelSpec(str(tmp_path / "copy.cu"), "copy", (), 32)


def test_kernels_of_the_same_name_are_distinguished(copy_kernel: KernelSpec, tmp_path: Path):
    (tmp_path / "wide.cu").write_text(COPY.replace("int count", "long long count"))
    other = KernelSpec(str(tmp_path / "wide.cu"), "copy", (), 32)
    x = np.arange(40, dtype=np.float32)
    with cukit.backend("emulator"):
        for spec, count in ((copy_kernel, np.int32(40)), (other, np.int64(40))):
            out = np.zeros_like(x)
            load_kernel(spec)((1,), (x, out, count))
            np.testing.assert_array_equal(out, x)


def test_the_previous_backend_is_restored_after_the_block():
    before = core_backend.active
    with cukit.backend("emulator", arch="sm_80"):
        assert current_device().arch == "sm_80"
        with cukit.backend("gpu"):
            assert core_backend.active is None
        with cukit.backend("emulator", arch="sm_90", seed=3):
            assert current_device().arch == "sm_90"
        assert current_device().arch == "sm_80"
    assert core_backend.active is before


def test_settings_are_read_from_the_environment():
    environment = {"CUKIT_EMULATOR_ARCH": "sm_80", "CUKIT_EMULATOR_SEED": "7"}
    assert settings_from(environment) == Settings(arch="sm_80", seed=7)
    environment["CUKIT_EMULATOR_GLOBAL_RACES"] = "1"
    assert settings_from(environment) == Settings(arch="sm_80", seed=7, global_races=True)
    del environment["CUKIT_EMULATOR_GLOBAL_RACES"]
    assert settings_from(environment, seed=1, late=True) == Settings("sm_80", seed=1, late=True)
    assert settings_from({"CUKIT_EMULATOR_CHECK": "0"}).checked is False


def test_the_environment_selects_the_emulator():
    code = "from cukit.core import backend; print(backend.active.device.name)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", "CUKIT_BACKEND": "emulator", "CUKIT_EMULATOR_ARCH": "sm_80"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stdout.strip() == "A100", done.stderr


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cpu", {}, "expected 'emulator' or 'gpu'"),
        ("emulator", {"arch": "sm_12"}, "unknown architecture 'sm_12'"),
        ("emulator", {"sede": 1}, "no option 'sede'"),
        ("emulator", {"seed": -1}, "0 or more"),
    ],
)
def test_invalid_backends_and_options_are_named(name, options, message):
    with pytest.raises(ConfigError, match=message), cukit.backend(name, **options):
        pass


def test_an_invalid_number_in_the_environment_is_named():
    with pytest.raises(ConfigError, match="CUKIT_EMULATOR_SEED must be an integer, got 'x'"):
        settings_from({"CUKIT_EMULATOR_SEED": "x"})
    with pytest.raises(ConfigError, match="CUKIT_EMULATOR_PATIENCE must be a number, got 'x'"):
        settings_from({"CUKIT_EMULATOR_PATIENCE": "x"})
    assert settings_from({"CUKIT_EMULATOR_PATIENCE": "0.5"}).patience == 0.5


@pytest.mark.emulator
@pytest.mark.parametrize("checked", [True, False])
def test_arrays_of_the_caller_are_read_and_written(copy_kernel, checked):
    x, out = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    with cukit.backend("emulator", checked=checked):
        load_kernel(copy_kernel)((1,), (x, out, np.int32(100)))
    np.testing.assert_array_equal(out, x)


@pytest.mark.emulator
def test_mismatched_arguments_are_rejected(copy_kernel):
    x = np.zeros(4, np.float32)
    with cukit.backend("emulator"):
        kernel = load_kernel(copy_kernel)
        with pytest.raises(LaunchError, match=r"takes 3 parameters of \(8, 8, 4\) bytes"):
            kernel((1,), (x, x, np.int64(4)))
        with pytest.raises(LaunchError, match="argument 2 is a int"):
            kernel((1,), (x, x, 4))


@pytest.mark.emulator
def test_arrays_behind_pointers_must_be_declared_reachable(tmp_path):
    (tmp_path / "table.cu").write_text(
        '#include "common/platform.cuh"\n'
        'extern "C" __global__ void table(float* const* rows) { rows[1][threadIdx.x] = 1.0f; }\n'
    )
    spec = KernelSpec(str(tmp_path / "table.cu"), "table", (), 32)
    rows = [np.zeros(32, np.float32) for _ in range(2)]
    addresses = np.array([row.ctypes.data for row in rows], np.uint64)
    with cukit.backend("emulator"):
        with pytest.raises(EmulatorError, match="out of bounds: write of 4 bytes"):
            load_kernel(spec)((1,), (addresses,))
        load_kernel(spec)((1,), (addresses,), reachable=rows)
    assert rows[1].all()


@pytest.mark.emulator
def test_read_only_arrays_are_not_written(copy_kernel):
    x, out = np.ones(8, np.float32), np.zeros(8, np.float32)
    out.flags.writeable = False
    with cukit.backend("emulator"), pytest.raises(EmulatorError, match="read-only array"):
        load_kernel(copy_kernel)((1,), (x, out, np.int32(8)))


@pytest.mark.emulator
def test_edits_and_options_recompile(copy_kernel):
    first = build_kernel(copy_kernel, "sm_90", True, False).library
    assert build_kernel(copy_kernel, "sm_90", True, False).library == first
    assert build_kernel(copy_kernel, "sm_80", True, False).library != first
    assert build_kernel(copy_kernel, "sm_90", False, False).library != first
    path = Path(copy_kernel.source)
    path.write_text(path.read_text() + "// edited\n")
    assert build_kernel(copy_kernel, "sm_90", True, False).library != first


@pytest.mark.emulator
@pytest.mark.slow
def test_the_sources_of_the_runtime_compile_as_one_unit(tmp_path):
    (unit,) = runtime_units(1)
    source = tmp_path / "all.cpp"
    source.write_text("".join(f'#include "{path}"\n' for path in unit))
    flags = (*runtime_flags(), f"-I{RUNTIME_SOURCES}", *include_flags())
    find_compiler().run([*flags, "-fsyntax-only", str(source)], "the runtime")


@pytest.mark.emulator
def test_concurrent_builds_of_a_kernel_wait_for_the_first(copy_kernel, monkeypatch):
    build_kernel(copy_kernel, "sm_80", True, False)  # from now on the prelude is cached
    compiled = []

    def run(compiler: Compiler, arguments: list[str], what: str) -> str:
        compiled.append(what)
        return original(compiler, arguments, what)

    original = Compiler.run
    monkeypatch.setattr(Compiler, "run", run)
    path = Path(copy_kernel.source)
    path.write_text(path.read_text() + "// another\n")
    with ThreadPoolExecutor(8) as pool:
        tasks = [pool.submit(build_kernel, copy_kernel, "sm_80", True, False) for _ in range(8)]
        libraries = {task.result().library for task in tasks}
    assert len(libraries) == 1
    assert len(compiled) == 2, "compiled once and linked once"


FIRST_USE = """
import sys
import numpy as np
import cukit
from cukit.core.kernel import KernelSpec, load_kernel
x, out = np.ones(8, np.float32), np.zeros(8, np.float32)
with cukit.backend("emulator"):
    load_kernel(KernelSpec(sys.argv[1], "copy", (), 32))((1,), (x, out, np.int32(8)))
print(out.sum())
"""


@pytest.mark.slow
@pytest.mark.emulator
def test_processes_share_a_cache_and_repair_it(copy_kernel, kernel_cache):
    """Three processes fill one cache; then every file in it is truncated, and a fourth process
    repairs it."""

    def run_process() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", FIRST_USE, copy_kernel.source]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    with ThreadPoolExecutor(3) as pool:
        done = [task.result() for task in [pool.submit(run_process) for _ in range(3)]]
    for number, path in enumerate(sorted((kernel_cache / "emulator").iterdir())):
        path.write_bytes(path.read_bytes()[: 1000 * (number % 2)])
    for process in (*done, run_process()):
        assert process.stdout.strip() == "8.0", process.stderr


@pytest.mark.emulator
def test_an_instruction_that_is_not_emulated_is_named(tmp_path):
    (tmp_path / "odd.cu").write_text(
        '#include "common/platform.cuh"\n'
        'extern "C" __global__ void odd(float* out) {\n  asm volatile("nanosleep.u32 1;");\n}\n'
    )
    spec = KernelSpec(str(tmp_path / "odd.cu"), "odd", (), 32)
    with cukit.backend("emulator"), pytest.raises(CompileError) as caught:
        load_kernel(spec)
    text = str(caught.value)
    assert "odd.cu:3" in text
    assert "this instruction is not emulated" in text
    assert "nanosleep.u32" in text


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_every_header_of_instructions_compiles_for_the_cpu(tmp_path, arch):
    headers = sorted((kernels_root() / "common" / "ptx").glob("*.cuh"))
    includes = "".join(f'#include "common/ptx/{header.name}"\n' for header in headers)
    (tmp_path / "all.cu").write_text(
        f'#include "common/platform.cuh"\n{includes}extern "C" __global__ void all() {{}}\n'
    )
    assert len(headers) > 5
    build_kernel(KernelSpec(str(tmp_path / "all.cu"), "all", (), 32), arch, True, False)


@pytest.mark.emulator
def test_endless_polling_ends_the_launch(tmp_path):
    (tmp_path / "spin.cu").write_text(
        '#include "common/platform.cuh"\n'
        'extern "C" __global__ void spin(unsigned* flag) {\n'
        "  while (atomicAdd(flag, 0u) == 0u) __nanosleep(100);\n}\n"
    )
    spec = KernelSpec(str(tmp_path / "spin.cu"), "spin", (), 32)
    flag = np.zeros(1, np.uint32)
    with (
        cukit.backend("emulator", patience=0.2),
        pytest.raises(EmulatorError, match=r"no progress: a thread polls[\s\S]*spin\.cu:3"),
    ):
        load_kernel(spec)((1,), (flag,))


@pytest.mark.emulator
def test_a_thread_may_poll_for_as_long_as_another_block_computes(tmp_path):
    """Until it sets the flag, the computing block writes only memory that is not polled."""
    (tmp_path / "relay.cu").write_text(
        '#include "common/platform.cuh"\n'
        'extern "C" __global__ void relay(int* flag, unsigned* out) {\n'
        "  if (blockIdx.x == 1) {\n"
        "    while (atomicAdd(flag, 0) == 0) __nanosleep(100);\n"
        "    return;\n"
        "  }\n"
        "  unsigned state = 1;\n"
        "  for (int i = 0; i < 200000000; ++i) {\n"
        "    state = state * 1664525u + 1013904223u;\n"
        "    if (i % 1000000 == 0) *out = state;\n"
        "  }\n"
        "  *out = state;\n"
        "  __threadfence();\n"
        "  atomicExch(flag, 1);\n"
        "}\n"
    )
    spec = KernelSpec(str(tmp_path / "relay.cu"), "relay", (), 1)
    out = np.zeros(1, np.uint32)
    with cukit.backend("emulator", patience=0.05, threads=2):
        load_kernel(spec)((2,), (np.zeros(1, np.int32), out))
    assert out[0] != 0


@pytest.mark.emulator
@pytest.mark.parametrize("polling", [0, 1])
def test_a_thread_may_poll_until_the_other_block_of_its_cluster_writes(tmp_path, polling):
    (tmp_path / "pair.cu").write_text(
        '#include "common/platform.cuh"\n'
        'extern "C" __global__ void __cluster_dims__(2) pair(int* flag, int polling) {\n'
        "  if (blockIdx.x == polling) {\n"
        "    while (atomicAdd(flag, 0) == 0) __nanosleep(100);\n"
        "  } else {\n"
        "    atomicExch(flag, 1);\n"
        "  }\n"
        "}\n"
    )
    spec = KernelSpec(str(tmp_path / "pair.cu"), "pair", (), 1)
    flag = np.zeros(1, np.int32)
    with cukit.backend("emulator", patience=0.2):
        load_kernel(spec)((2,), (flag, np.int32(polling)))
    assert flag[0] == 1
