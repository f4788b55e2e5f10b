"""Shared by the norms: checks, and launch configurations of kernels that hold rows in registers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from cukit.core.arrays import FLOAT_DTYPES, Array, check_array, check_same_dtype
from cukit.core.compiler import KernelSpec, MacroValue
from cukit.core.device import KIB, Device
from cukit.core.scalars import check_number
from cukit.errors import ArrayShapeError

_MAX_THREADS = 1024
_MAX_REGISTERS = 32
"""32-bit registers per thread for its share of one row; more would spill."""

_WARP = 32
_MAX_SHORT_VECS = 4
"""Maximum accesses per thread of a row that is held by one warp."""
_MAX_SHORT_BYTES = 2048
_SHORT_ROW_THREADS = 128
_COPY_BYTES = 16
"""Size of an asynchronous copy to shared memory that bypasses L1."""
_PERSISTENT_THREADS = 1024
"""Thread budget per SM of kernels that keep one sum per column in registers; with several sums per
column it is divided by their number."""
_SHORT_PERSISTENT_THREADS = 256
_MIN_PREFETCH_THREADS = 128


REPRESENTATIVE_COLS = (100, 128, 4096)
"""Several rows per block, with idle lanes and without; one row per block."""


def check_norm(
    op: str,
    x: Array,
    weight: Array,
    bias: Array | None,
    like_x: dict[str, Array | None],
    eps: float,
) -> None:
    """Checks the arguments of a normalisation or its backward.

    like_x: arrays by name, with the shape and dtype of `x`; None is skipped, except for grad_out.
    """
    check_number(op, "eps", eps, least=0)
    check_array(op, "x", x, dtypes=FLOAT_DTYPES)
    check_array(op, "weight", weight, shape=x.shape[-1:])
    if bias is not None:
        check_array(op, "bias", bias, shape=x.shape[-1:])
    for name, array in like_x.items():
        if array is not None or name == "grad_out":
            check_array(op, name, array, shape=x.shape)
    check_same_dtype(op, x=x, weight=weight, bias=bias, **like_x)


def rows_and_cols(x: Array) -> tuple[int, int]:
    """Number of rows and row length of `x` [..., cols]."""
    return math.prod(x.shape[:-1]), x.shape[-1]


@dataclass(frozen=True)
class RowSplit:
    """`lanes` threads share a row, each holding `vecs_per_thread` accesses of `vec` elements.

    A block of `threads` threads has `threads / lanes` groups of lanes; each group processes
    `rows_per_thread` rows at once. Long rows take a whole block: `lanes == threads`.
    """

    threads: int
    lanes: int
    vec: int
    vecs_per_thread: int
    rows_per_thread: int = 1

    @property
    def rows_per_pass(self) -> int:
        """Rows that a block processes at once."""
        return self.threads // self.lanes * self.rows_per_thread

    def passes(self, rows: int) -> int:
        """Number of block passes over `rows` rows."""
        return -(-rows // self.rows_per_pass)

    def defines(self) -> tuple[tuple[str, int], ...]:
        """The macros common to the row kernels."""
        return (
            ("THREADS", self.threads),
            ("LANES", self.lanes),
            ("VEC", self.vec),
            ("VECS_PER_THREAD", self.vecs_per_thread),
            ("ROWS", self.rows_per_thread),
        )

    def fits(self, cols: int) -> bool:
        """Whether the accesses of the lanes cover a row of `cols` elements exactly."""
        return self.lanes * self.vecs_per_thread * self.vec == cols


@cache
def split_row(
    op: str,
    cols: int,
    itemsize: int,
    vec: int,
    vecs_per_thread: int = 2,
    *,
    short_rows_per_thread: int = 1,
) -> RowSplit:
    """The split for a kernel that reads each row once: about `vecs_per_thread` accesses per thread
    in flight, more for very long rows.

    cols: row length in elements, a multiple of `vec`.
    short_rows_per_thread: short rows that a thread processes at once.
    Raises ArrayShapeError if a row does not fit in the registers of one block.
    """
    num_vecs = max(1, cols // vec)
    if _is_short(cols, itemsize, num_vecs, _MAX_SHORT_VECS):
        split = _split_short_row(num_vecs, vec, _SHORT_ROW_THREADS, _MAX_SHORT_VECS)
        few = split.vecs_per_thread < _MAX_SHORT_VECS
        return replace(split, rows_per_thread=short_rows_per_thread if few else 1)
    return _split_long_row(op, cols, itemsize, vec, vecs_per_thread, _MAX_THREADS)


@cache
def split_persistent_row(op: str, cols: int, itemsize: int, vec: int, sums: int) -> RowSplit:
    """The split for a kernel whose blocks make many passes over two tensors and accumulate `sums`
    sums per column; more sums need more registers, hence fewer threads. Raises as
    :func:`split_row`."""
    num_vecs = max(1, cols // vec)
    max_vecs = _MAX_SHORT_VECS if sums == 1 or vec * itemsize < _COPY_BYTES else 3
    if _is_short(cols, itemsize, num_vecs, max_vecs):
        split = _split_short_row(num_vecs, vec, _SHORT_PERSISTENT_THREADS, max_vecs)
        return replace(split, rows_per_thread=2 if split.vecs_per_thread <= 2 else 1)
    max_threads = _PERSISTENT_THREADS // sums
    if num_vecs <= sums * max_threads:
        split = _split_long_row(op, cols, itemsize, vec, sums, max_threads)
        return replace(split, rows_per_thread=2)
    most = max_threads if num_vecs <= 2 * sums * max_threads else _MAX_THREADS
    return _split_long_row(op, cols, itemsize, vec, 2 * sums, most)


def _is_short(cols: int, itemsize: int, num_vecs: int, max_vecs: int) -> bool:
    return cols * itemsize <= _MAX_SHORT_BYTES and num_vecs <= _WARP * max_vecs


def _split_long_row(
    op: str, cols: int, itemsize: int, vec: int, vecs_per_thread: int, max_threads: int
) -> RowSplit:
    num_vecs = max(1, cols // vec)
    threads = -(-num_vecs // vecs_per_thread)
    threads = min(max_threads, max(_WARP, -(-threads // _WARP) * _WARP))
    per_thread = -(-num_vecs // threads)
    registers = per_thread * max(1, vec * itemsize // 4)
    if registers > _MAX_REGISTERS:
        longest = _MAX_REGISTERS // max(1, vec * itemsize // 4) * vec * _MAX_THREADS
        raise ArrayShapeError(
            f"{op}: the last axis has {cols} elements; with accesses of {vec} elements the kernel "
            f"supports up to {longest}"
        )
    return RowSplit(threads, threads, vec, per_thread)


def _split_short_row(num_vecs: int, vec: int, threads: int, max_vecs: int) -> RowSplit:
    """The split of a row over a power of two of lanes within a warp.

    Minimises first the unused accesses of the lanes, then the difference from two accesses per
    lane. Fewer lanes need fewer shuffles for a reduction.
    """

    def lanes_for(per_thread: int) -> int:
        return 1 << (-(-num_vecs // per_thread) - 1).bit_length()

    choices = [n for n in range(1, max_vecs + 1) if lanes_for(n) <= _WARP]
    per_thread = min(choices, key=lambda n: (n * lanes_for(n), abs(n - 2)))
    return RowSplit(threads, lanes_for(per_thread), vec, per_thread)


_STATIC_AND_SYSTEM_BYTES = 4 * KIB
"""Shared memory of a block besides the dynamic part."""


@dataclass(frozen=True)
class RowPrefetch:
    """How blocks with many passes load their rows of two tensors.

    enabled: prefetch the rows of the next pass into shared memory.
    blocks_per_sm: resident blocks per SM, which limits the registers per thread.
    """

    enabled: bool
    blocks_per_sm: int

    def defines(self) -> tuple[tuple[str, int], ...]:
        """The macros of kernels with many passes per block."""
        return (("PREFETCH", self.enabled), ("BLOCKS_PER_SM", self.blocks_per_sm))

    def shared_bytes(self, split: RowSplit) -> int:
        """Dynamic shared memory of a block: two tensors, two passes."""
        if not self.enabled:
            return 0
        vectors = split.rows_per_thread * split.vecs_per_thread * split.threads
        return 4 * vectors * _COPY_BYTES


@dataclass(frozen=True)
class NormConfig:
    """The launch configuration of a normalisation or its backward."""

    entry: str
    dtype: str
    residual: bool
    split: RowSplit
    num_blocks: int
    loads: str | None = None
    """Forward: the cache policy of its inputs."""
    prefetch: RowPrefetch | None = None
    """Backward, whose blocks make several passes."""
    full: bool = False
    """Backward: whether the split fits the row exactly (RowSplit.fits)."""
    bias: bool | None = None
    """None: the op has no bias."""

    def spec(self) -> KernelSpec:
        """The kernel variant for this configuration."""
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
        if self.prefetch is not None:
            defines = (*defines, *self.prefetch.defines(), ("FULL", self.full))
            shared_bytes = self.prefetch.shared_bytes(self.split)
        source = f"layers/{self.entry}.cu"
        return KernelSpec(source, self.entry, defines, self.split.threads, shared_bytes)


def plan_prefetch(split: RowSplit, access_bytes: int, sums: int, device: Device) -> RowPrefetch:
    """The most resident blocks that registers allow; for long rows, a prefetch of the next pass if
    it fits in shared memory.

    Blocks of short rows have enough loads in flight without it. sums: as in
    :func:`split_persistent_row`.
    """
    if split.lanes <= _WARP:
        return RowPrefetch(False, _PERSISTENT_THREADS // 2 // split.threads)
    blocks = max(1, _PERSISTENT_THREADS // sums // split.threads)
    prefetch = RowPrefetch(True, blocks)
    room = device.shared_bytes_per_sm // blocks - _STATIC_AND_SYSTEM_BYTES
    large = split.threads >= _MIN_PREFETCH_THREADS and access_bytes == _COPY_BYTES
    fits = large and prefetch.shared_bytes(split) <= room
    return prefetch if fits else replace(prefetch, enabled=False)


def input_cache(total_bytes: int, device: Device) -> str:
    """The LOADS macro of a kernel that reads each row once: its cache policy.

    "Kept" loads are the last that L2 evicts, so outputs are written back in order. "Cached", the
    default policy, is used if inputs and outputs mostly fit in L2, so that the outputs stay there.
    """
    return "Cached" if total_bytes <= 1.5 * device.l2_bytes else "Kept"
