"""The movable buffers in columns, which defragmentation reads as arrays.

A buffer has a row from its creation until it is pinned or freed. Pins are taken under the pool's
lock but removed without it, so the removal of the last pin is only noted; the buffer gets a row
again when the rows are next read.
"""

from __future__ import annotations

from array import array

import numpy as np

from cukit.memory.bookkeeping.compaction import Ints
from cukit.memory.bookkeeping.spans import NO_ROW, Holder, Span


class Movables:
    """All methods but `note` require the pool's lock."""

    def __init__(self) -> None:
        self._address, self._size = array("q"), array("q")
        """By row; an empty row has size 0."""
        self._spans: list[Span | None] = []
        self._empty: list[int] = []
        self._unpinned: set[Holder] = set()
        self.note = self._unpinned.add
        """Notes that a buffer may have lost its last pin. Never blocks."""

    def __len__(self) -> int:
        return len(self._spans) - len(self._empty)

    def add(self, holder: Holder) -> None:
        """Adds a buffer without pins."""
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
        """Removes a buffer that is pinned or freed, if it has a row."""
        row = holder.row
        if row == NO_ROW:
            return
        holder.row = NO_ROW
        self._size[row] = 0
        self._spans[row] = None
        self._empty.append(row)

    def settle(self) -> None:
        """Adds the buffers that have lost their pins."""
        while self._unpinned:
            holder = self._unpinned.pop()
            if holder.row == NO_ROW and not (holder.pins or holder.closed):
                self.add(holder)

    def columns(self) -> tuple[Ints, Ints, Ints]:
        """Row numbers, addresses and sizes, in address order."""
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
        """The spans of these rows."""
        return list(map(self._spans.__getitem__, rows.tolist()))  # type: ignore[arg-type]

    def move(self, rows: Ints, target: Ints) -> None:
        """Sets new addresses for the buffers of these rows."""
        column = self._address
        for row, span, address in zip(
            rows.tolist(), self.spans(rows), target.tolist(), strict=True
        ):
            column[row] = span.address = address
