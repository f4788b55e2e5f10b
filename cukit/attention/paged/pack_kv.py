"""Quantising whole groups of new keys and values to the int4 codes of a cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cukit.attention.flash._arguments import (
    ATTENTION_DTYPES,
    PARAMETERS,
    check_kernel_layout,
    strides_of,
)
from cukit.attention.paged.cache_arrays import (
    GROUP_ROWS,
    check_code_layout,
    check_equal_strides,
    check_group_layout,
    group_parts,
    scale_strides,
)
from cukit.core.arrays import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    Array,
    adopt,
    check_array,
    runs_kernel,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.overlap import check_overlap
from cukit.core.parameters import parameter_structs
from cukit.core.quantized_array import QuantizedArray
from cukit.errors import ArrayDtypeError, ArrayShapeError
from cukit.reference import pack_kv as reference
from cukit.registry import register

_OP = "pack_kv"
_THREADS = 128
_CHUNK = 8
_MAX_WIDTH = 256
_STORED = (np.dtype(np.uint8),)


class PackArrays(NamedTuple):
    """The arrays of a call. A cache is its codes, scales and zero points."""

    k: Array
    v: Array
    sources: Array
    targets: Array
    k_cache: Array
    v_cache: Array
    k_scales: Array
    k_zeros: Array
    v_scales: Array
    v_zeros: Array


def pack_kv(k: Array, v: Array, k_cache: Any, v_cache: Any, sources: Array, targets: Array) -> None:
    """Quantises full groups of keys and values to int4 codes of a cache, in place.

    Groups are runs of `group_size` rows, counted over all blocks of an array. Group `sources[i]` of
    k and v is written to group `targets[i]` of the caches. Scales and zero points (for keys per
    channel and group, for values per token and head) map the range from the minimum to the maximum
    onto the codes.

    Args:
        k: float16|bfloat16 [num_source_blocks, source_rows, num_heads_kv, head_dim], any strides
            with a contiguous last axis, e.g. the ring buffers of a :class:`RecentKV`; source_rows
            is a multiple of the group size. On the CPU float32|float64 too; on the GPU, head_dim
            and value_dim are multiples of 32 up to 256.
        v: as k, with value_dim.
        k_cache: QuantizedArray of int4 [num_blocks, block_size, num_heads_kv, head_dim] as
            :func:`paged_attention` reads it: float16 scales and zero points along axis 1 in groups
            of 32 or 64.
        v_cache: as k_cache, its scales and zero points along axis 3, one per row and head.
        sources: int32|int64 [num_groups]. Groups below 0 or outside k are skipped.
        targets: as sources, without duplicates.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.

    One launch on CuPy's current stream; computes in float32 and is deterministic.
    Paper: Liu et al., KIVI, arXiv:2402.02750.

    >>> import numpy as np, cukit as ck
    >>> cache = ck.KVCacheManager(4, 64, num_heads_kv=1, head_dim=32, dtype=ck.int4, num_rings=1)
    >>> k, v = np.random.default_rng(0).standard_normal((2, 1, 64, 1, 32)).astype(np.float16)
    >>> ck.pack_kv(k, v, cache.keys(0), cache.values(0), np.array([0]), np.array([2]))
    >>> bool(abs(cache.keys(0).dense()[2] - k[0]).max() < 0.3)
    True
    """
    k_cache, v_cache = _grouped(k_cache, v_cache)
    arrays = PackArrays(*adopt(_OP, k, v, sources, targets, *_parts(k_cache, v_cache)))
    inputs = {name: getattr(arrays, name) for name in ("k", "v", "sources", "targets")}
    written = PackArrays._fields[4:]
    for i, name in enumerate(written):
        others = {other: getattr(arrays, other) for other in written[:i]}
        check_overlap(_OP, getattr(arrays, name), name=name, **inputs, **others)
    if not runs_kernel(_OP, *arrays):
        _check(arrays)
        reference.pack_kv(*(arrays.k, arrays.v, k_cache, v_cache, arrays.sources, arrays.targets))
        return
    launch = _prepare(*arrays)
    if arrays.sources.size:
        launch(*arrays)


def _grouped(k_cache: Any, v_cache: Any) -> tuple[QuantizedArray, QuantizedArray]:
    if group_parts(_OP, k_cache, v_cache) is None:
        names = [getattr(each, "dtype", type(each).__name__) for each in (k_cache, v_cache)]
        raise ArrayDtypeError(
            f"{_OP}: k_cache and v_cache must be QuantizedArrays of int4, got {names[0]} and "
            f"{names[1]}"
        )
    return k_cache, v_cache


def _parts(k_cache: QuantizedArray, v_cache: QuantizedArray) -> tuple[Any, ...]:
    return (
        *(k_cache.storage, v_cache.storage, k_cache.scales, k_cache.zero_points),
        *(v_cache.scales, v_cache.zero_points),
    )


def _check(arrays: PackArrays) -> None:
    """Checks everything but the contents of the arrays."""
    k, v, sources, targets, k_cache, v_cache, k_scales, *_ = arrays
    heads, k_bytes = k_cache.shape[2:]
    shape: tuple[int | None, ...] = (None, None, heads, 2 * k_bytes)
    check_array(_OP, "k", k, dtypes=FLOAT_DTYPES, shape=shape, contiguous=False)
    shape = (*k_cache.shape[:3], None)
    check_array(_OP, "v_cache", v_cache, dtypes=_STORED, shape=shape, contiguous=False)
    shape = (*k.shape[:3], 2 * v_cache.shape[-1])
    check_array(_OP, "v", v, dtypes=(k.dtype,), shape=shape, contiguous=False)
    size = k_cache.shape[1] // k_scales.shape[1]
    if k.shape[1] % size:
        raise ArrayShapeError(
            f"{_OP}: the rows of a block of k must be a multiple of the group size {size}, got "
            f"{k.shape}"
        )
    check_array(_OP, "sources", sources, dtypes=INDEX_DTYPES, ndim=1)
    check_array(_OP, "targets", targets, dtypes=(sources.dtype,), shape=sources.shape)


@dataclass(frozen=True)
class PackConfig:
    """The configuration of a call."""

    dtype: str
    group: int
    head_dim: int
    value_dim: int
    index: str

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        defines = (
            ("DTYPE", self.dtype),
            ("GROUP", self.group),
            ("HEAD_DIM", self.head_dim),
            ("VALUE_DIM", self.value_dim),
            ("INDEX", self.index),
            ("THREADS", _THREADS),
        )
        shared = 2 * self.group * (self.head_dim + _CHUNK) + 8 * self.head_dim
        return KernelSpec("attention/pack_kv.cu", _OP, defines, _THREADS, shared)


@cache
def plan_pack_kv(
    dtype: str, group: int, head_dim: int, value_dim: int, index: str = "int64"
) -> PackConfig:
    """The configuration of a call."""
    return PackConfig(dtype, group, head_dim, value_dim, index)


@launch_plan
def _prepare(*given: Array) -> Launch:
    """Checks and plans a call, and loads its kernel."""
    arrays = PackArrays(*given)
    _check(arrays)
    k, v, sources, _, k_cache, v_cache, k_scales, k_zeros, v_scales, v_zeros = arrays
    check_array(_OP, "k", k, dtypes=ATTENTION_DTYPES, contiguous=False)
    check_kernel_layout(_OP, k=k, v=v)
    check_code_layout(_OP, k_cache, v_cache)
    named = {"k_cache": (k_scales, k_zeros), "v_cache": (v_scales, v_zeros)}
    for name, (scales, zeros) in named.items():
        check_group_layout(_OP, **{f"{name}.scales": scales, f"{name}.zeros": zeros})
        check_equal_strides(_OP, name, scales, zeros)
    head_dim, value_dim = k.shape[-1], v.shape[-1]
    if max(head_dim, value_dim) > _MAX_WIDTH:
        raise ArrayShapeError(
            f"{_OP}: head_dim must be at most {_MAX_WIDTH} on the GPU, got {head_dim} and "
            f"{value_dim}"
        )
    size = k_cache.shape[1] // k_scales.shape[1]
    config = plan_pack_kv(k.dtype.name, size, head_dim, value_dim, sources.dtype.name)
    in_source, in_target = k.shape[1] // size, k_cache.shape[1] // size
    parameters = parameter_structs(PARAMETERS)["PackParameters"].pack(
        k=strides_of(k),
        v=strides_of(v),
        k_cache=strides_of(k_cache),
        v_cache=strides_of(v_cache),
        k_factors=scale_strides(k_scales),
        v_factors=scale_strides(v_scales),
        heads=k.shape[2],
        source_groups=k.shape[0] * in_source,
        source_block_groups=in_source,
        target_groups=k_cache.shape[0] * in_target,
        target_block_groups=in_target,
    )
    blocks = len(sources) * k.shape[2] or 1
    return Launch(load_kernel(config.spec()), (blocks,), (parameters,))


def _specs(device: Device) -> list[KernelSpec]:
    """A representative set of variants: each group size, and an unusual head_dim."""
    return [
        *(plan_pack_kv("bfloat16", size, 128, 128).spec() for size in GROUP_ROWS),
        plan_pack_kv("float16", 64, 96, 64, "int32").spec(),
    ]


register(
    name=_OP,
    family="attention",
    function=pack_kv,
    reference=reference.pack_kv,
    specs=_specs,
    writes=("k_cache", "v_cache"),
)
