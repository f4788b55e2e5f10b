"""Every kernel that the process runs, with its time on the device, from CUPTI's activity records.

Activity records do not require the permission to read hardware counters. They add a few percent of
overhead and cover every kernel: CuPy's own, cuBLAS's, other libraries'. The only structure read
here is the part of `CUpti_ActivityKernel` whose layout has not changed since CUDA 11; a test
compares it with the header.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cukit.analyzer.schema import Dim3
from cukit.core.device import require_cupy
from cukit.errors import CukitError, MissingDependencyError

_CONCURRENT_KERNEL = 10
_SUCCESS = 0
_FLUSH_FORCED = 1
_BUFFER_BYTES = 4 << 20


class ActivityKernel(ctypes.Structure):
    """The first fields of CUpti_ActivityKernel9 and 10."""

    _pack_ = 1
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("cacheConfig", ctypes.c_uint8),
        ("sharedMemoryConfig", ctypes.c_uint8),
        ("registersPerThread", ctypes.c_uint16),
        ("partitionedGlobalCacheRequested", ctypes.c_uint32),
        ("partitionedGlobalCacheExecuted", ctypes.c_uint32),
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("completed", ctypes.c_uint64),
        ("deviceId", ctypes.c_uint32),
        ("contextId", ctypes.c_uint32),
        ("streamId", ctypes.c_uint32),
        ("gridX", ctypes.c_int32),
        ("gridY", ctypes.c_int32),
        ("gridZ", ctypes.c_int32),
        ("blockX", ctypes.c_int32),
        ("blockY", ctypes.c_int32),
        ("blockZ", ctypes.c_int32),
        ("staticSharedMemory", ctypes.c_int32),
        ("dynamicSharedMemory", ctypes.c_int32),
        ("localMemoryPerThread", ctypes.c_uint32),
        ("localMemoryTotal", ctypes.c_uint32),
        ("correlationId", ctypes.c_uint32),
        ("gridId", ctypes.c_int64),
        ("name", ctypes.c_char_p),
    )


@dataclass(frozen=True)
class KernelRecord:
    """One kernel that ran."""

    name: str
    grid: Dim3
    block: Dim3
    registers: int
    """Per thread, as allocated by the hardware: rounded up to a multiple of 8."""
    static_shared_bytes: int
    dynamic_shared_bytes: int
    local_bytes: int
    start_ns: int
    end_ns: int
    stream: int

    @property
    def duration_us(self) -> float:
        """Time on the device."""
        return (self.end_ns - self.start_ns) / 1e3


def record_of(activity: ActivityKernel) -> KernelRecord:
    """The fields used here, as plain Python objects."""
    return KernelRecord(
        name=activity.name.decode(errors="replace"),
        grid=(activity.gridX, activity.gridY, activity.gridZ),
        block=(activity.blockX, activity.blockY, activity.blockZ),
        registers=activity.registersPerThread,
        static_shared_bytes=activity.staticSharedMemory,
        dynamic_shared_bytes=activity.dynamicSharedMemory,
        local_bytes=activity.localMemoryPerThread,
        start_ns=activity.start,
        end_ns=activity.end,
        stream=activity.streamId,
    )


class KernelTrace:
    """Collects the kernels that run inside a `with`; `records` holds them in order of start.

    One trace at a time per process. Raises MissingDependencyError without CUPTI.
    """

    def __init__(self) -> None:
        self.records: list[KernelRecord] = []
        self._cupti = _Cupti.get()
        self._synchronize: Callable[[], None] = require_cupy("tracing").cuda.Device().synchronize

    def __enter__(self) -> KernelTrace:
        self._synchronize()  # earlier work is not part of the trace
        self._cupti.start(self.records)
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if exception[0] is None:
                self._synchronize()
        finally:
            self._cupti.stop()
        self.records.sort(key=lambda record: record.start_ns)


class _Cupti:
    """The library, its two callbacks, and the buffers that it fills: one instance per process."""

    _instance: _Cupti | None = None

    @classmethod
    def get(cls) -> _Cupti:
        if cls._instance is None:
            cls._instance = cls(load_library())
        return cls._instance

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._buffers: dict[int, Any] = {}
        self._records: list[KernelRecord] | None = None
        pointer = ctypes.POINTER
        self._requested = ctypes.CFUNCTYPE(
            None, pointer(ctypes.c_void_p), pointer(ctypes.c_size_t), pointer(ctypes.c_size_t)
        )(self._give_buffer)
        self._completed = ctypes.CFUNCTYPE(
            None,
            ctypes.c_void_p,
            ctypes.c_uint32,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_size_t,
        )(self._take_buffer)
        self._check("cuptiActivityRegisterCallbacks", self._requested, self._completed)

    def start(self, records: list[KernelRecord]) -> None:
        """Appends kernel records to `records` from now on."""
        if self._records is not None:
            raise CukitError("a kernel trace is already running; end it before you start another")
        self._check("cuptiActivityEnable", ctypes.c_int(_CONCURRENT_KERNEL))
        self._records = records

    def stop(self) -> None:
        """Delivers the outstanding records, and stops."""
        try:
            self._check("cuptiActivityFlushAll", ctypes.c_uint32(_FLUSH_FORCED))
            self._check("cuptiActivityDisable", ctypes.c_int(_CONCURRENT_KERNEL))
        finally:
            self._records = None

    def _check(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != _SUCCESS:
            text = ctypes.c_char_p()
            self._library.cuptiGetResultString(ctypes.c_int(status), ctypes.byref(text))
            reason = (text.value or b"").decode() or f"error {status}"
            raise CukitError(f"CUPTI: {function}: {reason}")

    def _give_buffer(self, buffer: Any, size: Any, max_records: Any) -> None:
        memory = ctypes.create_string_buffer(_BUFFER_BYTES)
        address = ctypes.addressof(memory)
        self._buffers[address] = memory
        buffer[0], size[0], max_records[0] = address, _BUFFER_BYTES, 0

    def _take_buffer(
        self, context: Any, stream: int, address: int, size: int, valid_bytes: int
    ) -> None:
        memory = self._buffers.pop(address)
        if self._records is not None:
            self._records.extend(record_of(a) for a in self._activities(memory, valid_bytes))

    def _activities(self, memory: Any, valid_bytes: int) -> Iterator[ActivityKernel]:
        record = ctypes.c_void_p()
        following = self._library.cuptiActivityGetNextRecord
        arguments = (memory, ctypes.c_size_t(valid_bytes), ctypes.byref(record))
        while following(*arguments) == _SUCCESS and record.value:
            if ctypes.c_uint32.from_address(record.value).value == _CONCURRENT_KERNEL:
                yield ActivityKernel.from_address(record.value)


def load_library() -> ctypes.CDLL:
    """libcupti for CuPy's CUDA version, from the NVIDIA wheel, the toolkit or the loader's path.

    Raises MissingDependencyError, which names the package to install.
    """
    version = require_cupy("tracing").cuda.runtime.runtimeGetVersion()
    major = version // 1000
    for candidate in _candidates(major):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    package = "nvidia-cuda-cupti-cu12" if major < 13 else "'nvidia-cuda-cupti>=13,<14'"
    raise MissingDependencyError(
        f"tracing kernels needs CUPTI, which was not found: python -m pip install {package}"
    )


def _candidates(major: int) -> Iterator[str]:
    name = f"libcupti.so.{major}"
    packages = importlib.util.find_spec("nvidia")
    for place in (packages.submodule_search_locations or ()) if packages else ():
        for folder in ("cuda_cupti/lib", f"cu{major}/lib"):
            yield str(Path(place) / folder / name)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            for folder in ("extras/CUPTI/lib64", "lib64"):
                yield str(Path(os.environ[variable]) / folder / name)
    for folder in ("extras/CUPTI/lib64", "lib64"):
        yield f"/usr/local/cuda/{folder}/{name}"
    yield name
