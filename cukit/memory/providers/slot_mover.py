"""Compactions of buffers of one size, planned and copied on the device.

Planning such a compaction on the host takes half as long as copying a gigabyte on the device, most
of it cache misses. So the host only uploads the addresses of the buffers, launches two kernels (the
plan and the copies), and reads the plan while the copies run.
"""

from __future__ import annotations

from array import array
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cukit.core.kernel import NULL, by_value, load_kernel
from cukit.memory.batched_copy import TILE_BYTES, plan_batched_copy
from cukit.memory.slot_grid import MAX_ROWS, MAX_WALLS, REQUEST, Grid, fits, slot_planner_spec

Ints = npt.NDArray[np.int64]

_MAX_BLOCKS = 1 << 16
"""Thread blocks of the copies; each copies several tiles if there are more."""

_REQUEST = REQUEST.size // 8
_WALLS = _REQUEST + MAX_ROWS
"""The first words of the rows and of the walls in pinned memory."""


class SlotMoves(Protocol):
    """A compaction whose copies are enqueued."""

    def wait(self) -> tuple[Ints, Ints] | None:
        """Waits for the plan, not for the copies. Returns the rows of the buffers that move,
        ascending, and their slots; None if nothing moves, because too few pages would become free
        or a buffer is not at the start of a slot. May be called once."""


def num_blocks(grid: Grid, num_walls: int) -> int:
    """Thread blocks for the copies: one per tile of the largest possible compaction; at least
    one."""
    most = grid.num_buffers
    if not num_walls:  # the fullest pages, which stay in use, hold at least the mean
        kept = min(-(-grid.num_buffers >> grid.page_shift), grid.num_pages)
        most -= grid.num_buffers * kept // grid.num_pages
    return max(1, min(-(-(most << grid.slot_shift) // TILE_BYTES), _MAX_BLOCKS))


class SlotMover:
    """Compacts on one device; shared by all its pools.

    1.2 MB of pinned host memory and 1.6 MB of device memory are kept after the first use.
    """

    def __init__(self, cupy: ModuleType) -> None:
        self._cupy = cupy
        self._idle: list[_Launcher] = []

    def __call__(
        self, grid: Grid, addresses: array[int], walls: array[int], stream: Any
    ) -> SlotMoves | None:
        """Enqueues the plan and its copies on `stream`, a CuPy stream, on the current device.

        addresses: the address of each buffer; 0 for an unused row. walls: alternating addresses and
        sizes of the spans that no buffer can move to. Returns None, and enqueues nothing, unless
        `fits` allows the compaction.
        """
        if not fits(grid, len(addresses), len(walls) // 2):
            return None
        try:
            launcher = self._idle.pop()
        except IndexError:  # the first call, or another thread is between launch and `wait`
            launcher = _Launcher(self._cupy)
        launcher.launch(grid, addresses, walls, stream)
        return _Started(launcher, self._idle)


class _Launcher:
    """The memory, arguments and events of one compaction at a time, prepared once."""

    def __init__(self, cupy: ModuleType) -> None:
        cuda = cupy.cuda
        words = _WALLS + 2 * MAX_WALLS + 1 + MAX_ROWS
        self._pinned = cuda.alloc_pinned_memory(8 * words)
        self._words = memoryview(self._pinned).cast("B")[: 8 * words].cast("q")
        halves = np.frombuffer(self._words, np.int32)
        result = _WALLS + 2 * MAX_WALLS
        self._result = halves[2 * result : 2 * result + 1]
        self._targets = halves[2 * result + 2 :].reshape(-1, 2)
        memory = cuda.MemoryPointer(cuda.Memory(24 * (MAX_ROWS + 1) + 4), 0)
        table = cupy.ndarray((MAX_ROWS + 1, 3), np.int64, memory)
        num_moves = cupy.ndarray((1,), np.int32, memory + table.nbytes)
        at = int(self._pinned.ptr)
        host = [
            by_value(np.int64(at + 8 * word)) for word in (0, _REQUEST, _WALLS, result, result + 1)
        ]
        self._plan_args = (*host[:3], table, num_moves, *host[3:])
        self._copy_args = (NULL, table, num_moves, by_value(np.int32(0)))
        self._plan, self._copy = (
            load_kernel(slot_planner_spec()),
            load_kernel(plan_batched_copy(ordered=False, planned=True)),
        )
        self._planned = cuda.Event(disable_timing=True)
        self._copied = cuda.Event(disable_timing=True)

    def launch(self, grid: Grid, addresses: array[int], walls: array[int], stream: Any) -> None:
        self._copied.synchronize()  # the table is in use until then
        words, num_rows, num_walls = self._words, len(addresses), len(walls) // 2
        REQUEST.pack_into(words, 0, *grid, num_rows, num_walls)
        words[_REQUEST : _REQUEST + num_rows] = addresses
        if num_walls:
            words[_WALLS : _WALLS + len(walls)] = walls
        self._plan((1,), self._plan_args, stream=stream)
        self._planned.record(stream)
        self._copy((num_blocks(grid, num_walls),), self._copy_args, stream=stream)
        self._copied.record(stream)

    def read(self) -> tuple[Ints, Ints] | None:
        """The plan, after waiting for it."""
        self._planned.synchronize()
        count = int(self._result[0])
        if count <= 0:
            return None
        moves = self._targets[:count].astype(np.int64)
        return moves[:, 0], moves[:, 1]


class _Started:
    """A SlotMoves that returns its launcher to the idle ones."""

    def __init__(self, launcher: _Launcher, idle: list[_Launcher]) -> None:
        self._launcher, self._idle = launcher, idle

    def wait(self) -> tuple[Ints, Ints] | None:
        moves = self._launcher.read()
        self._idle.append(self._launcher)
        return moves
