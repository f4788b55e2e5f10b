"""How kernels that hold rows in registers split them over the threads of a block."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cukit.core.compiler import KernelSpec, MacroValue
from cukit.core.device import KIB, Device
from cukit.errors import ArrayShapeError

_MOST_THREADS = 1024
_MOST_REGISTERS = 32
"""32-bit registers of a thread that may hold its share of one row; more would spill."""

_WARP = 32
_MOST_SHORT_VECS = 4
"""Accesses of a thread to a row that lies in one warp."""
_MOST_SHORT_BYTES = 2048
_SHORT_ROW_THREADS = 128
_COPY_BYTES = 16
"""Of an asynchronous copy to shared memory that passes L1 by."""
_FEED_THREADS = 1024
"""Of an SM, for each sum of a column that its threads keep: registers."""
_SHORT_FEED_THREADS = 256
_FEWEST_AHEAD_THREADS = 128


REPRESENTATIVE_COLS = (128, 4096)
"""Row lengths of either kind: several rows a block, a block a row."""


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
    short_rows_per_thread: int = 1,
) -> RowSplit:
    """A split for a kernel that sees a row once: about `vecs_per_thread` accesses a thread in
    flight, more for very long rows; of short rows `short_rows_per_thread` at once.

    cols: row length in elements, a multiple of `vec`. Raises ArrayShapeError where a row does not
    fit the registers of one block.
    """
    num_vecs = max(1, cols // vec)
    if _is_short(cols, itemsize, num_vecs, _MOST_SHORT_VECS):
        split = _split_short_row(num_vecs, vec, _SHORT_ROW_THREADS, _MOST_SHORT_VECS)
        few = split.vecs_per_thread < _MOST_SHORT_VECS
        return replace(split, rows_per_thread=short_rows_per_thread if few else 1)
    return _split_long_row(op, cols, itemsize, vec, vecs_per_thread, _MOST_THREADS)


def split_feed_row(op: str, cols: int, itemsize: int, vec: int, sums: int) -> RowSplit:
    """A split for a kernel whose blocks make many passes over two tensors and keep sums of their
    columns, `sums` for each: the more, the fewer threads. Raises as :func:`split_row`."""
    num_vecs = max(1, cols // vec)
    most_vecs = _MOST_SHORT_VECS if sums == 1 or vec * itemsize < _COPY_BYTES else 3
    if _is_short(cols, itemsize, num_vecs, most_vecs):
        split = _split_short_row(num_vecs, vec, _SHORT_FEED_THREADS, most_vecs)
        return replace(split, rows_per_thread=2 if split.vecs_per_thread <= 2 else 1)
    most_threads = _FEED_THREADS // sums
    if num_vecs <= sums * most_threads:
        split = _split_long_row(op, cols, itemsize, vec, sums, most_threads)
        return replace(split, rows_per_thread=2)
    most = most_threads if num_vecs <= 2 * sums * most_threads else _MOST_THREADS
    return _split_long_row(op, cols, itemsize, vec, 2 * sums, most)


def _is_short(cols: int, itemsize: int, num_vecs: int, most_vecs: int) -> bool:
    return cols * itemsize <= _MOST_SHORT_BYTES and num_vecs <= _WARP * most_vecs


def _split_long_row(
    op: str, cols: int, itemsize: int, vec: int, vecs_per_thread: int, most_threads: int
) -> RowSplit:
    num_vecs = max(1, cols // vec)
    threads = -(-num_vecs // vecs_per_thread)
    threads = min(most_threads, max(_WARP, -(-threads // _WARP) * _WARP))
    per_thread = -(-num_vecs // threads)
    registers = per_thread * max(1, vec * itemsize // 4)
    if registers > _MOST_REGISTERS:
        longest = _MOST_REGISTERS // max(1, vec * itemsize // 4) * vec * _MOST_THREADS
        raise ArrayShapeError(
            f"{op}: the last axis has {cols} elements; with accesses of {vec} elements the kernel "
            f"takes up to {longest}"
        )
    return RowSplit(threads, threads, vec, per_thread)


def _split_short_row(num_vecs: int, vec: int, threads: int, most_vecs: int) -> RowSplit:
    """A power of two of lanes within a warp: of those that leave fewest places empty the one with
    two accesses a lane, or next to that. A reduction over few lanes takes few exchanges."""

    def lanes_for(per_thread: int) -> int:
        return 1 << (-(-num_vecs // per_thread) - 1).bit_length()

    choices = [n for n in range(1, most_vecs + 1) if lanes_for(n) <= _WARP]
    per_thread = min(choices, key=lambda n: (n * lanes_for(n), abs(n - 2)))
    return RowSplit(threads, lanes_for(per_thread), vec, per_thread)


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


@dataclass(frozen=True)
class NormConfig:
    """One way to run a normalisation or its backward: a split of rows over a block, and blocks."""

    entry: str
    dtype: str
    residual: bool
    split: RowSplit
    num_blocks: int
    loads: str | None = None
    """Of a forward: how the caches treat its inputs."""
    feed: PassFeed | None = None
    """Of a backward, whose blocks make several passes."""
    bias: bool | None = None
    """None: the op knows none."""

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        defines: tuple[tuple[str, MacroValue], ...] = (
            ("DTYPE", self.dtype),
            *self.split.defines(),
            ("RESIDUAL", self.residual),
        )
        if self.bias is not None:
            defines = (*defines, ("BIAS", self.bias))
        if self.loads is not None:
            defines = (*defines, ("LOADS", self.loads))
        shared_bytes = 0
        if self.feed is not None:
            defines = (*defines, *self.feed.defines())
            shared_bytes = self.feed.shared_bytes(self.split)
        source = f"layers/{self.entry}.cu"
        return KernelSpec(source, self.entry, defines, self.split.threads, shared_bytes)


def plan_feed(split: RowSplit, access_bytes: int, sums: int, device: Device) -> PassFeed:
    """As many blocks as registers allow; where rows are long, the next pass ahead.

    Short ones keep enough loads in flight without. sums: as in :func:`split_feed_row`.
    """
    if split.lanes <= _WARP:
        return PassFeed(False, _FEED_THREADS // 2 // split.threads)
    blocks = max(1, _FEED_THREADS // sums // split.threads)
    feed = PassFeed(True, blocks)
    room = device.shared_bytes_per_sm // blocks - _STATIC_AND_SYSTEM_BYTES
    large = split.threads >= _FEWEST_AHEAD_THREADS and access_bytes == _COPY_BYTES
    fits = large and feed.shared_bytes(split) <= room
    return feed if fits else replace(feed, ahead=False)


def input_cache(total_bytes: int, device: Device) -> str:
    """How a kernel that sees rows once loads them: the LOADS macro.

    Kept in L2 last, inputs let the outputs leave it in order. Where most of the outputs fit in L2,
    they had better stay.
    """
    return "Cached" if total_bytes <= 1.5 * device.l2_bytes else "Kept"
