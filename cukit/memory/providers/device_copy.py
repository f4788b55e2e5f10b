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
"""At most this many moves use cudaMemcpyAsync: no table to upload, no kernel to compile."""

_MOST_MOVES = 1 << 15
_MOST_TILES = 1 << 17
_TABLE_BYTES = (_MOST_MOVES + 1) * 24
_TO_DEVICE = 3  # cudaMemcpyDeviceToDevice


class DeviceCopy:
    """Copies on one device, with a table in device memory (1.3 MB, kept after the first use).

    All pools of a device share it: allocating the table takes as long as copying a gigabyte.
    """

    def __init__(self, cupy: ModuleType) -> None:
        self._lock = threading.Lock()
        self._cupy = cupy
        self._table: Any = None
        self._progress: Any = None
        self._last: Any = None
        """Event after the last launch that reads the table."""

    def __call__(self, moves: Moves, stream: Any, *, apart: bool = False) -> None:
        """Enqueues moves on `stream`, a CuPy stream, on the current device. When it raises, nothing
        is enqueued.

        Moves may slide, see :func:`cukit.memory.batched_copy.batched_copy`. `apart`: they satisfy
        the conditions of Provider.copy and are not checked.
        """
        if len(moves) <= FEW_MOVES and (apart or not _overlap(moves)):
            for destination, source, size in moves.tolist():
                self._cupy.cuda.runtime.memcpyAsync(
                    destination, source, size, _TO_DEVICE, stream.ptr
                )
            return
        plan = MovePlan.of(moves) if apart else plan_moves(moves)
        if not apart:
            plan.check_aligned(0)
        if not self._lock.acquire(blocking=False):  # another thread, or a finalizer in this call
            DeviceCopy(self._cupy)(moves, stream, apart=apart)
            return
        try:
            with stream:
                self._launches(plan, stream)
        finally:
            self._lock.release()

    def _launches(self, plan: MovePlan, stream: Any) -> None:
        if self._table is None:
            self._make_table()
        else:
            stream.wait_event(self._last)
        for part in _parts(plan):
            rows = self._table[: len(part.table)]
            rows.set(part.table, stream)
            progress = self._progress[: part.num_progress]
            if part.ordered:
                progress.data.memset_async(0, progress.nbytes, stream)
            launch_moves(part, NULL, rows, progress)
        self._last.record(stream)

    def _make_table(self) -> None:
        cupy = self._cupy
        memory = cupy.cuda.Memory(_TABLE_BYTES + 4 * (1 + _MOST_TILES))
        start = cupy.cuda.MemoryPointer(memory, 0)
        self._progress = cupy.ndarray((1 + _MOST_TILES,), np.int32, start + _TABLE_BYTES)
        self._last = cupy.cuda.Event(disable_timing=True)
        self._table = cupy.ndarray((_MOST_MOVES + 1, 3), np.int64, start)


def _overlap(moves: Moves) -> bool:
    destination, source, size = moves.T
    apart = (destination + size <= source[:, None]) | ((source + size)[:, None] <= destination)
    return not apart.all()


def _parts(plan: MovePlan) -> Iterator[MovePlan]:
    """Splits a plan into plans that fit the table, to be launched in order."""
    if len(plan.table) <= _MOST_MOVES and plan.num_tiles <= _MOST_TILES:
        yield plan
        return
    most_bytes = _MOST_TILES * TILE_BYTES
    # Cut after every `most_bytes` bytes and after every _MOST_MOVES moves.
    first = plan.table[:, 2]
    cuts = np.union1d(first[:-1:_MOST_MOVES], np.arange(0, plan.num_bytes, most_bytes))
    starts = np.union1d(first[:-1], cuts)
    of_move = np.searchsorted(first, starts, side="right") - 1
    rows = np.column_stack([plan.table[of_move, :2] + (starts - first[of_move])[:, None], starts])
    bounds = [*np.searchsorted(starts, cuts), len(starts)]
    for begin, end in pairwise(bounds):
        table = np.vstack([rows[begin:end], [0, 0, np.append(starts, plan.num_bytes)[end]]])
        table[:, 2] -= starts[begin]
        yield MovePlan(table, plan.ordered)
