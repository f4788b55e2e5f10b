"""Collectives over CuPy arrays with NCCL, called through ctypes.

CuPy's binding exists only if CuPy found NCCL when it was imported. This module calls seven
functions of NCCL's stable C interface without that binding.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cukit.core.arrays import Array
from cukit.core.device import require_cupy
from cukit.distributed.host import HostCommunicator, check_gathered, check_operation, check_root
from cukit.distributed.ranks import Ranks
from cukit.errors import ArrayDtypeError, CommunicationError, MissingDependencyError

_DTYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float16": 6,
    "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
_OPERATIONS = {"sum": 0, "max": 2, "min": 3}
_ID_BYTES = 128
_LIBRARY = "libnccl.so.2"


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * _ID_BYTES)]


class NcclCommunicator:
    """A `Communicator` of CuPy arrays, one GPU per process.

    The process uses GPU `local_rank`. Collectives are enqueued on CuPy's current stream or, within
    :meth:`beside`, on a separate stream, without synchronising. All ranks must call the same
    collectives in the same order.

    Args:
        ranks: rank and number of processes.
        timeout_seconds: how long to wait for the other processes to connect.

    Raises:
        MissingDependencyError: CuPy or NCCL is missing.
        CommunicationError: a rank does not connect, or NCCL fails.
    """

    def __init__(self, ranks: Ranks, *, timeout_seconds: float = 600.0) -> None:
        self._cupy = require_cupy("NCCL")
        self._nccl = _library()
        self.ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size
        self._cupy.cuda.Device(ranks.local_rank).use()
        self._host = HostCommunicator(ranks, timeout_seconds=timeout_seconds)
        unique = _UniqueId()
        if self.rank == 0:
            self._check(self._nccl.ncclGetUniqueId(ctypes.byref(unique)))
        (content, *_) = self._host.exchange(bytes(memoryview(unique)))
        ctypes.memmove(ctypes.byref(unique), content, _ID_BYTES)
        self._communicator = ctypes.c_void_p()
        self._check(
            self._nccl.ncclCommInitRank(
                ctypes.byref(self._communicator), self.size, unique, self.rank
            )
        )
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._event = self._cupy.cuda.Event(disable_timing=True)

    # -- collectives ---------------------------------------------------------------------------

    def all_reduce(self, array: Array, op: str = "sum") -> None:
        """Replaces `array`, C-contiguous, by the sum, "max" or "min" over all ranks."""
        check_operation("all_reduce", array, op)
        pointer = self._pointer(array)
        self._check(
            self._nccl.ncclAllReduce(
                pointer, pointer, array.size, self._dtype("all_reduce", array), _OPERATIONS[op],
                self._communicator, self._current(),
            )
        )  # fmt: skip

    def all_gather(self, array: Array, out: Array | None = None) -> Array:
        """The arrays of all ranks, of one shape and dtype: [size, *shape], in `out` if given."""
        check_operation("all_gather", array)
        check_gathered(self.size, array, out)
        gathered = self._cupy.empty((self.size, *array.shape), array.dtype) if out is None else out
        self._check(
            self._nccl.ncclAllGather(
                self._pointer(array), self._pointer(gathered), array.size,
                self._dtype("all_gather", array), self._communicator, self._current(),
            )
        )  # fmt: skip
        return gathered

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Replaces `array`, C-contiguous, by that of rank `root`."""
        check_operation("broadcast", array)
        check_root(self, root)
        pointer = self._pointer(array)
        self._check(
            self._nccl.ncclBroadcast(
                pointer, pointer, array.nbytes, _DTYPES["uint8"], root, self._communicator,
                self._current(),
            )
        )  # fmt: skip

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in rank order, exchanged through the host."""
        return self._host.exchange(message)

    def barrier(self) -> None:
        """Waits for the current stream, then returns once every rank has called it."""
        self._cupy.cuda.get_current_stream().synchronize()
        self._host.barrier()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Makes a separate stream current, which first waits for earlier work on the outer stream.

        Memory used in the block must not be freed before :meth:`join`.
        """
        self._event.record()
        self._stream.wait_event(self._event)
        with self._stream:
            yield

    def join(self) -> None:
        """The current stream waits for everything enqueued in `beside` blocks."""
        self._event.record(self._stream)
        self._cupy.cuda.get_current_stream().wait_event(self._event)

    def close(self) -> None:
        """Synchronises the GPU and destroys the communicator. All ranks must call it."""
        if self._communicator:
            self._cupy.cuda.runtime.deviceSynchronize()
            self._nccl.ncclCommDestroy(self._communicator)
            self._communicator = ctypes.c_void_p()
        self._host.close()

    # -- plumbing ------------------------------------------------------------------------------

    @staticmethod
    def _pointer(array: Array) -> ctypes.c_void_p:
        return ctypes.c_void_p(array.data.ptr)

    @staticmethod
    def _dtype(name: str, array: Array) -> int:
        if array.dtype.name not in _DTYPES:
            raise ArrayDtypeError(
                f"{name}: array must be {', '.join(_DTYPES)}, got {array.dtype.name}"
            )
        return _DTYPES[array.dtype.name]

    def _current(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._cupy.cuda.get_current_stream().ptr)

    def _check(self, status: int) -> None:
        if status:
            message = self._nccl.ncclGetErrorString(status).decode()
            raise CommunicationError(f"rank {self.rank}: NCCL: {message} (set NCCL_DEBUG=INFO)")


def nccl_available() -> bool:
    """Whether NCCL can be loaded."""
    try:
        _library()
    except MissingDependencyError:
        return False
    return True


@functools.cache
def _library() -> Any:
    for path in (_LIBRARY, *_installed()):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        return _declare(library)
    raise MissingDependencyError(
        f"{_LIBRARY} is not installed: pip install nvidia-nccl-cu13 (nvidia-nccl-cu12 for CUDA 12)"
    )


def _installed() -> Iterator[Path]:
    """Paths of NCCL in pip's packages and the CUDA toolkit."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("nvidia")
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            yield from Path(folder).glob(f"*/lib/{_LIBRARY}")
    if "CUDA_PATH" in os.environ:
        yield Path(os.environ["CUDA_PATH"]) / "lib64" / _LIBRARY


def _declare(library: Any) -> Any:
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    signatures: dict[str, list[Any]] = {
        "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
        "ncclCommInitRank": [ctypes.POINTER(pointer), number, _UniqueId, number],
        "ncclCommDestroy": [pointer],
        "ncclAllReduce": [pointer, pointer, size, number, number, pointer, pointer],
        "ncclAllGather": [pointer, pointer, size, number, pointer, pointer],
        "ncclBroadcast": [pointer, pointer, size, number, number, pointer, pointer],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, number
    library.ncclGetErrorString.argtypes = [number]
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library
