"""The movable buffers as columns, which defragmentation reads and writes as arrays.

A buffer has a row from its creation until it is pinned or freed. Pins are taken under the pool's
lock but removed without it, so the removal of the last pin is only noted; the buffer gets a row
again when the rows are next read.

A defragmentation packs all buffers that have a row: a group of adjacent buffers becomes one PACKED
span, the rows are the only record of the buffers' addresses, and no Python object of a buffer is
touched. When a buffer of a group is pinned, freed or looked up by its address, all buffers of
the group get their own spans back (`unpack`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from cukit.memory.bookkeeping.compaction import Ints
from cukit.memory.bookkeeping.spans import GONE, NO_ROW, PACKED, Holder, Span

MAX_PER_GROUP = 32
"""Unpacking a group of 32 takes about as long as one pin."""


class Movables:
    """The movable buffers. All methods except `note` and `starts_at` require the pool's lock.

    live: the live spans by address. Packed buffers are not in it.
    replace_first: Arena.replace_first.
    """

    def __init__(self, live: dict[int, Span], replace_first: Callable[[Span, Span], None]) -> None:
        self._live = live
        self._replace_first = replace_first
        self._address, self._size = array("q"), array("q")
        """By row; an empty row has address and size 0."""
        self._num_of_size: dict[int, int] = {}
        """Rows by size."""
        self._holders: list[Holder | None] = []
        self.num_packed = 0
        self._groups: list[Span | None] = []
        """The PACKED spans; None: unpacked. The last entry stands for rows that were empty."""
        self._packed_rows = self._first = np.empty(0, np.int64)
        """_packed_rows: the rows that the last defragmentation packed, in address order. _first:
        the index in _packed_rows at which each group begins, and the number of rows."""
        self._group_of: Ints | None = None
        """The group of each row; computed when the first buffer is unpacked."""
        self._empty: list[int] = []
        self._unpinned: set[Holder] = set()
        self.note = self._unpinned.add
        """Notes that a buffer may have lost its last pin. Never blocks."""

    def __len__(self) -> int:
        return len(self._holders) - len(self._empty)

    @property
    def num_alone(self) -> int:
        """Rows of buffers that are not packed."""
        return len(self) - self.num_packed

    @property
    def packed_bytes(self) -> int:
        """Bytes of all packed buffers."""
        return sum(span.size for span in self._groups if span is not None)

    @property
    def addresses(self) -> array[int]:
        """The address of each row, 0 if the row is empty. The caller must not change it."""
        return self._address

    @property
    def only_size(self) -> int:
        """The size that all rows have; 0 if there are no rows, or several sizes."""
        return next(iter(self._num_of_size)) if len(self._num_of_size) == 1 else 0

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
            self._address.append(span.address)
            self._size.append(span.size)
        holder.row = row
        self._num_of_size[span.size] = self._num_of_size.get(span.size, 0) + 1

    def remove(self, holder: Holder) -> None:
        """Removes a buffer that is pinned or freed, if it has a row; it is not packed."""
        row = holder.row
        if row == NO_ROW:
            return
        holder.row = NO_ROW
        size = self._size[row]
        self._num_of_size[size] -= 1
        if not self._num_of_size[size]:
            del self._num_of_size[size]
        self._address[row] = self._size[row] = 0
        self._holders[row] = None
        self._empty.append(row)

    def settle(self) -> None:
        """Adds the noted buffers that have no pins and are not closed."""
        while self._unpinned:
            holder = self._unpinned.pop()
            if holder.row == NO_ROW and not (holder.pins or holder.closed):
                self.add(holder)

    def columns(self) -> tuple[Ints, Ints, Ints]:
        """Row numbers, addresses and sizes, in the order of the rows."""
        # No view of a column may outlive this call, even if it raises: views make `append` fail.
        # nonzero() takes half as long on flags as on integers.
        rows = (np.frombuffer(self._size, np.int64) != 0).nonzero()[0]
        address: Ints = np.frombuffer(self._address, np.int64)[rows]
        size: Ints = np.frombuffer(self._size, np.int64)[rows]
        return rows, address, size

    def holders(self, rows: Ints) -> list[Holder]:
        """The buffers of these rows."""
        return list(map(self._holders.__getitem__, rows.tolist()))  # type: ignore[arg-type]

    # Packing ----------------------------------------------------------------------------------

    def pack(
        self, rows: Ints, address: Ints, size: Ints, bounds: list[int]
    ) -> tuple[list[Span], Ints, Ints]:
        """Packs all buffers; returns the PACKED spans in address order, their addresses and sizes.

        Args:
            rows: the rows of all buffers.
            address: their addresses, which may be new.
            size: their sizes.
            bounds: the addresses of all reservations; no group extends across one.
        """
        np.frombuffer(self._address, np.int64)[rows] = address
        order = address.argsort()
        address = address[order]
        end = address + size[order]
        apart = np.ones(len(rows) + 1, bool)
        np.not_equal(address[1:], end[:-1], out=apart[1:-1])
        if len(bounds) > 1:
            apart[:-1] |= np.isin(address, bounds)
        apart[:-1:MAX_PER_GROUP] = True
        first = apart.nonzero()[0]
        low = address[first[:-1]]
        length = end[first[1:] - 1] - low
        spans = [
            Span(at, many, PACKED) for at, many in zip(low.tolist(), length.tolist(), strict=True)
        ]
        self._packed_rows, self._first = rows[order], first
        self._group_of = None
        self._groups = [*spans, None]
        self.num_packed = len(rows)
        return spans, low, length

    def unpack(self, holder: Holder) -> None:
        """If a buffer is packed, gives every buffer of its group its own span."""
        row = holder.row
        if self.num_packed and row > NO_ROW:
            groups = self._group_of
            if groups is None:
                groups = self._group_of = self._groups_by_row()
            if row < len(groups):
                self._unpack(groups[row])

    def _groups_by_row(self) -> Ints:
        """The group of each row; for rows that were not packed, the last entry of `_groups`."""
        number = np.arange(len(self._first) - 1).repeat(np.diff(self._first))
        rows = self._packed_rows
        groups = np.full(int(rows.max(initial=-1)) + 1, len(self._groups) - 1)
        groups[rows] = number
        return groups

    def _unpack(self, number: int) -> None:
        group = self._groups[number]
        if group is None:
            return
        rows = self._packed_rows[self._first[number] : self._first[number + 1]].tolist()
        before = group.prev
        end = group.address
        for row in rows:
            holder = self._holders[row]
            assert holder is not None
            span = holder.span
            span.address, span.uses = end, ()
            end += span.size
            self._live[span.address] = span
            span.prev = before
            if before is not None:
                before.next = span
            before = span
        span.next = group.next
        if group.next is not None:
            group.next.prev = span
        if group.prev is None:
            self._replace_first(group, self._holders[rows[0]].span)
        group.prev = group.next = None
        group.state = GONE
        self._groups[number] = None
        self.num_packed -= len(rows)

    def unpack_at(self, address: object) -> None:
        """Unpacks the group that contains an address."""
        if not self.num_packed or not isinstance(address, int):
            return
        for number, group in enumerate(self._groups):
            if group is not None and group.address <= address < group.end:
                self._unpack(number)

    def unpack_all(self) -> None:
        """Gives every buffer its own span."""
        for number in range(len(self._groups)) if self.num_packed else ():
            self._unpack(number)
