"""The movable buffers in columns, which defragmentation reads and writes as arrays.

A buffer has a row from its creation until it is pinned or freed. Pins are taken under the pool's
lock but removed without it, so the removal of the last pin is only noted; the buffer gets a row
again when the rows are next read.

A defragmentation packs all buffers that have a row: a run of adjacent buffers becomes one PACKED
span, the rows are the only record of the buffers' addresses, and no Python object of a buffer is
touched. A buffer gets its own span back, cut out of its run, when it is pinned, freed or reported
(`unpack`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

import numpy as np

from cukit.memory.bookkeeping.compaction import Ints
from cukit.memory.bookkeeping.spans import LIVE, NO_ROW, PACKED, Holder, Span


class Movables:
    """All methods but `note` and `starts_at` require the pool's lock.

    live: the live spans by address. Packed buffers are not in it.
    """

    def __init__(self, live: dict[int, Span]) -> None:
        self._live = live
        self._address, self._size = array("q"), array("q")
        """By row; an empty row has address and size 0."""
        self._holders: list[Holder | None] = []
        self._packed = bytearray()
        """By row: 1 if the buffer is packed."""
        self.num_packed = 0
        self._starts: list[int] = []
        self._runs: list[Span] = []
        """The PACKED spans and their addresses, ascending."""
        self._empty: list[int] = []
        self._unpinned: set[Holder] = set()
        self.note = self._unpinned.add
        """Notes that a buffer may have lost its last pin. Never blocks."""

    def __len__(self) -> int:
        return len(self._holders) - len(self._empty)

    @property
    def packed_bytes(self) -> int:
        """Bytes of all packed buffers."""
        return sum(span.size for span in self._runs)

    def starts_at(self, address: object) -> bool:
        """Whether a buffer that has a row starts at the address."""
        return bool(address) and address in self._address

    def add(self, holder: Holder) -> None:
        """Adds a buffer without pins."""
        span = holder.span
        if self._empty:
            row = self._empty.pop()
            self._address[row], self._size[row] = span.address, span.size
            self._holders[row] = holder
        else:
            row = len(self._holders)
            self._holders.append(holder)
            self._packed.append(0)
            self._address.append(span.address)
            self._size.append(span.size)
        holder.row = row

    def remove(self, holder: Holder) -> None:
        """Removes a buffer that is pinned or freed, if it has a row; it is not packed."""
        row = holder.row
        if row == NO_ROW:
            return
        holder.row = NO_ROW
        self._address[row] = self._size[row] = 0
        self._holders[row] = None
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
        # Views of the columns must not outlive this call: they block `append`.
        rows = np.frombuffer(self._size, np.int64).nonzero()[0]
        address: Ints = np.frombuffer(self._address, np.int64)[rows]
        size: Ints = np.frombuffer(self._size, np.int64)[rows]
        if (address[1:] < address[:-1]).any():
            order = address.argsort()
            rows, address, size = rows[order], address[order], size[order]
        return rows, address, size

    def holders(self, rows: Ints) -> list[Holder]:
        """The buffers of these rows."""
        return list(map(self._holders.__getitem__, rows.tolist()))  # type: ignore[arg-type]

    # Packing ----------------------------------------------------------------------------------

    def pack(self, rows: Ints, address: Ints, runs: list[Span]) -> None:
        """Packs all buffers.

        Args:
            rows: of all buffers.
            address: of each of them; may be new.
            runs: PACKED spans that cover them all and nothing else, in address order.
        """
        np.frombuffer(self._address, np.int64)[rows] = address
        packed = np.zeros(len(self._packed), np.uint8)
        packed[rows] = 1
        self._packed = bytearray(packed)
        self.num_packed = len(rows)
        self._runs = runs
        self._starts = [span.address for span in runs]

    def unpack(self, holder: Holder) -> None:
        """Gives a buffer its own span, if it is packed."""
        row = holder.row
        if row == NO_ROW or not self._packed[row]:
            return
        address, size = self._address[row], self._size[row]
        number = bisect_right(self._starts, address) - 1
        run = self._runs[number]
        end = run.end
        span = run.isolate(address, size)
        rest = [] if span is run else [run]
        if span.end < end:
            assert span.next is not None
            rest.append(span.next)
        self._runs[number : number + 1] = rest
        self._starts[number : number + 1] = [one.address for one in rest]
        old = holder.span
        span.state, span.stream, span.holder = LIVE, old.stream, holder
        span.requested, span.call_site = old.requested, old.call_site
        holder.span = self._live[address] = span
        self._packed[row] = 0
        self.num_packed -= 1

    def unpack_at(self, address: object) -> None:
        """Gives the buffer that contains an address its own span."""
        if not self.num_packed or not isinstance(address, int):
            return
        rows, start, size = self.columns()
        at = int(start.searchsorted(min(max(address, 0), np.iinfo(np.int64).max), "right")) - 1
        if at >= 0 and address < start[at] + size[at]:
            (holder,) = self.holders(rows[at : at + 1])
            self.unpack(holder)

    def unpack_all(self) -> None:
        """Gives every buffer its own span."""
        if self.num_packed:
            for holder in filter(None, self._holders):
                self.unpack(holder)
