"""CUPTI traces: record layout compared with the header, buffers of a stub, kernels of this GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cukit.analyzer import cupti
from cukit.analyzer.cupti import ActivityKernel, KernelTrace, record_of
from cukit.errors import CukitError, MissingDependencyError


def header_folder() -> Path | None:
    places = [Path("/usr/local/cuda/include"), *Path("/usr/local").glob("cuda-*/include")]
    for folder in places:
        if (folder / "cupti.h").is_file() and (folder / "cuda.h").is_file():
            return folder
    return None


def test_field_offsets_equal_those_of_the_header(tmp_path: Path) -> None:
    folder, compiler = header_folder(), shutil.which("g++")
    if folder is None or compiler is None:
        pytest.skip("no CUPTI header, or no compiler, on this machine")
    names = [field[0] for field in ActivityKernel._fields_]
    print_offsets = "\n".join(f'std::printf("%zu\\n", offsetof(Record, {name}));' for name in names)
    for kernel in ("CUpti_ActivityKernel9", "CUpti_ActivityKernel10"):
        source = tmp_path / "offsets.cpp"
        source.write_text(
            "#include <cstddef>\n#include <cstdio>\n#include <cuda.h>\n#include <cupti.h>\n"
            "#if __has_include(<cupti_activity_deprecated.h>)\n"
            "#include <cupti_activity_deprecated.h>\n#endif\n"
            f"using Record = {kernel};\nint main() {{ {print_offsets} }}"
        )
        build = [compiler, "-w", f"-I{folder}", str(source), "-o", str(tmp_path / "offsets")]
        if subprocess.run(build, capture_output=True).returncode != 0:
            assert kernel == "CUpti_ActivityKernel10", "the header lacks the oldest known record"
            continue  # the newest record of CUDA 12 is number 9
        printed = subprocess.run([tmp_path / "offsets"], capture_output=True, text=True, check=True)
        expected = [int(line) for line in printed.stdout.split()]
        assert expected == [getattr(ActivityKernel, name).offset for name in names]


def activity(name: bytes, start: int) -> ActivityKernel:
    return ActivityKernel(
        kind=10,
        registersPerThread=40,
        start=start,
        end=start + 2500,
        gridX=3,
        gridY=2,
        gridZ=1,
        blockX=128,
        blockY=1,
        blockZ=1,
        staticSharedMemory=1024,
        dynamicSharedMemory=2048,
        localMemoryPerThread=16,
        name=name,
    )


class StubLibrary:
    """Passes two kernel records and one record of another kind to the callbacks."""

    def __init__(self) -> None:
        self.enabled = False
        self.callbacks: tuple[Any, Any] = (None, None)
        self.records: list[ActivityKernel] = []
        self._position = 0

    def cuptiActivityRegisterCallbacks(self, requested: Any, completed: Any) -> int:  # noqa: N802
        self.callbacks = (requested, completed)
        return 0

    def cuptiActivityEnable(self, kind: Any) -> int:  # noqa: N802
        self.enabled = True
        return 0

    def cuptiActivityDisable(self, kind: Any) -> int:  # noqa: N802
        self.enabled = False
        return 0

    def cuptiActivityFlushAll(self, flag: Any) -> int:  # noqa: N802
        requested, completed = self.callbacks
        buffer, size, max_records = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        requested(ctypes.byref(buffer), ctypes.byref(size), ctypes.byref(max_records))
        self._step = ctypes.sizeof(ActivityKernel)
        self.records = [activity(b"second", 9000), activity(b"other", 0), activity(b"first", 1000)]
        self.records[1].kind = 1
        for i, record in enumerate(self.records):
            ctypes.memmove(buffer.value + i * self._step, ctypes.byref(record), self._step)
        self._position = 0
        completed(None, 0, buffer.value, size.value, len(self.records) * self._step)
        return 0

    def cuptiActivityGetNextRecord(self, memory: Any, size: Any, record: Any) -> int:  # noqa: N802
        if self._position * self._step >= size.value:
            return 12
        address = ctypes.addressof(memory) + self._position * self._step
        ctypes.cast(record, ctypes.POINTER(ctypes.c_void_p))[0] = address
        self._position += 1
        return 0


class Device:
    def synchronize(self) -> None:
        pass


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StubLibrary:
    cupy = pytest.importorskip("cupy")
    library = StubLibrary()
    monkeypatch.setattr(cupti._Cupti, "_instance", None)
    monkeypatch.setattr(cupti, "load_library", lambda: library)
    monkeypatch.setattr(cupy.cuda, "Device", Device)
    return library


def test_a_trace_lists_kernels_by_start_time(library: StubLibrary) -> None:
    with KernelTrace() as trace:
        assert library.enabled
    assert not library.enabled
    first, second = trace.records
    assert (first.name, second.name) == ("first", "second")
    assert first == record_of(activity(b"first", 1000))
    assert first.duration_us == 2.5
    assert (first.grid, first.block) == ((3, 2, 1), (128, 1, 1))
    assert (first.static_shared_bytes, first.dynamic_shared_bytes) == (1024, 2048)
    with KernelTrace() as again:
        pass
    assert len(again.records) == 2


def test_one_trace_at_a_time(library: StubLibrary) -> None:
    with KernelTrace(), pytest.raises(CukitError, match="already running"), KernelTrace():
        pass


def test_the_error_for_a_missing_library_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    monkeypatch.setattr(cupti, "_candidates", lambda major: iter(["/nowhere/libcupti.so"]))
    with pytest.raises(MissingDependencyError, match=r"pip install .*nvidia-cuda-cupti"):
        cupti.load_library()


@pytest.mark.gpu
def test_kernels_of_a_gpu_are_traced() -> None:
    import cupy

    kernel = cupy.RawKernel(
        'extern "C" __global__ void twice(float* x) {'
        "  __shared__ float s[128]; s[threadIdx.x] = x[blockIdx.x * 128 + threadIdx.x];"
        "  __syncthreads(); x[blockIdx.x * 128 + threadIdx.x] = 2 * s[threadIdx.x ^ 1]; }",
        "twice",
    )
    x = cupy.ones(128 * 1000, cupy.float32)
    kernel((1000,), (128,), (x,), shared_mem=512)
    try:
        trace = KernelTrace()
    except MissingDependencyError as reason:
        pytest.skip(str(reason))
    with trace:
        for _ in range(3):
            kernel((1000,), (128,), (x,), shared_mem=512)
        cupy.add(x, 1, out=x)
    found = [record for record in trace.records if record.name == "twice"]
    assert len(found) == 3
    assert len(trace.records) == 4
    for record in found:
        assert (record.grid, record.block) == ((1000, 1, 1), (128, 1, 1))
        # Rounded up: registers are allocated in units of 8 per thread.
        assert record.registers == -(-kernel.num_regs // 8) * 8
        assert record.static_shared_bytes == 512
        assert record.dynamic_shared_bytes == 512
        assert 0.5 < record.duration_us < 1000
