"""The buffers that may be moved, in columns: a defragmentation reads them without a look at each.

A row belongs to a buffer from its making until it is pinned or freed. Pins are taken under the
pool's lock and undone without it, so the end of the last pin is only noted, and the buffer has its
row again when the rows are read next.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from cukit.memory.bookkeeping.compaction import Ints

if TYPE_CHECKING:
    from cukit.memory.bookkeeping.spans import Span
    from cukit.memory.pool.buffer import Holder

NO_ROW = -1


class Movables:
    """Called under the pool's lock, but for `note`."""

    def __init__(self) -> None:
        self._address, self._size = array("q"), array("q")
        """By row; the size of an empty row is 0."""
        self._spans: list[Span | None] = []
        self._empty: list[int] = []
        self._loose: set[Holder] = set()
        self.note = self._loose.add
        """Tells that a buffer may have lost its last pin. Never blocks."""

    def __len__(self) -> int:
        return len(self._spans) - len(self._empty)

    def add(self, holder: Holder) -> None:
        """Gives a buffer without pins its row."""
        span = holder.span
        if self._empty:
            row = self._empty.pop()
            self._address[row], self._size[row] = span.address, span.size
            self._spans[row] = span
        else:
            row = len(self._spans)
            self._spans.append(span)
            self._address.append(span.address)
            self._size.append(span.size)
        holder.row = row

    def remove(self, holder: Holder) -> None:
        """Takes the row of a buffer, if it has one: it is pinned, or freed."""
        row = holder.row
        if row == NO_ROW:
            return
        holder.row = NO_ROW
        self._size[row] = 0
        self._spans[row] = None
        self._empty.append(row)

    def settle(self) -> None:
        """Gives those their rows again that have lost their pins."""
        while self._loose:
            holder = self._loose.pop()
            if holder.row == NO_ROW and not (holder.pins or holder.closed):
                self.add(holder)

    def columns(self) -> tuple[Ints, Ints, Ints]:
        """Rows, and their addresses and sizes, in address order."""
        self.settle()
        size: Ints = np.array(self._size, np.int64)
        address: Ints = np.array(self._address, np.int64)
        rows = np.arange(len(size))
        if self._empty:
            rows = np.flatnonzero(size)
            address, size = address[rows], size[rows]
        if (address[1:] < address[:-1]).any():
            order = np.argsort(address)
            rows, address, size = rows[order], address[order], size[order]
        return rows, address, size

    def spans(self, rows: Ints) -> list[Span]:
        """Those of some rows."""
        return list(map(self._spans.__getitem__, rows.tolist()))  # type: ignore[arg-type]

    def move(self, rows: Ints, target: Ints) -> None:
        """Puts the buffers of some rows elsewhere."""
        column = self._address
        for row, span, address in zip(
            rows.tolist(), self.spans(rows), target.tolist(), strict=True
        ):
            column[row] = span.address = address
