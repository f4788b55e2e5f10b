"""Appending keys and values to a paged cache, with fused RoPE and quantisation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from cukit.attention.flash._arguments import ATTENTION_DTYPES, PARAMETERS, check_kernel_layout
from cukit.attention.paged.cache_arrays import CODES, cache_parts, check_code_layout, scale_strides
from cukit.core.arrays import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    Array,
    adopt,
    check_array,
    check_same_dtype,
    empty,
    float32,
    runs_kernel,
)
from cukit.core.device import Device
from cukit.core.kernel import NULL, KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.overlap import check_overlap
from cukit.core.parameters import parameter_structs
from cukit.core.rotary import check_rotary_tables
from cukit.core.scalars import check_flag
from cukit.errors import ArrayShapeError, ConfigError
from cukit.reference import append_kv as reference
from cukit.registry import register

_OP = "append_kv"
_CHUNK = 8
_ROTARY_STEP = 2 * _CHUNK
_THREADS = 128
_MAX_SLOTS = 2**32
_STORED = (np.dtype(np.uint8), np.dtype(np.int8))


_LAUNCHED = (
    *("q", "k", "v", "slots", "cos", "sin", "position_ids"),
    *("k_cache", "v_cache", "k_scales", "v_scales"),
)
"""Arguments of the kernel, before `out`."""


class AppendArrays(NamedTuple):
    """The arrays of a call. A cache is its storage and, if quantised, its scales."""

    k: Array
    v: Array
    k_cache: Array
    v_cache: Array
    k_scales: Array | None
    v_scales: Array | None
    slots: Array
    q: Array | None
    cos: Array | None
    sin: Array | None
    position_ids: Array | None
    out: Array | None


def append_kv(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    slots: Array,
    *,
    q: Array | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    position_ids: Array | None = None,
    interleaved: bool = False,
    out: Array | None = None,
) -> Array | None:
    """Writes keys and values of new tokens into a paged cache, in place.

    Row `slots[i] % block_size` of block `slots[i] // block_size` becomes `k[i]` and `v[i]`. With
    `cos` and `sin`, k and q are first rotated by their positions as in :func:`rope`. Quantised
    caches get one scale per token and head, for keys and for values, as `quantize(x, dtype)`
    computes them; rotated keys are rounded only once.

    Args:
        k: float16|bfloat16 [num_tokens, num_heads_kv, head_dim], any strides with a contiguous last
            axis; on the CPU float32|float64 too. On the GPU, head_dim and value_dim are multiples
            of 8 (with quantised caches of 16) up to 256, and addresses and strides of k, v, q, out
            and the caches are multiples of 16 bytes.
        v: [num_tokens, num_heads_kv, value_dim], dtype of k.
        k_cache: dtype of k, [num_blocks, block_size, num_heads_kv, head_dim], e.g.
            `KVCacheManager.keys(layer)`; or a QuantizedArray of float8_e4m3 or int8 with float32
            scales [num_blocks, block_size, num_heads_kv, 1], any strides.
        v_cache: as k_cache, with value_dim.
        slots: int32|int64 [num_tokens], e.g. from `KVCacheManager.slots`, without duplicates.
            Tokens with a slot below 0 or outside the cache are skipped.
        q: [num_tokens, num_heads_q, head_dim], dtype of k: rotated like the keys.
        cos, sin: float32 [max_positions, rotary_dim / 2], C-contiguous; rotary_dim <= head_dim, on
            the GPU a multiple of 16.
        position_ids: int32|int64 [num_tokens], with cos and sin. A position outside the tables
            gives NaN on the GPU and an ArrayError on the CPU.
        interleaved: rotate pairs of neighbouring columns, see :func:`rope`.
        out: output array of the rotated queries; as q, and may be q itself.

    Returns:
        The rotated queries, `out` or a new array; None without q.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: some of q, cos, sin, position_ids and out without the others they require.

    One launch on CuPy's current stream; computes in float32 and is deterministic.
    Papers: Kwon et al., PagedAttention, arXiv:2309.06180; Su et al., RoFormer, arXiv:2104.09864.

    >>> import numpy as np, cukit as ck
    >>> caches = np.zeros((2, 3, 4, 1, 8), np.float32)     # keys, values: three blocks of four rows
    >>> new = np.ones((2, 1, 8), np.float32)
    >>> ck.append_kv(new, 2 * new, *caches, np.array([5, -1], np.int32))
    >>> caches[1, 1, :, 0, 0]
    array([0., 2., 0., 0.], dtype=float32)
    """
    cache_format, k_cache, k_scales, v_cache, v_scales = cache_parts(_OP, k_cache, v_cache)
    arrays = AppendArrays(
        *adopt(
            *(_OP, k, v, k_cache, v_cache, k_scales, v_scales),
            *(slots, q, cos, sin, position_ids, out),
        )
    )
    check_flag(_OP, "interleaved", interleaved)
    _check_presence(arrays)
    _check_overlaps(arrays)
    if not runs_kernel(_OP, *arrays):
        _check(arrays, cache_format)
        turned = reference.append_kv(
            *(arrays.k, arrays.v, arrays.k_cache, arrays.v_cache, arrays.slots),
            q=arrays.q,
            cos=arrays.cos,
            sin=arrays.sin,
            position_ids=arrays.position_ids,
            interleaved=interleaved,
            codes=cache_format,
            k_scales=arrays.k_scales,
            v_scales=arrays.v_scales,
        )
        if arrays.out is None:
            return turned
        arrays.out[...] = turned
        return arrays.out
    launch = _prepare(cache_format, bool(interleaved), *arrays)
    out = arrays.out
    if arrays.q is not None and out is None:
        out = empty(arrays.q, arrays.q.shape)
    if arrays.k.size:
        given = [getattr(arrays, name) for name in _LAUNCHED]
        launch(*(NULL if array is None else array for array in (*given, out)))
    return out


def _check_presence(arrays: AppendArrays) -> None:
    """Checks which optional arguments are given together."""
    rotary = [arrays.cos, arrays.sin, arrays.position_ids]
    if any(each is None for each in rotary) and not all(each is None for each in rotary):
        raise ConfigError(f"{_OP}: cos, sin and position_ids go together")
    if arrays.q is not None and arrays.cos is None:
        raise ConfigError(f"{_OP}: q requires cos, sin and position_ids")
    if arrays.out is not None and arrays.q is None:
        raise ConfigError(f"{_OP}: out requires q")


def _check_overlaps(arrays: AppendArrays) -> None:
    inputs = {
        name: getattr(arrays, name) for name in ("k", "v", "slots", "cos", "sin", "position_ids")
    }
    written = ("k_cache", "v_cache", "k_scales", "v_scales", "out")
    for i, name in enumerate(written):
        others = {other: getattr(arrays, other) for other in written[:i]}
        itself = "q" if name == "out" else ""
        check_overlap(
            _OP, getattr(arrays, name), name=name, itself=itself, q=arrays.q, **inputs, **others
        )


def _check(arrays: AppendArrays, cache_format: str) -> None:
    """Checks everything but the contents of the arrays."""
    k, v, k_cache, v_cache, k_scales, v_scales, slots, q, cos, sin, position_ids, out = arrays
    check_array(_OP, "k", k, dtypes=FLOAT_DTYPES, ndim=3, contiguous=False)
    tokens, heads, head_dim = k.shape
    check_array(_OP, "v", v, shape=(tokens, heads, None), contiguous=False)
    stored = _STORED if cache_format else (k.dtype,)
    shape = (None, None, heads, head_dim)
    check_array(_OP, "k_cache", k_cache, dtypes=stored, shape=shape, contiguous=False)
    shape = (*k_cache.shape[:3], v.shape[-1])
    check_array(_OP, "v_cache", v_cache, dtypes=stored, shape=shape, contiguous=False)
    check_same_dtype(_OP, k=k, v=v, q=q)
    if cache_format:
        shape = (*k_cache.shape[:3], 1)
        for name, scales in (("k_cache.scales", k_scales), ("v_cache.scales", v_scales)):
            if scales is None:
                raise ArrayShapeError(f"{_OP}: {name} must have shape {shape}, got none")
            check_array(_OP, name, scales, dtypes=(float32,), shape=shape, contiguous=False)
    check_array(_OP, "slots", slots, dtypes=INDEX_DTYPES, shape=(tokens,))
    if q is not None:
        check_array(_OP, "q", q, shape=(tokens, None, head_dim), contiguous=False)
    if out is not None and q is not None:
        check_array(_OP, "out", out, dtypes=(q.dtype,), shape=q.shape, contiguous=False)
    if cos is None or sin is None or position_ids is None:
        return
    check_rotary_tables(_OP, cos, sin, head_dim)
    check_array(_OP, "position_ids", position_ids, dtypes=INDEX_DTYPES, shape=(tokens,))


@dataclass(frozen=True)
class AppendConfig:
    """The configuration of a call.

    team: threads per head of a token.
    """

    dtype: str
    cache_format: str
    heads_q: int
    heads_kv: int
    head_dim: int
    value_dim: int
    rotary_dim: int
    interleaved: bool
    slot: str
    position: str
    team: int

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        scales = (
            ("FORMAT", "E4M3" if self.cache_format == "float8_e4m3" else "INT8"),
            ("SCALE", "float32"),
            ("ZERO_POINTS", 0),
            ("POWER_OF_TWO", 0),
        )
        defines = (
            ("DTYPE", self.dtype),
            ("CODE", CODES[self.cache_format]),
            ("HEADS_Q", self.heads_q),
            ("HEADS_KV", self.heads_kv),
            ("HEAD_DIM", self.head_dim),
            ("VALUE_DIM", self.value_dim),
            ("ROTARY_DIM", self.rotary_dim),
            ("INTERLEAVED", int(self.interleaved)),
            ("SLOT", self.slot),
            ("ID", self.position),
            ("TEAM", self.team),
            ("THREADS", _THREADS),
            *(scales if self.cache_format else ()),
        )
        return KernelSpec("attention/append_kv.cu", _OP, defines, _THREADS)

    def num_blocks(self, num_tokens: int) -> int:
        """The grid size."""
        heads = num_tokens * (self.heads_q + 2 * self.heads_kv)
        return -(-heads * self.team // _THREADS)


@cache
def plan_append_kv(
    dtype: str,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    value_dim: int,
    *,
    cache_format: str = "",
    rotary_dim: int = 0,
    interleaved: bool = False,
    slot: str = "int64",
    position: str = "int32",
) -> AppendConfig:
    """The configuration with the smallest power-of-two team in which a thread holds at most two
    chunks of 8 columns."""
    pairs = -(-max(head_dim, value_dim) // (2 * _CHUNK))
    team = 1 << (pairs - 1).bit_length()
    return AppendConfig(
        *(dtype, cache_format, heads_q, heads_kv, head_dim, value_dim, rotary_dim, interleaved),
        *(slot, position, team),
    )


@launch_plan
def _prepare(cache_format: str, interleaved: bool, *given: Array | None) -> Launch:
    """Checks and plans a call, and loads its kernel."""
    arrays = AppendArrays(*given)
    _check(arrays, cache_format)
    k, v, k_cache, v_cache, k_scales, v_scales, slots, q, cos, _, position_ids, out = arrays
    check_array(_OP, "k", k, dtypes=ATTENTION_DTYPES, contiguous=False)
    named = {"k": k, "v": v, "q": q, "out": out}
    check_kernel_layout(_OP, **{n: None if a is None else a[None] for n, a in named.items()})
    if cache_format:
        check_code_layout(_OP, k_cache, v_cache)
    else:
        check_kernel_layout(_OP, k_cache=k_cache, v_cache=v_cache)
    rotary_dim = 0 if cos is None else 2 * cos.shape[1]
    if cos is not None:
        check_array(_OP, "cos", cos, dtypes=(float32,))
    if rotary_dim % _ROTARY_STEP:
        raise ArrayShapeError(
            f"{_OP}: cos must have a multiple of {_ROTARY_STEP // 2} columns on the GPU, "
            f"got {rotary_dim // 2}"
        )
    num_blocks, block_size = k_cache.shape[:2]
    if num_blocks * block_size > _MAX_SLOTS:
        raise ArrayShapeError(f"{_OP}: k_cache must have at most 2**32 rows, got {k_cache.shape}")
    tokens, heads_kv, head_dim = k.shape
    config = plan_append_kv(
        k.dtype.name,
        0 if q is None else q.shape[1],
        heads_kv,
        head_dim,
        v.shape[-1],
        cache_format=cache_format,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        slot=slots.dtype.name,
        position="int32" if position_ids is None else position_ids.dtype.name,
    )
    parameters = parameter_structs(PARAMETERS)["AppendParameters"].pack(
        q=(0, 0, 0) if q is None else _strides(q),
        k=_strides(k),
        v=_strides(v),
        q_out=(0, _row(q), head_dim) if out is None else _strides(out),
        k_cache=_cache_strides(k_cache),
        v_cache=_cache_strides(v_cache),
        k_scales=scale_strides(k_scales),
        v_scales=scale_strides(v_scales),
        num_tokens=tokens,
        num_blocks=num_blocks,
        block_size=block_size,
        max_positions=0 if cos is None else cos.shape[0],
    )
    blocks = config.num_blocks(tokens) or 1
    return Launch(load_kernel(config.spec()), (blocks,), (parameters,))


def _strides(x: Array) -> tuple[int, int, int]:
    """Strides of [tokens, heads, columns] in elements, as HeadStrides of a single batch."""
    token, head = (stride // x.itemsize for stride in x.strides[:2])
    return 0, token, head


def _row(q: Array | None) -> int:
    """The token stride of a new array like q, in elements."""
    return 0 if q is None else q.shape[1] * q.shape[2]


def _cache_strides(x: Array) -> tuple[int, int, int]:
    block, row, head = (stride // x.itemsize for stride in x.strides[:3])
    return block, row, head


def _specs(device: Device) -> list[KernelSpec]:
    """A representative set of variants: each cache format, with and without rotation."""
    specs = []
    for cache_format in ("", "float8_e4m3", "int8"):
        for rotary_dim, heads_q in ((0, 0), (128, 32)):
            config = plan_append_kv(
                "bfloat16", heads_q, 8, 128, 128, cache_format=cache_format, rotary_dim=rotary_dim
            )
            specs.append(config.spec())
    partial = plan_append_kv("float16", 6, 2, 80, 64, rotary_dim=32, interleaved=True)
    return [*specs, partial.spec()]


register(
    name=_OP,
    family="attention",
    function=append_kv,
    reference=reference.append_kv,
    specs=_specs,
    writes=("k_cache", "v_cache"),
)
