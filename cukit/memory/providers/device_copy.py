"""Enqueues the copies of a defragmentation without allocating from the pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from cukit.core.kernel import NULL
from cukit.memory.batched_copy import TILE_BYTES, MovePlan, Moves, launch_moves, plan_moves

FEW_MOVES = 4
"""Up to this many moves use cudaMemcpyAsync: no table to upload, no kernel to compile."""

_MAX_MOVES = 1 << 15
_MAX_TILES = 1 << 17
_TABLE_BYTES = (_MAX_MOVES + 1) * 24
_FROM_HOST, _TO_DEVICE = 1, 3  # cudaMemcpyHostToDevice, cudaMemcpyDeviceToDevice


class DeviceCopy:
    """Copies on one device, with a table in device memory and its source in pinned host memory (1.3
    and 0.8 MB, kept after the first use).

    All pools of a device share it: allocating the table takes as long as copying a gigabyte.
    """

    def __init__(self, cupy: ModuleType) -> None:
        self._lock = threading.Lock()
        self._cupy = cupy
        self._table: Any = None
        self._staging: Any = None
        """int64 [_MAX_MOVES + 1, 3] in pinned memory."""
        self._upload = 0, 0
        """The addresses of the table and of its source."""
        self._progress: Any = None
        self._last: Any = None
        """Event after the last launch that reads the table."""

    def __call__(self, moves: Moves, stream: Any, *, apart: bool = False) -> None:
        """Enqueues moves on `stream`, a CuPy stream, on the current device. When it raises, nothing
        is enqueued.

        Moves may slide (see :func:`cukit.memory.batched_copy.batched_copy`). `apart`: the moves
        satisfy the conditions of Provider.copy and are not checked.
        """
        if len(moves) <= FEW_MOVES and (apart or not _overlap(moves)):
            for destination, source, size in moves.tolist():
                self._cupy.cuda.runtime.memcpyAsync(
                    destination, source, size, _TO_DEVICE, stream.ptr
                )
            return
        plan = None
        if not apart:
            plan = plan_moves(moves)
            plan.check_aligned(0)
        # Another thread has the lock, or this thread does, and a finalizer interrupted its call.
        if not self._lock.acquire(blocking=False):
            other = DeviceCopy(self._cupy)
            try:
                other(moves, stream, apart=apart)
            finally:
                stream.synchronize()  # the memory of `other` is freed next
            return
        try:
            if self._table is None:
                self._prepare()
            self._last.synchronize()  # the table and its source are in use until then
            staged = plan is None and len(moves) < _MAX_MOVES
            if plan is None:
                plan = MovePlan.of(moves, self._staging if staged else None)
            if staged and plan.num_tiles > _MAX_TILES:
                plan, staged = MovePlan(plan.table.copy(), plan.ordered), False
            self._launches(plan, stream, staged=staged)
        finally:
            self._lock.release()

    def _launches(self, plan: MovePlan, stream: Any, *, staged: bool) -> None:
        """`staged`: the table is in `_staging` already, and the plan is launched as a whole."""
        runtime = self._cupy.cuda.runtime
        for number, part in enumerate(_parts(plan)):
            if number:
                self._last.synchronize()
            table = part.table
            if not staged:
                self._staging[: len(table)] = table
            runtime.memcpyAsync(*self._upload, table.nbytes, _FROM_HOST, stream.ptr)
            if part.ordered:
                runtime.memsetAsync(self._progress.data.ptr, 0, 4 * part.num_progress, stream.ptr)
            launch_moves(part, NULL, self._table, self._progress, stream)
            self._last.record(stream)

    def _prepare(self) -> None:
        cuda = self._cupy.cuda
        memory = cuda.Memory(_TABLE_BYTES + 4 * (1 + _MAX_TILES))
        start = cuda.MemoryPointer(memory, 0)
        self._progress = self._cupy.ndarray((1 + _MAX_TILES,), np.int32, start + _TABLE_BYTES)
        self._last = cuda.Event(disable_timing=True)
        pinned = cuda.alloc_pinned_memory(_TABLE_BYTES)
        count = (_MAX_MOVES + 1) * 3
        self._staging = np.frombuffer(pinned, np.int64, count).reshape(-1, 3)
        self._upload = start.ptr, self._staging.ctypes.data
        self._table = self._cupy.ndarray((_MAX_MOVES + 1, 3), np.int64, start)


def _overlap(moves: Moves) -> bool:
    destination, source, size = moves.T
    apart = (destination + size <= source[:, None]) | ((source + size)[:, None] <= destination)
    return not apart.all()


def _parts(plan: MovePlan) -> Iterator[MovePlan]:
    """Splits a plan into plans that fit the table, to be launched in order."""
    if len(plan.table) <= _MAX_MOVES and plan.num_tiles <= _MAX_TILES:
        yield plan
        return
    most_bytes = _MAX_TILES * TILE_BYTES
    # Cut after every `most_bytes` bytes and after every _MAX_MOVES moves.
    first = plan.table[:, 2]
    cuts = np.union1d(first[:-1:_MAX_MOVES], np.arange(0, plan.num_bytes, most_bytes))
    starts = np.union1d(first[:-1], cuts)
    of_move = np.searchsorted(first, starts, side="right") - 1
    rows = np.column_stack([plan.table[of_move, :2] + (starts - first[of_move])[:, None], starts])
    bounds = [*np.searchsorted(starts, cuts), len(starts)]
    for begin, end in pairwise(bounds):
        table = np.vstack([rows[begin:end], [0, 0, np.append(starts, plan.num_bytes)[end]]])
        table[:, 2] -= starts[begin]
        yield MovePlan(table, plan.ordered)
