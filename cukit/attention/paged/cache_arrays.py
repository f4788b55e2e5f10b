"""Paged KV caches as arguments: their storage, scales and zero points, and the checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cukit.core.arrays import (
    ACCESS_BYTES,
    Array,
    address_of,
    check_array,
    float16,
    int32,
)
from cukit.core.quantized_array import QuantizedArray
from cukit.errors import ArrayDtypeError, ArrayError, ArrayLayoutError, ArrayShapeError, ConfigError

CODES = {"": 0, "float8_e4m3": 1, "int8": 2, "int4": 3}
"""Element formats of a cache, and the kernels' numbers for them; "" is q's dtype."""

GROUP_ROWS = (32, 64)
"""Supported group sizes: keys of an int4 cache that share a channel's scale."""


@dataclass(frozen=True)
class RecentKV:
    """The newest keys and values of each request, not yet quantised; the int4 cache has the rest.

    Keys of request `b` from `packed_lens[b]` on are not in the blocks of the cache: key `j` is row
    `j % num_rows` of ring buffer `rings[b]`. `append_kv` writes them there, at slot
    `rings[b] * num_rows + j % num_rows`; `pack_kv` quantises whole groups of them.

    k: dtype of q, [num_rings, num_rows, num_heads_kv, head_dim], any strides with a contiguous last
        axis.
    v: as k, with value_dim.
    rings: int32 [batch], the ring buffer of each request; all distinct.
    packed_lens: int32 [batch], multiples of the group size of k_cache, at least the request's
        length minus num_rows.
    """

    k: Array
    v: Array
    rings: Array
    packed_lens: Array

    def check(self, op: str, q: Array, k_width: int, v_width: int, heads: int, batch: int) -> None:
        """Checks everything but the contents of rings and packed_lens."""
        shape: tuple[int | None, ...] = (None, None, heads, k_width)
        check_array(op, "recent.k", self.k, dtypes=(q.dtype,), shape=shape, contiguous=False)
        shape = (*self.k.shape[:3], v_width)
        check_array(op, "recent.v", self.v, dtypes=(q.dtype,), shape=shape, contiguous=False)
        check_array(op, "recent.rings", self.rings, dtypes=(int32,), shape=(batch,))
        check_array(op, "recent.packed_lens", self.packed_lens, dtypes=(int32,), shape=(batch,))
        if not self.k.shape[1]:
            raise ArrayShapeError(
                f"{op}: the ring buffers of recent.k must have rows, got shape {self.k.shape}"
            )


def recent_arrays(op: str, recent: RecentKV | None) -> tuple[Any, Any, Any, Any]:
    """The four arrays of `recent`; all None if it is None."""
    if recent is None:
        return None, None, None, None
    if not isinstance(recent, RecentKV):
        raise ConfigError(f"{op}: recent must be a RecentKV or None, got {type(recent).__name__}")
    return recent.k, recent.v, recent.rings, recent.packed_lens


class CacheParts(NamedTuple):
    """The arrays of a key and a value cache.

    cache_format: the element format; "" for a float dtype. k, v: storage. Scales and zero points
    (int4) are None where absent.
    """

    cache_format: str
    k: Any
    k_scales: Any
    v: Any
    v_scales: Any
    k_zeros: Any = None
    v_zeros: Any = None


def stored_parts(op: str, k_cache: Any, v_cache: Any) -> CacheParts:
    """The parts of caches of any format."""
    if not (isinstance(k_cache, QuantizedArray) or isinstance(v_cache, QuantizedArray)):
        # Fast path: skips the dtype-name lookup.
        return CacheParts("", k_cache, None, v_cache, None)
    groups = group_parts(op, k_cache, v_cache)
    if groups is None:
        return CacheParts(*cache_parts(op, k_cache, v_cache))
    k, k_scales, k_zeros, v, v_scales, v_zeros = groups
    return CacheParts("int4", k, k_scales, v, v_scales, k_zeros, v_zeros)


def cache_parts(op: str, k_cache: Any, v_cache: Any) -> tuple[str, Any, Any, Any, Any]:
    """The format of both caches ("" for a float dtype), their storage and scales; rejects int4."""
    quantized = [isinstance(cache, QuantizedArray) for cache in (k_cache, v_cache)]
    if not any(quantized):
        return "", k_cache, None, v_cache, None
    names = [getattr(getattr(cache, "dtype", None), "name", "") for cache in (k_cache, v_cache)]
    if all(quantized) and names == ["int4", "int4"]:
        raise ArrayDtypeError(
            f"{op}: int4 caches are supported by paged_attention, PagedAttention and pack_kv only"
        )
    if not all(quantized) or names[0] != names[1] or names[0] not in CODES:
        raise ArrayDtypeError(
            f"{op}: k_cache and v_cache must both be float8_e4m3, both int8, or both of one "
            f"float dtype, got {names[0]} and {names[1]}"
        )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.zero_points is not None:
            raise ArrayError(f"{op}: {name} has zero points, which are supported for int4 only")
        if cache.scales is not None and cache.scales.shape[-1] != 1:
            raise ArrayShapeError(
                f"{op}: the scales of {name} must be shared along head_dim, got shape "
                f"{cache.scales.shape}"
            )
    return names[0], k_cache.storage, k_cache.scales, v_cache.storage, v_cache.scales


def group_parts(op: str, k_cache: Any, v_cache: Any) -> tuple[Any, ...] | None:
    """Storage, scales and zero points of keys, then of values, if both caches are int4; else None.

    Keys have one scale per channel and group of rows, values one per row and head (KIVI).
    """
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    if any(getattr(getattr(c, "dtype", None), "name", "") != "int4" for c in caches.values()):
        return None
    for (name, cache), axis in zip(caches.items(), (1, 3), strict=True):
        if cache.scales is None or cache.zero_points is None or cache.axis != (axis,):
            raise ArrayError(
                f"{op}: int4 {name} must have scales and zero points shared along axis {axis}, "
                f"got {cache!r}"
            )
        if {cache.scales.dtype, cache.zero_points.dtype} != {float16}:
            raise ArrayDtypeError(
                f"{op}: scales and zero points of {name} must be float16, got {cache.scales.dtype} "
                f"and {cache.zero_points.dtype}"
            )
    if k_cache.group_size[0] not in GROUP_ROWS or k_cache.shape[1] % k_cache.group_size[0]:
        raise ArrayShapeError(
            f"{op}: int4 k_cache must have groups of {' or '.join(map(str, GROUP_ROWS))} rows "
            f"that divide block_size, got {k_cache.group_size[0]} of {k_cache.shape[1]}"
        )
    if v_cache.scales.shape[-1] != 1:
        raise ArrayShapeError(
            f"{op}: int4 v_cache must have one scale per row and head, got {v_cache!r}"
        )
    return (
        *(k_cache.storage, k_cache.scales, k_cache.zero_points),
        *(v_cache.storage, v_cache.scales, v_cache.zero_points),
    )


def check_group_layout(op: str, **arrays: Array) -> None:
    """Checks the layout of the scales and zero points of int4 caches: contiguous along head_dim for
    keys and along rows for values, and 16-byte aligned."""
    for name, array in arrays.items():
        axis = 1 if name.startswith("v_cache") else 3
        extents = enumerate(zip(array.strides[:3], array.shape[:3], strict=True))
        outer = [stride for i, (stride, extent) in extents if i != axis and extent > 1]
        contiguous = array.strides[axis] == array.itemsize or array.shape[axis] == 1
        if not contiguous or any(step % ACCESS_BYTES for step in (address_of(array), *outer)):
            raise ArrayLayoutError(
                f"{op}: {name} must be contiguous along axis {axis} on the GPU, with a start and "
                f"other strides that are multiples of {ACCESS_BYTES} bytes, got strides "
                f"{array.strides}"
            )


def check_equal_strides(op: str, name: str, scales: Array, zeros: Array) -> None:
    """Checks that the scales and zero points of an int4 cache have the same strides."""
    if scales.strides != zeros.strides:
        raise ArrayLayoutError(
            f"{op}: scales and zero points of {name} must have the same strides, got "
            f"{scales.strides} and {zeros.strides}"
        )


def check_code_layout(op: str, k_cache: Array, v_cache: Array) -> None:
    """Checks the size and alignment of the caches' codes."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.shape[-1] % ACCESS_BYTES:
            raise ArrayShapeError(
                f"{op}: the codes of a head of {name} must take a multiple of {ACCESS_BYTES} bytes "
                f"on the GPU, got {cache.shape[-1]}"
            )
        if any(step % ACCESS_BYTES for step in (address_of(cache), *cache.strides[:-1])):
            raise ArrayLayoutError(
                f"{op}: the start and the strides of {name} must be multiples of {ACCESS_BYTES} "
                f"bytes on the GPU, got strides {cache.strides}"
            )


def scale_strides(scales: Array | None) -> tuple[int, int, int]:
    """Strides of blocks, rows and heads, in elements; 0 along axes that share a scale."""
    if scales is None:
        return 0, 0, 0
    block, row, head = (
        0 if extent == 1 else stride // scales.itemsize
        for stride, extent in zip(scales.strides[:3], scales.shape[:3], strict=True)
    )
    return block, row, head
