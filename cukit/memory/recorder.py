"""Records all CuPy allocations, with any allocator."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cukit.memory.log import LogAction, LogEvent, LogWriter


class AllocationRecorder:
    """A CuPy allocator that forwards every request to another one and writes it to a log.

    `recorder = AllocationRecorder(writer)`; then `cupy.cuda.set_allocator(recorder.allocate)`.
    The log contains the requested sizes. It lacks earlier allocations, and the frees of memory that
    outlives the writer.
    """

    def __init__(self, writer: LogWriter, inner: Callable[[int], Any] | None = None) -> None:
        """inner: the allocator to forward to; by default CuPy's current allocator."""
        import cupy

        self._cuda = cupy.cuda
        self._inner = inner if inner is not None else cupy.cuda.get_allocator()
        self._writer = writer

    def allocate(self, size: int) -> Any:
        """Called by CuPy: returns a cupy.cuda.MemoryPointer to at least `size` bytes."""
        stream = self._cuda.get_current_stream().ptr
        try:
            memory = self._inner(size)
        except self._cuda.memory.OutOfMemoryError:
            self._write(LogAction.FAILURE, 0, size, stream)
            raise
        if not memory.ptr:
            return memory
        self._write(LogAction.ALLOCATE, memory.ptr, size, stream)
        owner = _Owner(memory)
        # Runs before the memory is freed, so the log has the free before the address is reused.
        end = weakref.finalize(owner, self._write, LogAction.FREE, memory.ptr, size, stream)
        end.atexit = False
        unowned = self._cuda.UnownedMemory(memory.ptr, size, owner, memory.device_id)
        return self._cuda.MemoryPointer(unowned, 0)

    def _write(self, action: LogAction, pointer: int, size: int, stream: int) -> None:
        when = self._writer.microseconds(time.perf_counter())
        self._writer.write(LogEvent(threading.get_ident(), when, action, pointer, size, stream))


class _Owner:
    """Referenced by CuPy's memory object; keeps the inner allocator's memory allocated."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: Any) -> None:
        self.memory = memory


@contextlib.contextmanager
def record_allocations(path: Path | str) -> Iterator[LogWriter]:
    """Logs every CuPy allocation in the block.

    >>> with record_allocations("training.csv.gz"):          # doctest: +SKIP
    ...     distiller.fit(batches)

    Records all threads. The previous allocator is restored at the end.
    """
    import cupy

    before = cupy.cuda.get_allocator()
    with LogWriter(path) as writer:
        cupy.cuda.set_allocator(AllocationRecorder(writer, before).allocate)
        try:
            yield writer
        finally:
            cupy.cuda.set_allocator(before)
