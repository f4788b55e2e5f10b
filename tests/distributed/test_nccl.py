"""Arguments of calls to NCCL, recorded by a stub library that replaces it."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cukit.distributed import Ranks, nccl
from cukit.errors import (
    ArrayDtypeError,
    ArrayError,
    CommunicationError,
    MissingDependencyError,
)

SOURCE = r"""
#include <stddef.h>
#include <stdio.h>
#include <string.h>
typedef struct { char internal[128]; } Id;
char written[1000];
int ncclGetUniqueId(Id* id) { memset(id, 7, 128); return 0; }
int ncclCommInitRank(void** comm, int size, Id id, int rank) {
  *comm = (void*)0x123456789abc;
  return size == 1 && rank == 0 && id.internal[127] == 7 ? 0 : 5;
}
int ncclCommDestroy(void* comm) { return 0; }
static int note(const char* name, size_t count, int type, int option, void* comm, void* stream) {
  snprintf(written, 1000, "%s %zu %d %d %p %p", name, count, type, option, comm, stream);
  return count == 13 ? 3 : 0;
}
int ncclAllReduce(const void* a, void* b, size_t count, int type, int op, void* comm, void* s) {
  return note("reduce", count, type, op, comm, s);
}
int ncclAllGather(const void* a, void* b, size_t count, int type, void* comm, void* stream) {
  return note("gather", count, type, b == a, comm, stream);
}
int ncclBroadcast(const void* a, void* b, size_t count, int type, int root, void* comm, void* s) {
  return note("broadcast", count, type, root, comm, s);
}
const char* ncclGetErrorString(int status) { return status == 3 ? "internal error" : "?"; }
"""


class Stream:
    ptr = 0xABC

    def __init__(self, **options: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


class Event:
    def __init__(self, **options: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...


def array(dtype: Any, *shape: int) -> Any:
    dtype, shape = np.dtype(dtype), shape or (10,)
    size = math.prod(shape)
    flags = SimpleNamespace(c_contiguous=True)
    return SimpleNamespace(
        data=SimpleNamespace(ptr=1 << 46), size=size, nbytes=size * dtype.itemsize, dtype=dtype,
        shape=shape, strides=None, flags=flags,
    )  # fmt: skip


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    path = tmp_path / "libnccl.so.2"
    (tmp_path / "nccl.c").write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, tmp_path / "nccl.c"], check=True)
    cuda = SimpleNamespace(
        Device=lambda index: SimpleNamespace(use=lambda: None),
        Stream=Stream,
        Event=Event,
        get_current_stream=Stream,
        runtime=SimpleNamespace(deviceSynchronize=lambda: None),
    )
    monkeypatch.setattr(nccl, "require_cupy", lambda what: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(nccl, "_LIBRARY", str(path))
    nccl._library.cache_clear()
    yield ctypes.CDLL(str(path))
    nccl._library.cache_clear()


def test_arguments_of_nccl_calls(library: ctypes.CDLL) -> None:
    written = (ctypes.c_char * 1000).in_dll(library, "written")
    assert nccl.nccl_available()
    comm = nccl.NcclCommunicator(Ranks())
    handles = "0x123456789abc 0xabc"
    comm.all_reduce(array(np.float32), "max")
    assert written.value.decode() == f"reduce 10 7 2 {handles}"
    with comm.beside():
        comm.all_reduce(array(ml_dtypes.bfloat16))
    assert written.value.decode() == f"reduce 10 9 0 {handles}"
    comm.all_gather(array(np.float16), array(np.float16, 1, 10))
    assert written.value.decode() == f"gather 10 6 1 {handles}"
    comm.broadcast(array(np.int32))
    assert written.value.decode() == f"broadcast 40 1 0 {handles}"
    comm.join()
    comm.barrier()
    with pytest.raises(ArrayError, match=r"all_gather: out must be float16 \(1, 10\)"):
        comm.all_gather(array(np.float16), array(np.float16, 1, 9))
    with pytest.raises(ArrayDtypeError, match="all_reduce: array must be int8"):
        comm.all_reduce(array(np.complex64))
    with pytest.raises(CommunicationError, match="rank 0: NCCL: internal error"):
        comm.all_reduce(array(np.float32, 13))
    comm.close()


def test_a_missing_library_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_LIBRARY", "libno-such-nccl.so")
    monkeypatch.setattr(nccl, "require_cupy", lambda what: None)
    nccl._library.cache_clear()
    assert not nccl.nccl_available()
    with pytest.raises(MissingDependencyError, match="pip install nvidia-nccl-cu13"):
        nccl.NcclCommunicator(Ranks())
    nccl._library.cache_clear()
