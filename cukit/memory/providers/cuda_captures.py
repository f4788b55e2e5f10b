"""Graph captures: the capture that a stream takes part in, and the destruction of its graph."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cukit.memory.providers.cuda_driver import call, driver_module

_SEMAPHORE_BYTES = 64  # sem_t has 32 bytes on 64-bit Linux


@contextmanager
def between_captures() -> Iterator[None]:
    """Allows calls that CUDA forbids during a capture, by relaxing the thread's capture mode."""
    mode = driver_module().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", mode)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


class _DestroyedFlag:
    """A flag that the driver sets when a graph is destroyed.

    The driver calls a C function on an internal thread, where waiting for the GIL is forbidden. The
    function is sem_post of the C library; `poll` reads the semaphore later.
    """

    def __init__(self) -> None:
        self._libc = libc = ctypes.CDLL(None)
        libc.calloc.restype = ctypes.c_void_p
        # Allocated by calloc, not by Python: the graph may outlive the pool and the interpreter.
        self._semaphore = ctypes.c_void_p(libc.calloc(1, _SEMAPHORE_BYTES))
        libc.sem_init(self._semaphore, 0, 0)

    def watch(self, graph: Any) -> None:
        """Attaches the flag to a graph under capture, and to executable graphs made from it."""
        driver = driver_module()
        post = ctypes.cast(self._libc.sem_post, ctypes.c_void_p).value
        no_sync = driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
        moved = driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
        user_object = call(
            "cuUserObjectCreate", self._semaphore.value, driver.CUhostFn(post), 1, int(no_sync)
        )
        call("cuGraphRetainUserObject", graph, user_object, 1, int(moved))

    def poll(self) -> bool:
        """Whether the flag is set. Must not be called again after it has returned True."""
        if self._libc.sem_trywait(self._semaphore) != 0:
            return False
        self._libc.free(self._semaphore)
        return True


class CaptureWatch:
    """The captures seen so far whose graphs may still exist."""

    def __init__(self) -> None:
        self._flags: dict[int, _DestroyedFlag] = {}

    def capture_of(self, handle: int) -> int | None:
        """The id of the capture that a stream takes part in, unique in this process, or None."""
        driver = driver_module()
        status, number, graph, *_ = call("cuStreamGetCaptureInfo", handle)
        if status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
            return None
        capture = int(number)
        if capture not in self._flags:
            flag = _DestroyedFlag()
            flag.watch(graph)
            self._flags[capture] = flag
        return capture

    def ended(self) -> list[int]:
        """Captures whose graphs are destroyed; each is returned once."""
        ended = [capture for capture, flag in list(self._flags.items()) if flag.poll()]
        for capture in ended:
            del self._flags[capture]
        return ended
