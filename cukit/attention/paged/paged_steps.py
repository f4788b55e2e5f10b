"""Paged attention for the repeated steps of a decode loop, planned once per step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cukit.attention.flash._arguments import score_options
from cukit.attention.flash._problem import Window
from cukit.attention.paged._paged_arguments import (
    COPIES,
    PagedArrays,
    PagedScratch,
    check_table,
    is_checked,
)
from cukit.attention.paged.cache_arrays import RecentKV, stored_parts
from cukit.attention.paged.paged import attend, reserve
from cukit.core.arrays import Array, adopt, check_array, describe, int32, is_gpu_array, namespace
from cukit.core.overlap import check_overlap
from cukit.core.scalars import check_flag, check_integer
from cukit.errors import ArrayShapeError, ConfigError

_OP = "PagedAttention"


class PagedAttention:
    """:func:`paged_attention` for a decode loop: `plan` once per step, `run` once per layer.

    This object owns the block table and the lengths of a step, and the kernel's scratch memory. A
    captured graph of `run` calls can therefore be replayed after any `plan` with the same number of
    requests. With `out`, replays write only to memory of the caller and of this object.

    Args:
        k_caches: the cache of each layer, as k_cache of :func:`paged_attention`: a sequence, or an
            array with layers along its first axis, e.g. `KVCacheManager.slab.array[0]`.
        v_caches: as k_caches.
        num_heads_q: number of query heads.
        max_batch: maximum requests per step.
        max_blocks: maximum blocks per request.
        dtype: of the queries; default: the caches' dtype. Required with quantised caches.
        recent: with int4 caches, the ring buffers of each layer, k and v, each as k_caches; see
            :class:`RecentKV`.
        causal, window_size, softcap, sinks, scale, batch_invariant, checked: as for
            :func:`paged_attention`. If `checked`, `plan` checks block tables against the cache.

    Raises:
        ArrayError, ConfigError: as :func:`paged_attention`, most of them in the constructor.

    On the GPU the constructor loads the kernels of steps of one query and allocates their memory;
    the first `plan` of another number of requests or queries does so for that step. Copies of keys
    and values (see :func:`paged_attention`) belong to steps of one number of queries: a `plan` with
    another number frees them in stream order, unless a captured graph uses them. Otherwise `plan`
    only enqueues copies, and `run` only kernels, on CuPy's current stream, without synchronisation.
    Use one stream at a time.

    >>> import numpy as np, cukit as ck
    >>> k = np.zeros((1, 2, 4, 1, 8), np.float32)    # one layer, two blocks of four keys
    >>> v = np.arange(64, dtype=np.float32).reshape(1, 2, 4, 1, 8)
    >>> attention = ck.PagedAttention(k, v, num_heads_q=1, max_batch=4, max_blocks=2)
    >>> attention.plan([[1, 0]], [5])
    >>> attention.run(np.zeros((1, 1, 1, 8), np.float32))[0, 0, 0, :2]
    array([35.2, 36.2], dtype=float32)
    """

    def __init__(
        self,
        k_caches: Sequence[Array] | Array,
        v_caches: Sequence[Array] | Array,
        *,
        num_heads_q: int,
        max_batch: int,
        max_blocks: int,
        dtype: Any = None,
        recent: tuple[Sequence[Array] | Array, Sequence[Array] | Array] | None = None,
        causal: bool = True,
        window_size: Window | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
        scale: float | None = None,
        batch_invariant: bool = False,
        checked: bool | None = None,
    ) -> None:
        sizes = {"num_heads_q": num_heads_q, "max_batch": max_batch, "max_blocks": max_blocks}
        for name, value in sizes.items():
            check_integer(_OP, name, value, least=1, most=2**31 - 1)
        check_flag(_OP, "batch_invariant", batch_invariant)
        if len(k_caches) != len(v_caches) or not len(k_caches):
            raise ArrayShapeError(
                f"{_OP}: k_caches and v_caches must have the same number of layers, at least one, "
                f"got {len(k_caches)} and {len(v_caches)}"
            )
        self._checked = is_checked(_OP, checked)
        self._batch_invariant = bool(batch_invariant)
        self._options = score_options(_OP, causal, window_size, softcap, scale, None, None)
        self._layers = [stored_parts(_OP, k, v) for k, v in zip(k_caches, v_caches, strict=True)]
        cache_format, k_cache, *_ = self._layers[0]
        self._recent = None if recent is None else [*zip(*recent, strict=True)]
        if self._recent is not None and len(self._recent) != len(self._layers):
            raise ArrayShapeError(
                f"{_OP}: recent and k_caches must have the same number of layers, got "
                f"{len(self._recent)} and {len(self._layers)}"
            )
        (self._sinks,) = adopt(_OP, sinks)
        if dtype is None and cache_format:
            raise ConfigError(f"{_OP}: quantised caches require the dtype of the queries")
        self.dtype = np.dtype(k_cache.dtype) if dtype is None else np.dtype(dtype)
        self.num_heads_q = int(num_heads_q)
        self._table: Array = namespace(k_cache).zeros((int(max_batch), int(max_blocks)), int32)
        self._lengths: Array = namespace(k_cache).zeros(int(max_batch), int32)
        self._rings: Array | None = None
        self._packed: Array | None = None
        if recent is not None:
            self._rings, self._packed = (
                namespace(k_cache).zeros(int(max_batch), int32) for _ in range(2)
            )
        self._batch, self._seq_len_q = int(max_batch), 1
        kinds = [
            describe(*parts, *(self._recent[layer] if self._recent else ()))
            for layer, parts in enumerate(self._layers)
        ]
        self._kinds = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        """The index of one layer for each combination of format, shape and strides."""
        self._scratch = PagedScratch()
        self._reserved: set[tuple[int, int]] = set()
        self._reserve(self._batch, 1)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self._layers)

    def plan(
        self,
        block_table: Any,
        seq_lens: Any,
        *,
        seq_len_q: int = 1,
        rings: Any = None,
        packed_lens: Any = None,
    ) -> None:
        """Sets the requests of the following runs.

        Args:
            block_table: int32 [batch, blocks], at most max_batch and max_blocks; on the host or on
                the device.
            seq_lens: int32 [batch], keys of each request, including those of the step's queries.
            seq_len_q: queries per request.
            rings, packed_lens: int32 [batch], with `recent`.

        Raises:
            ArrayError: invalid dtype or shape.
            ConfigError: as :func:`paged_attention`, if `checked` or on the CPU; the previous plan
                stays valid. Host arrays are checked without synchronisation.
        """
        check_integer(_OP, "seq_len_q", seq_len_q, least=1)
        table, lengths = (_integers(array) for array in (block_table, seq_lens))
        check_array(_OP, "block_table", table, dtypes=(int32,), ndim=2, contiguous=None)
        check_array(
            _OP, "seq_lens", lengths, dtypes=(int32,), shape=table.shape[:1], contiguous=None
        )
        batch, blocks = table.shape
        if batch > self._table.shape[0] or blocks > self._table.shape[1]:
            raise ArrayShapeError(
                f"{_OP}: block_table must have at most max_batch x max_blocks = "
                f"{self._table.shape} entries, got {table.shape}"
            )
        self._reserve(batch, int(seq_len_q))
        xp = namespace(self._table)
        newest: list[Array] = []
        if self._recent is not None:
            for name, given in (("rings", rings), ("packed_lens", packed_lens)):
                newest.append(_integers(given))
                check_array(
                    _OP, name, newest[-1], dtypes=(int32,), shape=lengths.shape, contiguous=None
                )
        if is_gpu_array(table) != is_gpu_array(lengths):
            table, lengths = xp.asarray(table), xp.asarray(lengths)
        if self._checked or not is_gpu_array(self._table):
            k_cache, window = self._layers[0].k, self._options.window_size
            recent = None
            if self._recent is not None:
                here = namespace(lengths)
                recent = RecentKV(*self._recent[0], *(here.asarray(each) for each in newest))
            check_table(
                *(_OP, k_cache, table, lengths, seq_len_q, window), recent=recent, checked=True
            )
        self._table[:batch, :blocks] = xp.asarray(table)
        self._lengths[:batch] = xp.asarray(lengths)
        for memory, values in zip((self._rings, self._packed), newest, strict=False):
            assert memory is not None
            memory[:batch] = xp.asarray(values)
        self._batch, self._seq_len_q = batch, int(seq_len_q)

    def run(
        self, q: Array, layer: int = 0, *, return_lse: bool = False, out: Array | None = None
    ) -> Array | tuple[Array, Array]:
        """Attention of a layer over the requests of the latest `plan`.

        q: [batch, seq_len_q, num_heads_q, head_dim] as planned. The other arguments and the result
        are those of :func:`paged_attention`.
        """
        check_integer(_OP, "layer", layer, least=0, most=self.num_layers - 1)
        check_flag(_OP, "return_lse", return_lse)
        q, out = adopt(_OP, q, out)
        expected = (self._batch, self._seq_len_q, self.num_heads_q)
        if q.shape[:-1] != expected or q.dtype != self.dtype:
            raise ArrayShapeError(
                f"{_OP}: q must be {self.dtype} of shape {(*expected, 'head_dim')} as planned, got "
                f"{q.dtype} of {q.shape}"
            )
        arrays = self._arrays(q, layer, out)
        check_overlap(_OP, out, q=q, k_cache=arrays.k_cache, v_cache=arrays.v_cache)
        flags = self._batch_invariant, False, bool(return_lse)  # `plan` has checked the contents
        self._scratch.begin(q)
        return attend(arrays, self._layers[layer][0], self._options, *flags, self._scratch)

    def _reserve(self, batch: int, seq_len_q: int) -> None:
        """Loads the kernels for steps of this shape and allocates their memory, once.

        Copies of keys and values are freed when the number of queries changes.
        """
        self._scratch.begin(self._table)
        if seq_len_q != self._seq_len_q and self._scratch.release(self._table, *COPIES):
            self._reserved.clear()
        # First the largest number of requests, so that other numbers need little more memory.
        for requests in (self._table.shape[0], batch):
            if (requests, seq_len_q) in self._reserved:
                continue
            for layer in self._kinds:
                cache_format, k_cache, *_ = self._layers[layer]
                width = k_cache.shape[-1] * (2 if cache_format == "int4" else 1)
                shape = requests, seq_len_q, self.num_heads_q, width
                q = _described(self._table, shape, self.dtype)
                flags = self._batch_invariant, self._scratch
                reserve(self._arrays(q, layer), cache_format, self._options, *flags)
            self._reserved.add((requests, seq_len_q))

    def _arrays(self, q: Array, layer: int, out: Array | None = None) -> PagedArrays:
        _, k_cache, k_scales, v_cache, v_scales, *zeros = self._layers[layer]
        batch = q.shape[0]
        step = self._table[:batch], self._lengths[:batch]
        arrays = PagedArrays(
            *(q, k_cache, v_cache, k_scales, v_scales, *step, self._sinks, out, None, *zeros)
        )
        if self._recent is None or self._rings is None or self._packed is None:
            return arrays
        k, v = self._recent[layer]
        rings, packed = self._rings[:batch], self._packed[:batch]
        return arrays._replace(recent_k=k, recent_v=v, rings=rings, packed_lens=packed)


def _integers(array: Any) -> Array:
    """Converts lists to int32 arrays; arrays keep their dtype."""
    if isinstance(array, (list, tuple)):
        array = np.asarray(array, np.int32)
    (adopted,) = adopt(_OP, array)
    return adopted


def _described(like: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A C-contiguous array of this shape without memory for it: for planning, not to be read."""
    if is_gpu_array(like):
        return type(like)(shape, dtype, memptr=like.data)
    strides = [dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return np.lib.stride_tricks.as_strided(np.empty(1, dtype), shape, strides)
