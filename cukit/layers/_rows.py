"""How kernels that hold rows in registers split them over the threads of a block."""

from __future__ import annotations

from dataclasses import dataclass

from cukit.core.device import KIB, Device
from cukit.errors import ArrayShapeError

_MOST_THREADS = 1024
_MOST_REGISTERS = 32
"""32-bit registers of a thread that may hold its share of one row; more would spill."""

_WARP = 32
_MOST_SHORT_VECS = 4
"""Accesses of a thread to a row that lies in one warp."""
_MOST_SHORT_BYTES = 1024
"""Longer rows are as fast with a block of their own, whose threads hold less each."""
_SHORT_ROW_THREADS = 256


@dataclass(frozen=True)
class RowSplit:
    """`lanes` threads share a row, each holding `vecs_per_thread` accesses of `vec` elements.

    A block of `threads` threads works on `threads / lanes` rows side by side, and every thread on
    `rows_per_thread` rows at once. Long rows take a block each: `lanes == threads`.
    """

    threads: int
    lanes: int
    vec: int
    vecs_per_thread: int
    rows_per_thread: int = 1

    @property
    def rows_per_pass(self) -> int:
        """Rows that a block works on at once."""
        return self.threads // self.lanes * self.rows_per_thread

    def passes(self, rows: int) -> int:
        """Passes of a block that `rows` rows take."""
        return -(-rows // self.rows_per_pass)

    def defines(self) -> tuple[tuple[str, int], ...]:
        """The macros that the row kernels share."""
        return (
            ("THREADS", self.threads),
            ("LANES", self.lanes),
            ("VEC", self.vec),
            ("VECS_PER_THREAD", self.vecs_per_thread),
            ("ROWS", self.rows_per_thread),
        )


def split_row(
    op: str,
    cols: int,
    itemsize: int,
    vec: int,
    vecs_per_thread: int = 2,
    *,
    bytes_in_flight: int = 64,
) -> RowSplit:
    """A split with about `vecs_per_thread` accesses a thread in flight, more for very long rows.

    cols: row length in elements, a multiple of `vec`.
    bytes_in_flight: what a thread asks of a tensor at once where rows are short: several rows.
    Raises ArrayShapeError where a row does not fit the registers of one block.
    """
    num_vecs = max(1, cols // vec)
    if cols * itemsize <= _MOST_SHORT_BYTES and num_vecs <= _WARP * _MOST_SHORT_VECS:
        return _split_short_row(num_vecs, itemsize, vec, bytes_in_flight)
    threads = -(-num_vecs // vecs_per_thread)
    threads = min(_MOST_THREADS, max(_WARP, -(-threads // _WARP) * _WARP))
    per_thread = -(-num_vecs // threads)
    registers = per_thread * max(1, vec * itemsize // 4)
    if registers > _MOST_REGISTERS:
        longest = _MOST_REGISTERS // max(1, vec * itemsize // 4) * vec * _MOST_THREADS
        raise ArrayShapeError(
            f"{op}: the last axis has {cols} elements; with accesses of {vec} elements the kernel "
            f"takes up to {longest}"
        )
    return RowSplit(threads, threads, vec, per_thread)


def _split_short_row(num_vecs: int, itemsize: int, vec: int, bytes_in_flight: int) -> RowSplit:
    """A power of two of lanes within a warp; of those the one that leaves fewest places empty."""

    def lanes_for(per_thread: int) -> int:
        return 1 << (-(-num_vecs // per_thread) - 1).bit_length()

    choices = [n for n in range(1, _MOST_SHORT_VECS + 1) if lanes_for(n) <= _WARP]
    per_thread = min(choices, key=lambda n: n * lanes_for(n))
    in_flight = bytes_in_flight // (per_thread * vec * itemsize)
    rows_per_thread = 4 if in_flight >= 4 else max(1, in_flight)
    return RowSplit(_SHORT_ROW_THREADS, lanes_for(per_thread), vec, per_thread, rows_per_thread)


_COPY_BYTES = 16
"""Of an asynchronous copy to shared memory that passes L1 by."""
_STATIC_AND_SYSTEM_BYTES = 4 * KIB
"""Of a block's shared memory."""


@dataclass(frozen=True)
class PassFeed:
    """How blocks that make many passes get their rows of two tensors.

    ahead: the next pass is copied to shared memory while one is worked on.
    blocks_per_sm: resident at once, which limits the registers of a thread.
    """

    ahead: bool
    blocks_per_sm: int

    def defines(self) -> tuple[tuple[str, int], ...]:
        """The macros of kernels that make many passes."""
        return (("AHEAD", self.ahead), ("BLOCKS_PER_SM", self.blocks_per_sm))

    def shared_bytes(self, split: RowSplit) -> int:
        """Dynamic shared memory of a block: two tensors, this pass and the next."""
        if not self.ahead:
            return 0
        vectors = split.rows_per_thread * split.vecs_per_thread * split.threads
        return 4 * vectors * _COPY_BYTES


def plan_feed(split: RowSplit, access_bytes: int, device: Device) -> PassFeed:
    """Blocks with half the threads of an SM; where rows are long, the next pass ahead.

    Short ones keep enough loads in flight without.
    """
    blocks = max(1, device.max_threads_per_sm // 2 // split.threads)
    feed = PassFeed(True, blocks)
    room = device.shared_bytes_per_sm // blocks - _STATIC_AND_SYSTEM_BYTES
    long_rows = split.lanes == split.threads and split.threads > _WARP
    if long_rows and access_bytes == _COPY_BYTES and feed.shared_bytes(split) <= room:
        return feed
    return PassFeed(False, blocks)
