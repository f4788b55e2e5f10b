"""The arguments of paged attention: arrays, and checks of layouts, lengths and block tables."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cukit.attention.flash._arguments import (
    ScoreOptions,
    check_kernel_layout,
    without_length,
)
from cukit.attention.flash._problem import Window
from cukit.attention.paged.cache_arrays import RecentKV, check_code_layout, check_equal_strides
from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    Described,
    check_array,
    check_same_dtype,
    empty,
    float16,
    float32,
    int32,
    is_gpu_array,
    namespace,
)
from cukit.core.counters import current_stream, is_captured
from cukit.core.scalars import check_flag
from cukit.errors import ArrayShapeError, ConfigError
from cukit.reference import paged_attention as reference

_OP = "paged_attention"
_STORED = (np.dtype(np.uint8), np.dtype(np.int8))
_CHECKED = os.environ.get("CUKIT_CHECKED", "") == "1"
"""The default of `checked` on the GPU."""


class PagedArrays(NamedTuple):
    """The arrays of a call. A cache is storage and, if quantised, scales and zero points."""

    q: Array
    k_cache: Array
    v_cache: Array
    k_scales: Array | None
    v_scales: Array | None
    block_table: Array
    seq_lens: Array
    sinks: Array | None
    out: Array | None
    cu_seqlens_q: Array | None = None
    k_zeros: Array | None = None  # zero points of int4
    v_zeros: Array | None = None
    recent_k: Array | None = None  # see RecentKV
    recent_v: Array | None = None
    rings: Array | None = None
    packed_lens: Array | None = None

    @property
    def batch(self) -> int:
        """Number of requests."""
        return int(self.q.shape[0] if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1)

    @property
    def recent(self) -> RecentKV | None:
        """The keys and values that are not in the cache's blocks."""
        if self.recent_k is None or self.recent_v is None:
            return None
        assert self.rings is not None
        assert self.packed_lens is not None
        return RecentKV(self.recent_k, self.recent_v, self.rings, self.packed_lens)


_ARRAYS = len(PagedArrays._fields)


class PagedScratch:
    """Scratch memory that launches of one stream share: arrays by name.

    An array that is replaced by a larger one, or released, is freed in stream order unless a
    captured graph has its address or it was allocated on another stream: then it is freed with this
    object. An array that is allocated during capture is zero only once the graph has run, so later
    launches do not share it.
    """

    __slots__ = ("_arrays", "_captured", "_captures", "_kept", "_streams")

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}
        self._streams: dict[str, int] = {}  # on which the arrays were allocated
        self._captured: set[str] = set()  # names of arrays whose addresses are in graphs
        self._kept: list[Array] = []
        self._captures = False

    def begin(self, like: Array) -> None:
        """Records whether the following launches are captured into a graph."""
        self._captures = is_captured(like)

    def take(
        self, like: Array, name: str, size: int, dtype: npt.DTypeLike, *, zeros: bool = True
    ) -> Array:
        """An array of one axis with at least `size` elements, in the memory space of `like`.

        zeros: new arrays are zero.
        """
        found = self._arrays.get(name)
        if found is None or found.size < size:
            new = namespace(like).zeros(size, dtype) if zeros else empty(like, (size,), dtype)
            if self._captures:
                self._kept.append(new)
                return new
            self._drop(like, name)
            found = self._arrays[name] = new
            self._streams[name] = current_stream(like)
        elif self._captures:
            self._captured.add(name)
        return found

    def release(self, like: Array, *names: str) -> bool:
        """Frees these arrays, except those whose addresses are in graphs. Returns whether any array
        was freed."""
        free = [name for name in names if name in self._arrays and name not in self._captured]
        for name in free:
            self._drop(like, name)
        return bool(free)

    def _drop(self, like: Array, name: str) -> None:
        """Removes an array. It is freed in stream order if it was allocated on the current stream
        and no graph has its address, otherwise with this object."""
        found = self._arrays.pop(name, None)
        if found is None:
            return
        if name in self._captured or self._streams[name] != current_stream(like):
            self._kept.append(found)
        self._captured.discard(name)


COPIES = "keys", "values", "table"
"""Scratch arrays that hold copies of keys and values: the largest ones."""


def take(
    scratch: PagedScratch | None,
    like: Array,
    name: str,
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
) -> Array:
    """An array of `scratch` with this shape, or a new one if there is no scratch memory; not
    zeroed."""
    if scratch is None:
        return empty(like, shape, dtype)
    size = math.prod(shape)
    return scratch.take(like, name, size, dtype, zeros=False)[:size].reshape(shape)


def check_arrays(arrays: PagedArrays, cache_format: str, options: ScoreOptions) -> None:
    """Checks everything that the reference requires, except the contents of the arrays."""
    q, k_cache, v_cache, k_scales, v_scales, block_table, seq_lens, sinks, out, ends, *_ = arrays
    options.check(_OP)
    ndim = 4 if ends is None else 3
    check_array(_OP, "q", q, dtypes=FLOAT_DTYPES, ndim=ndim, contiguous=False)
    *_, heads_q, head_dim = q.shape
    if ends is not None:
        check_array(_OP, "cu_seqlens_q", ends, dtypes=(int32,), ndim=1)
        if not ends.size:
            raise ArrayShapeError(
                f"{_OP}: cu_seqlens_q must have batch + 1 entries, got shape {ends.shape}"
            )
    batch = arrays.batch
    stored = _STORED if cache_format else FLOAT_DTYPES
    per_byte = 2 if cache_format == "int4" else 1
    if head_dim % per_byte:
        raise ArrayShapeError(f"{_OP}: head_dim of q must be even for int4, got {head_dim}")
    shape = (None, None, None, head_dim // per_byte)
    check_array(_OP, "k_cache", k_cache, dtypes=stored, shape=shape, contiguous=False)
    shape = (*k_cache.shape[:-1], None)
    check_array(_OP, "v_cache", v_cache, dtypes=stored, shape=shape, contiguous=False)
    if not cache_format:
        check_same_dtype(_OP, q=q, k_cache=k_cache, v_cache=v_cache)
    for name, scales in (("k_cache.scales", k_scales), ("v_cache.scales", v_scales)):
        if scales is not None:
            dtype = float16 if cache_format == "int4" else float32
            check_array(_OP, name, scales, dtypes=(dtype,), ndim=4, contiguous=False)
    for name, scales, zeros in (
        ("k_cache", k_scales, arrays.k_zeros),
        ("v_cache", v_scales, arrays.v_zeros),
    ):
        if zeros is not None and scales is not None:
            check_equal_strides(_OP, name, scales, zeros)
    _, block_size, heads_kv, _ = k_cache.shape
    if not heads_kv or not heads_q or heads_q % heads_kv:
        raise ArrayShapeError(
            f"{_OP}: the heads of k_cache (axis 2) must divide those of q, got {heads_kv} and "
            f"{heads_q}"
        )
    if not block_size or not head_dim or not 0 < v_cache.shape[-1] <= k_cache.shape[-1]:
        raise ArrayShapeError(
            f"{_OP}: block_size and head_dim must not be 0, and v_cache's head_dim at most "
            f"k_cache's, got {k_cache.shape} and {v_cache.shape}"
        )
    recent = arrays.recent
    if recent is not None:
        if cache_format != "int4":
            found = cache_format or k_cache.dtype
            raise ConfigError(f"{_OP}: recent requires int4 caches, got {found}")
        recent.check(_OP, q, head_dim, per_byte * v_cache.shape[-1], heads_kv, batch)
    rows = (batch, None)
    check_array(_OP, "block_table", block_table, dtypes=(int32,), shape=rows, contiguous=False)
    check_array(_OP, "seq_lens", seq_lens, dtypes=(int32,), shape=(batch,))
    if sinks is not None:
        wide = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
        check_array(_OP, "sinks", sinks, dtypes=(wide,), shape=(heads_q,))
    if out is not None:
        shape = (*q.shape[:-1], per_byte * v_cache.shape[-1])
        check_array(_OP, "out", out, dtypes=(q.dtype,), shape=shape, contiguous=False)


def paged_plan_key(key: tuple[Any, ...]) -> Hashable:
    """`key` of a call without the numbers of requests, queries and table columns, which change from
    step to step.

    key: the device, the element format of the cache, ScoreOptions, batch_invariant, PagedArrays.
    """
    settings, given = key[:-_ARRAYS], PagedArrays(*key[-_ARRAYS:])
    q, table, lengths, ends = given.q, given.block_table, given.seq_lens, given.cu_seqlens_q
    if q is None or table is None or lengths is None or len(q[0]) != (4 if ends is None else 3):
        return key
    batch = q[0][0] if ends is None else math.prod(ends[0]) - 1
    lists = (lengths, batch), (ends, batch + 1), (given.rings, batch), (given.packed_lens, batch)
    short = step_key(batch, q, given.out, table, *lists)
    if short is None:
        return key
    caches = given.k_cache, given.v_cache, given.k_scales, given.v_scales
    others = given.sinks, given.k_zeros, given.v_zeros, given.recent_k, given.recent_v
    return settings, short, caches, others


def step_key(
    batch: int,
    q: Described,
    out: Described | None,
    table: Described,
    *lists: tuple[Described | None, int],
) -> Hashable | None:
    """The key of the described arrays of a step without the numbers of requests, queries and table
    columns. None where these numbers may decide whether the call passes the checks.

    lists: arrays of one axis, each with the number of entries that it must have.
    """
    rows = q[0][-3:-2]
    queries = [without_length(each, rows) for each in (q, out) if each is not None]
    if None in queries or (out is not None and out[0][:-2] != q[0][:-2]):
        return None
    if batch < 1 or len(table[0]) != 2 or table[0][0] != batch:
        return None
    for each, entries in lists:
        if each is not None and each[0] != (entries,):
            return None
    return (
        len(q[0]),
        *[each and each[1:] for each in queries],  # without the batch
        _without_extents(table),
        *[None if each is None else _without_extents(each) for each, _ in lists],
    )


def _without_extents(array: Described) -> tuple[Any, ...]:
    shape, strides, dtype, misalignment, place = array
    return strides[-1] if shape[-1] > 1 else dtype.itemsize, dtype, misalignment, place


def check_layout(arrays: PagedArrays, cache_format: str) -> None:
    """Checks what the kernel requires beyond the reference."""
    q, k_cache, v_cache, out = arrays.q, arrays.k_cache, arrays.v_cache, arrays.out
    if not cache_format:
        check_kernel_layout(_OP, q=q, k_cache=k_cache, v_cache=v_cache, out=out)
        return
    check_kernel_layout(_OP, q=q, out=out)
    check_code_layout(_OP, k_cache, v_cache)


def is_checked(op: str, checked: bool | None) -> bool:
    """Whether a call on the GPU checks its lengths and block table."""
    if checked is None:
        return _CHECKED
    check_flag(op, "checked", checked)
    return bool(checked)


def check_contents(op: str, arrays: PagedArrays, options: ScoreOptions, *, checked: bool) -> None:
    """Checks the contents of cu_seqlens_q, seq_lens, the block table and the ring buffers.

    GPU arrays are checked only if `checked`, which synchronises.
    """
    seq_lens, ends = arrays.seq_lens, arrays.cu_seqlens_q
    seq_q: int | Array = arrays.q.shape[1]
    if is_gpu_array(seq_lens) and not checked:
        return
    if ends is not None:
        rows = arrays.q.shape[0]
        counts = namespace(ends).diff(ends)
        if int(ends[0]) != 0 or int(ends[-1]) != rows or bool((counts < 0).any()):
            raise ConfigError(
                f"{op}: cu_seqlens_q must be non-decreasing from 0 to {rows}, the rows of q, "
                f"got {ends}"
            )
        seq_q = counts
    check_table(
        *(op, arrays.k_cache, arrays.block_table, seq_lens, seq_q, options.window_size),
        recent=arrays.recent,
        checked=checked,
    )


def check_table(
    op: str,
    k_cache: Array,
    block_table: Array,
    seq_lens: Array,
    seq_q: int | Array,
    window_size: Window | None = None,
    *,
    recent: RecentKV | None = None,
    checked: bool = False,
) -> None:
    """Checks lengths, block table and ring buffers against the cache.

    GPU arrays are checked only if `checked`, which synchronises.
    """
    if is_gpu_array(seq_lens) and not checked:
        return
    xp = namespace(seq_lens)
    if is_captured(seq_lens):
        raise ConfigError(
            f"{op}: checked calls synchronise with the GPU, which is not possible during graph "
            "capture; capture with checked=False"
        )
    num_blocks, block_size = k_cache.shape[:2]
    room = block_table.shape[1] * block_size
    in_cache = seq_lens
    if recent is not None:
        in_cache = xp.minimum(recent.packed_lens, seq_lens)
        _check_rings(op, recent, room, seq_lens)
        room += recent.k.shape[1]
    wrong = (seq_lens < 0) | (seq_lens > room)
    if wrong.any():
        b = int(wrong.argmax())
        raise ConfigError(
            f"{op}: seq_lens must be from 0 to {room}, the keys of max_blocks blocks"
            f"{' and a ring buffer' if recent is not None else ''}, but "
            f"seq_lens[{b}] is {int(seq_lens[b])}"
        )
    first = reference.first_key(seq_lens, seq_q, window_size)[:, None]
    starts = xp.arange(block_table.shape[1]) * block_size
    used = (starts < in_cache[:, None]) & (starts + block_size > first)
    wrong = used & ((block_table < 0) | (block_table >= num_blocks))
    if wrong.any():
        b, entry = divmod(int(wrong.argmax()), block_table.shape[1])
        raise ConfigError(
            f"{op}: block_table[{b}, {entry}] is {int(block_table[b, entry])}, but the cache has "
            f"{num_blocks} blocks"
        )


def _check_rings(op: str, recent: RecentKV, room: int, seq_lens: Array) -> None:
    num_rings, num_rows = recent.k.shape[:2]
    wrong = (recent.packed_lens < 0) | (recent.packed_lens > room)
    wrong |= seq_lens - recent.packed_lens > num_rows
    if wrong.any():
        b = int(wrong.argmax())
        raise ConfigError(
            f"{op}: recent.packed_lens must be from 0 to {room}, the keys of max_blocks blocks, "
            f"and at least seq_lens - {num_rows}, the rows of a ring buffer, but packed_lens[{b}] "
            f"is {int(recent.packed_lens[b])} and seq_lens[{b}] is {int(seq_lens[b])}"
        )
    wrong = (seq_lens > recent.packed_lens) & ((recent.rings < 0) | (recent.rings >= num_rings))
    if wrong.any():
        b = int(wrong.argmax())
        raise ConfigError(
            f"{op}: recent.rings must be from 0 to {num_rings - 1}, but rings[{b}] is "
            f"{int(recent.rings[b])}"
        )
