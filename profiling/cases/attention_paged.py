"""Cases of `paged_attention`: decode steps over a cache with blocks in random order.

The peers are FlashInfer, for bfloat16 and float8 caches of head_dim 128, and two backends of
torch's scaled_dot_product_attention, for bfloat16 and equal lengths. torch reads the same keys from
contiguous memory, which shows the cost of a cache in blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cukit.attention import RecentKV, merge_attention_states, paged_attention
from cukit.core.narrow_dtype import float8_e4m3, int4, int8
from cukit.core.quantized_array import QuantizedArray
from cukit.reference import paged_attention as reference
from profiling import paged_peers, peers
from profiling.case import Call, Case, Workload, itemsize
from profiling.cases.attention import BACKENDS
from profiling.data import array_module, integers, normal

GROUP_ROWS = 64
"""Keys of an int4 cache that share a scale per channel."""

_FLASHINFER_DIM = 128
"""head_dim of FlashInfer's compiled kernels."""

FLOAT8_SCALE = 4.5 / 448
"""Scale of all float8 codes, for values up to 4.5."""


@dataclass(frozen=True)
class Shape:
    """Requests of a decode step."""

    name: str
    lengths: tuple[int, ...]
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    block_size: int = 16
    codes: str = ""  # dtype of the cache; "" is bfloat16
    recent: int = 0  # int4: recent keys of each request, in a ring buffer

    def __str__(self) -> str:
        heads = f"{self.heads_q}/{self.heads_kv}"
        kind = f" {self.codes}" if self.codes else ""
        kind += f", {self.recent} in a ring" if self.recent else ""
        return f"d{self.head_dim} {heads} {self.name} page {self.block_size}{kind}"

    @property
    def row_bytes(self) -> int:
        """Bytes of a key or value of one head, with the scale of codes; int4: the mean of both."""
        if self.codes == "int4":
            return self.head_dim // 2 + 2 + 2 * self.head_dim // GROUP_ROWS
        return self.head_dim + 4 if self.codes else 2 * self.head_dim

    @property
    def equal(self) -> bool:
        return len(set(self.lengths)) == 1


def cases(small: bool = False) -> list[Case]:
    """Long and short requests, few and many, of equal and very unequal lengths; quantised caches;
    merges of two attention states."""
    if small:
        mixed = Shape("mixed", (3, 40), 4, 1, 24)
        narrow = Shape("2x20", (20, 20), 4, 2, 16, codes="int8")
        groups = Shape("2x20", (20, 20), 4, 2, 32, GROUP_ROWS, "int4")
        both = Shape("2x80", (80, 80), 4, 2, 32, GROUP_ROWS, "int4", 16)
        shapes = [Shape("2x20", (20, 20), 4, 2, 16), mixed, narrow, groups, both]
        return [*map(paged_case, shapes), _merge_case(2, 3, 4, 16)]
    batches = ((1, 4096), (1, 32768), (16, 16384), (32, 4096), (128, 2048))
    shapes = [
        Shape(f"{batch}x{length}", (length,) * batch, block_size=block_size)
        for batch, length in batches
        for block_size in (16, 64)
    ]
    shapes += [
        Shape("32x8064", (8064,) * 32),
        Shape("131072 + 31x4096", (131072, *(4096,) * 31)),
        Shape("32x4096", (4096,) * 32, 8, 8),
        Shape("32x8192", (8192,) * 32, 16, 1),
        Shape("32x4096", (4096,) * 32, 64, 8),
        Shape("32x8192", (8192,) * 32, 32, 8, 64),
        Shape("32x4096", (4096,) * 32, 16, 4, 256),
    ]
    shapes += [
        Shape(
            f"{batch}x{length}",
            (length,) * batch,
            block_size=GROUP_ROWS if codes == "int4" else 16,
            codes=codes,
        )
        for codes in ("int8", "float8_e4m3", "int4")
        for batch, length in ((1, 4096), (32, 4096), (128, 2048))
    ]
    shapes += [
        Shape("128x2080", (2080,) * 128, block_size=GROUP_ROWS, codes="int4", recent=32),
        Shape("1x4128", (4128,), block_size=GROUP_ROWS, codes="int4", recent=32),
    ]
    merges = [_merge_case(128, 1, 32, 128), _merge_case(1, 16384, 32, 128)]
    return [*map(paged_case, shapes), *merges]


def paged_case(shape: Shape) -> Case:
    """A decode step."""
    batch, keys = len(shape.lengths), sum(shape.lengths)

    def build() -> Workload:
        xp = array_module()
        counts = [-(-length // shape.block_size) for length in shape.lengths]
        order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
        host = np.zeros((batch, max(counts)), np.int32)
        for row, count, end in zip(host, counts, np.cumsum(counts), strict=True):
            row[:count] = order[end - count : end]
        table, lengths = xp.asarray(host), xp.asarray(np.asarray(shape.lengths, np.int32))
        block = sum(counts), shape.block_size, shape.heads_kv, shape.head_dim
        q = normal((batch, 1, shape.heads_q, shape.head_dim), "bfloat16")
        k, v = caches(block, shape.codes)
        arguments = (q, k, v, table, lengths)
        given: dict[str, Any] = {}
        if shape.recent:
            rings = batch, GROUP_ROWS, shape.heads_kv, shape.head_dim
            packed = xp.asarray(np.asarray(shape.lengths, np.int32) - np.int32(shape.recent))
            new = (normal(rings, "bfloat16") for _ in range(2))
            given["recent"] = RecentKV(*new, xp.arange(batch, dtype=xp.int32), packed)
        out = xp.empty_like(q)
        impls: dict[str, Callable[[], Call]] = {
            "cukit": lambda: partial(paged_attention, *arguments, out=out, **given),
            "cukit-invariant": lambda: partial(
                paged_attention, *arguments, out=xp.empty_like(q), batch_invariant=True, **given
            ),
        }
        if shape.head_dim == _FLASHINFER_DIM and shape.codes in ("", "float8_e4m3"):
            stored, scale = (k, v), None
            if shape.codes:
                stored, scale = (k.storage, v.storage), FLOAT8_SCALE
            impls["flashinfer"] = partial(
                paged_peers.decode, q, *stored, table, shape.lengths, scale
            )
        if shape.equal and not shape.codes:
            for name, backend in BACKENDS.items():
                impls[name] = partial(_dense_impl, backend, shape, q, k, v, table)
        return Workload(impls=impls, expected=lambda: _expected(*arguments, **given))

    coded, newest = keys - batch * shape.recent, batch * shape.recent * 2 * shape.head_dim
    outside = 2 * batch * shape.heads_q * shape.head_dim * itemsize("bfloat16")
    return Case(
        family="attention",
        op="paged_attention",
        name=str(shape),
        dtype="bfloat16",
        build=build,
        bytes=2 * shape.heads_kv * (coded * shape.row_bytes + newest) + outside,
    )


def caches(block: tuple[int, ...], codes: str) -> tuple[Any, Any]:
    """Keys and values, bfloat16 or quantised."""
    if codes == "int4":
        return grouped_cache(block, 1), grouped_cache(block, 3)
    return _cache(block, codes), _cache(block, codes)


def _cache(block: tuple[int, ...], codes: str) -> Any:
    """Keys or values; the scales of codes are stored by head within a block."""
    if not codes:
        return normal(block, "bfloat16")
    dtype = {"int8": int8, "float8_e4m3": float8_e4m3}[codes]
    most = 127.0 if codes == "int8" else 448.0
    xp = array_module()
    blocks, block_size, heads, _ = block
    storage = xp.empty(block, xp.int8 if codes == "int8" else xp.uint8)
    scales = xp.full((blocks, heads, block_size, 1), 4.5 / most, xp.float32).swapaxes(1, 2)
    for begin in range(0, blocks, 1024):  # the whole cache in float32 would not fit in memory
        part = storage[begin : begin + 1024]
        values = normal(part.shape, "float32") * (most / 4.5)
        part[...] = QuantizedArray.encode(xp.clip(values, -most, most), dtype).storage
    return QuantizedArray(storage, dtype, block, scales=scales, axis=-1)


def grouped_cache(block: tuple[int, ...], axis: int) -> Any:
    """int4 keys (axis 1) or values (axis 3) of random codes, at the scale of a standard normal,
    stored by head within a block as `KVCacheManager` stores them."""
    xp = array_module()
    blocks, block_size, heads, head_dim = block
    storage = integers(0, 256, (blocks, heads, block_size, head_dim // 2), "uint8").swapaxes(1, 2)
    if axis == 1:
        shape, size = (blocks, block_size // GROUP_ROWS, heads, head_dim), GROUP_ROWS
        factors = [xp.full(shape, value, xp.float16) for value in (0.2, -0.5)]
    else:
        size = head_dim
        factors = [
            xp.full((blocks, heads, block_size, 1), value, xp.float16).swapaxes(1, 2)
            for value in (0.2, -0.5)
        ]
    return QuantizedArray(storage, int4, block, *factors, axis, size)


def _merge_case(batch: int, seq_len: int, heads: int, head_dim: int) -> Case:
    def build() -> Workload:
        shape = batch, seq_len, heads, head_dim
        outs = [normal(shape, "bfloat16") for _ in range(2)]
        lses = [normal((batch, heads, seq_len), "float32") for _ in range(2)]
        arguments = outs[0], lses[0], outs[1], lses[1]

        def torch_merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
            lse = peers.torch().logaddexp(lse_a, lse_b)
            weights = [(x - lse).exp().transpose(1, 2)[..., None] for x in (lse_a, lse_b)]
            return (weights[0] * out_a + weights[1] * out_b).to(out_a.dtype), lse

        def expected() -> Any:
            xp = array_module()
            wide = [array.astype(xp.float32) for array in arguments]
            return reference.merge_attention_states(*wide)

        impls: dict[str, Callable[[], Call]] = {
            "cukit": lambda: partial(merge_attention_states, *arguments),
            "torch-compile": lambda: peers.forward(torch_merge, *arguments, compiled=True),
        }
        return Workload(impls=impls, expected=expected)

    rows = batch * seq_len * heads
    return Case(
        family="attention",
        op="merge_attention_states",
        name=f"{batch}x{seq_len}x{heads}x{head_dim}",
        dtype="bfloat16",
        build=build,
        bytes=3 * rows * (head_dim * itemsize("bfloat16") + itemsize("float32")),
    )


def _dense_impl(backend: str, shape: Shape, q: Any, k: Any, v: Any, table: Any) -> Call:
    torch = peers.torch()
    attention = peers.optional("torch.nn.attention")
    chosen = getattr(attention.SDPBackend, backend)

    def rows(cache: Any) -> Any:
        gathered = cache[table].reshape(len(shape.lengths), -1, *cache.shape[2:])
        return gathered[:, : shape.lengths[0]].transpose(0, 2, 1, 3).copy()

    def function(q: Any, k: Any, v: Any) -> Any:
        with attention.sdpa_kernel(chosen):
            out = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(1, 2), k, v, enable_gqa=shape.heads_q != shape.heads_kv
            )
        return out.transpose(1, 2)

    return peers.forward(function, q, rows(k), rows(v))


def _expected(
    q: Any, k: Any, v: Any, table: Any, lengths: Any, recent: RecentKV | None = None
) -> Any:
    """The reference per request, in float32: the whole cache would not fit in memory."""
    xp = array_module()
    out = xp.empty(q.shape, xp.float32)
    for b, length in enumerate(np.asarray(lengths.get() if xp is not np else lengths).tolist()):
        used = table[b, : -(-length // k.shape[1])]
        own = xp.arange(used.size, dtype=xp.int32)[None]
        row, keys, values = q[b : b + 1].astype(xp.float32), decoded(k, used), decoded(v, used)
        newest = None
        if recent is not None:
            wide = (x[b : b + 1].astype(xp.float32) for x in (recent.k, recent.v))
            newest = RecentKV(*wide, xp.zeros(1, xp.int32), recent.packed_lens[b : b + 1])
        one = lengths[b : b + 1]
        out[b] = reference.paged_attention(row, keys, values, own, one, recent=newest)[0]
    return out


def decoded(cache: Any, used: Any) -> Any:
    """Blocks of a cache in float32."""
    xp = array_module()
    if not isinstance(cache, QuantizedArray):
        return cache[used].astype(xp.float32)
    storage = cache.storage[used]
    if cache.zero_points is not None:
        factors = cache.scales[used], cache.zero_points[used]
        shape = (*storage.shape[:-1], cache.shape[-1])
        part = QuantizedArray(storage, cache.dtype, shape, *factors, cache.axis, cache.group_size)
        return part.dense().astype(xp.float32)
    codes = QuantizedArray(storage, cache.dtype, storage.shape).dense()
    return codes.astype(xp.float32) * cache.scales[used]
