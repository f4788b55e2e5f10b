"""Copies many byte ranges in a single launch; used by defragmentation and by KV caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cukit.core.arrays import (
    ACCESS_BYTES,
    Array,
    adopt,
    check_array,
    empty,
    namespace,
    runs_kernel,
)
from cukit.core.device import Device
from cukit.core.kernel import NULL, KernelSpec, load_kernel
from cukit.errors import ArrayLayoutError, ArrayShapeError
from cukit.memory.slot_grid import slot_planner_spec
from cukit.reference import memory as reference
from cukit.registry import register

_OP = "batched_copy"
_THREADS = 256
_VECS = 8
TILE_BYTES = _THREADS * _VECS * ACCESS_BYTES
"""Bytes per thread block."""

_uint8 = np.dtype(np.uint8)


class Move(NamedTuple):
    """Copies `size` bytes from `source` to `destination`."""

    destination: int
    source: int
    size: int


Moves = npt.NDArray[np.int64]
"""Moves as rows: [number, 3]."""


def _moves_array(moves: Any) -> Moves:
    """The moves as int64 [number, 3]. Raises ArrayShapeError."""
    try:
        table = np.asarray(moves)
    except ValueError:
        table = np.empty(0, object)
    if table.size == 0 and isinstance(moves, (list, tuple, np.ndarray)):
        return np.empty((0, 3), np.int64)
    legal = table.ndim == 2 and table.shape[1] == 3 and table.dtype.kind in "iu"
    if not legal or (table.dtype == np.uint64 and (table > np.iinfo(np.int64).max).any()):
        raise ArrayShapeError(
            f"{_OP}: moves must be integers [number, 3], got {table.dtype.name} {table.shape}"
        )
    return table.astype(np.int64, copy=False)


def batched_copy(memory: Array, moves: Moves | Sequence[tuple[int, int, int]]) -> Array:
    """Copies byte ranges within `memory`: `memory[d : d + n] = memory[s : s + n]` for each move.

    Destinations may overlap sources only if all moves slide down, as when holes are closed: sorted
    by source, the destinations ascend too, each is below its source, and the sources do not overlap
    one another. Every byte is then read before it is overwritten. Destinations must never overlap
    one another.

    Args:
        memory: uint8 [bytes], C-contiguous, changed in place.
        moves: int64 [number, 3]: rows of `(destination, source, size)` in bytes, as a NumPy array
            (fastest) or a sequence; on the GPU multiples of 16, and `memory` 16-byte aligned.

    Returns:
        `memory`.

    Raises:
        ArrayError: invalid dtype, shape or layout of an argument; a move that is outside `memory`,
            has a negative size or (GPU) an unaligned address or size; any other overlap.

    One launch for any number of moves, on CuPy's current stream. Deterministic.

    >>> import numpy as np
    >>> batched_copy(np.arange(8, dtype=np.uint8), [(0, 2, 3), (3, 6, 2)])
    array([2, 3, 4, 6, 7, 5, 6, 7], dtype=uint8)
    """
    (memory,) = adopt(_OP, memory)
    check_array(_OP, "memory", memory, dtypes=(_uint8,), ndim=1)
    rows = _moves_array(moves)
    starts, sizes = rows[:, :2], rows[:, 2:]
    # A sum of start and size could overflow. plan_moves reports negative sizes.
    if ((starts < 0) | (starts > memory.size - np.maximum(sizes, 0))).any():
        raise ArrayShapeError(f"{_OP}: a move is outside memory of {memory.size} bytes")
    plan = plan_moves(rows)
    if not runs_kernel(_OP, memory):
        return reference.batched_copy(memory, plan.moves())
    plan.check_aligned(memory.ctypes.data if namespace(memory) is np else memory.data.ptr)
    if plan.num_tiles:
        moves_table = namespace(memory).asarray(plan.table)
        progress = empty(memory, (plan.num_progress,), np.int32)
        progress.fill(0)
        launch_moves(plan, memory, moves_table, progress)
    return memory


@dataclass(frozen=True, eq=False)
class MovePlan:
    """Checked moves in the kernel's format."""

    table: npt.NDArray[np.int64]
    """[num_moves + 1, 3]: destination, source, total bytes of the preceding moves; the last row
    holds the total of all moves."""
    ordered: bool
    """Whether a destination overlaps a source."""

    @classmethod
    def of(cls, rows: Moves, memory: Moves | None = None, *, ordered: bool = False) -> MovePlan:
        """The plan of moves known to be valid.

        memory: the array that stores the table, [at least len(rows) + 1, 3]; by default a new one.
        """
        table = (
            np.empty((len(rows) + 1, 3), np.int64) if memory is None else memory[: len(rows) + 1]
        )
        table[:-1, :2] = rows[:, :2]
        rows[:, 2].cumsum(out=table[1:, 2])
        table[-1, :2] = table[0, 2] = 0
        return cls(table, ordered)

    @property
    def num_bytes(self) -> int:
        return int(self.table[-1, 2])

    @property
    def num_tiles(self) -> int:
        return -(-self.num_bytes // TILE_BYTES)

    @property
    def num_progress(self) -> int:
        """Elements of the array through which ordered tiles wait for one another."""
        return 1 + self.num_tiles if self.ordered else 0

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        return np.diff(self.table[:, 2])

    def moves(self) -> list[Move]:
        """The moves in an order in which they can be executed one after another."""
        return [
            Move(int(destination), int(source), int(size))
            for (destination, source, _), size in zip(self.table[:-1], self.sizes, strict=True)
        ]

    def check_aligned(self, base: int) -> None:
        """Raises ArrayLayoutError unless all accesses are aligned to 16 bytes."""
        if base % ACCESS_BYTES or (self.table % ACCESS_BYTES).any():
            raise ArrayLayoutError(
                f"{_OP}: addresses and sizes must be multiples of {ACCESS_BYTES} on a GPU"
            )


def plan_moves(moves: Moves | Sequence[tuple[int, int, int]]) -> MovePlan:
    """Drops moves that change nothing, checks overlaps, and sorts by source if overlap is possible.

    Raises ArrayShapeError for negative sizes, ArrayLayoutError for overlaps other than slides.
    """
    rows = np.asarray(moves, np.int64).reshape(-1, 3)
    if (rows[:, 2] < 0).any():
        raise ArrayShapeError(f"{_OP}: a move has a negative size")
    rows = rows[(rows[:, 2] > 0) & (rows[:, 0] != rows[:, 1])]
    ordered = False
    if len(rows):
        destination, source, size = rows.T
        if _overlap_themselves(destination, size):
            raise ArrayLayoutError(f"{_OP}: two moves have overlapping destinations")
        low, high = np.maximum(destination.min(), source.min()), (rows[:, :2].T + size).max(axis=1)
        if low < high.min():  # else all sources are below, or all above, the destinations
            rows = rows[np.argsort(source)]
            ordered = _check_order(rows)
    return MovePlan.of(rows, ordered=ordered)


def _check_order(rows: npt.NDArray[np.int64]) -> bool:
    """Whether a destination overlaps a source; the moves are sorted by source. Raises
    ArrayLayoutError if the moves overlap without sliding down."""
    destination, source, size = rows.T
    ordered = _overlap(destination, source, size)
    if ordered and not (
        (np.diff(destination) > 0).all()
        and (destination < source).all()
        and not _overlap_themselves(source, size)
    ):
        raise ArrayLayoutError(
            f"{_OP}: destinations overlap sources, but not all moves slide down in order"
        )
    return ordered


def _overlap_themselves(start: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> bool:
    if (np.diff(start) < 0).any():
        order = np.argsort(start)
        start, size = start[order], size[order]
    return bool((np.diff(start) < size[:-1]).any())


def _overlap(
    destination: npt.NDArray[np.int64], source: npt.NDArray[np.int64], size: npt.NDArray[np.int64]
) -> bool:
    """Whether any destination overlaps any source; sources ascend."""
    if not len(source):
        return False
    reach = np.maximum.accumulate(source + size)
    first = np.searchsorted(reach, destination, side="right")  # first source end > destination
    inside = first < len(source)
    return bool((source[first[inside]] < (destination + size)[inside]).any())


def launch_moves(
    plan: MovePlan, base: Array | None, table: Array, progress: Any, stream: Any = None
) -> None:
    """Launches `plan`.

    base: the array that addresses are relative to, or NULL. table: `plan.table` on the device.
    progress: int32 [num_progress] zeros on the device. stream: a CuPy stream, by default the
    current one.
    """
    kernel = load_kernel(plan_batched_copy(plan.ordered))
    arguments = (base, table, progress if plan.ordered else NULL)
    kernel((plan.num_tiles,), (*arguments, np.int32(len(plan.table) - 1)), stream=stream)


@cache
def plan_batched_copy(ordered: bool, planned: bool = False) -> KernelSpec:
    """The kernel variant. A block copies TILE_BYTES: enough work to hide the search for its first
    move, small enough to balance the load.

    planned: whether the preceding kernel (memory/plan_slots.cu) writes the moves and their number.
    """
    defines = (
        ("THREADS", _THREADS),
        ("VECS", _VECS),
        ("ORDERED", ordered),
        ("PLANNED", planned),
    )
    return KernelSpec("memory/batched_copy.cu", "batched_copy", defines, _THREADS)


def _specs(device: Device) -> list[KernelSpec]:
    kinds = ((False, False), (True, False), (False, True))
    return [
        *(plan_batched_copy(ordered, planned) for ordered, planned in kinds),
        slot_planner_spec(),
    ]


register(
    name=_OP,
    family="memory",
    function=batched_copy,
    reference=reference.batched_copy,
    specs=_specs,
    writes=("memory",),
)
