"""Queues the moves of a defragmentation without asking the pool for memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from cukit.core.kernel import NULL
from cukit.memory.compaction import TILE_BYTES, MovePlan, launch_moves, plan_moves
from cukit.memory.provider import Move

FEW_MOVES = 4
"""Up to so many are left to the driver's own copies: no table to upload, nothing to compile."""

_MOST_MOVES = 1 << 15
_MOST_TILES = 1 << 17
_TABLE_BYTES = (_MOST_MOVES + 1) * 24
_TO_DEVICE = 3  # cudaMemcpyDeviceToDevice


class DeviceCopy:
    """Copies on one device, with a table of its own there (1.3 MB, kept from the first use on).

    Calls from several threads must not overlap: the pool makes them under its lock.
    """

    def __init__(self, cupy: ModuleType) -> None:
        self._cupy = cupy
        self._table: Any = None
        self._progress: Any = None
        self._last: Any = None
        """Event behind the last launch that reads the table."""

    def __call__(self, moves: Sequence[Move], stream: Any) -> None:
        """On `stream`, a CuPy stream, on the current device. Raises nothing has changed.

        Moves may slide, see :func:`cukit.memory.compaction.batched_copy`.
        """
        plan = plan_moves(moves)
        plan.check_aligned(0)
        with stream:
            if not plan.ordered and len(moves) <= FEW_MOVES:
                self._driver_copies(plan, stream)
            else:
                self._launches(plan, stream)

    def _driver_copies(self, plan: MovePlan, stream: Any) -> None:
        for move in plan.moves():
            self._cupy.cuda.runtime.memcpyAsync(
                move.destination, move.source, move.size, _TO_DEVICE, stream.ptr
            )

    def _launches(self, plan: MovePlan, stream: Any) -> None:
        cupy = self._cupy
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


def _parts(plan: MovePlan) -> Iterator[MovePlan]:
    """Plans to be launched one after the other, each small enough for the table."""
    most_bytes = _MOST_TILES * TILE_BYTES
    rows = [
        (destination + done, source + done, min(most_bytes, size - done))
        for destination, source, size in plan.moves()
        for done in range(0, size, most_bytes)
    ]
    begin = 0
    while begin < len(rows):
        end, num_bytes = begin, 0
        while end < len(rows) and end - begin < _MOST_MOVES:
            if num_bytes + rows[end][2] > most_bytes:
                break
            num_bytes += rows[end][2]
            end += 1
        yield _table_of(rows[begin:end], plan.ordered)
        begin = end


def _table_of(rows: Sequence[tuple[int, int, int]], ordered: bool) -> MovePlan:
    table = np.zeros((len(rows) + 1, 3), np.int64)
    values = np.array(rows, np.int64)
    table[:-1, :2] = values[:, :2]
    table[1:, 2] = np.cumsum(values[:, 2])
    return MovePlan(table, ordered)
