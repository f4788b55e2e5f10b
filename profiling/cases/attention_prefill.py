"""Cases of `paged_attention` with many queries per request, and of `cascade_attention`.

The peers are FlashInfer on the same cache and, on the same keys in contiguous memory, cukit's
`flash_attention` and torch, which show the cost of a cache in blocks. Cascades are compared with
FlashInfer's, and with decode attention that reads the shared keys for each request (`-flat`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from cukit.attention import cascade_attention, flash_attention, paged_attention
from cukit.reference.attention import flash_attention as attend
from profiling import paged_peers
from profiling.case import Call, Case, Workload, itemsize
from profiling.cases.attention import BACKENDS, forward_impl
from profiling.cases.attention import Shape as DenseShape
from profiling.cases.attention_paged import FLOAT8_SCALE, GROUP_ROWS, caches, decoded
from profiling.data import array_module, normal

_DTYPE = "bfloat16"


@dataclass(frozen=True)
class Prefill:
    """Attention of the last queries of each request over all keys of the request."""

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    block_size: int = 16
    codes: str = ""  # dtype of the cache; "" is bfloat16

    def __str__(self) -> str:
        heads = f"{self.heads_q}/{self.heads_kv}"
        kind = f" {self.codes}" if self.codes else ""
        return f"d{self.head_dim} {heads} prefill {self.name} page {self.block_size}{kind}"

    @property
    def flops(self) -> float:
        """FLOPs of both products, for the unmasked pairs."""
        pairs = sum(n * m - n * (n - 1) // 2 for n, m in zip(self.queries, self.keys, strict=True))
        return 4.0 * pairs * self.heads_q * self.head_dim

    @property
    def bytes(self) -> int:
        """Bytes of keys, values, queries and outputs, all as bfloat16."""
        rows = sum(self.keys) * self.heads_kv + sum(self.queries) * self.heads_q
        return 2 * rows * self.head_dim * itemsize(_DTYPE)


@dataclass(frozen=True)
class Cascade:
    """Requests with one query each and a shared prefix of keys."""

    batch: int
    shared: int
    own: int
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    block_size: int = 16

    def __str__(self) -> str:
        heads = f"{self.heads_q}/{self.heads_kv}"
        keys = f"{self.batch}x({self.shared} shared + {self.own})"
        return f"d{self.head_dim} {heads} {keys} page {self.block_size}"

    @property
    def bytes(self) -> int:
        """Bytes, with the shared keys counted once."""
        rows = (self.shared + self.batch * self.own) * self.heads_kv + self.batch * self.heads_q
        return 2 * rows * self.head_dim * itemsize(_DTYPE)


def cases(small: bool = False) -> list[Case]:
    """Prompts, chunked prefill, chunks mixed with decode steps, quantised caches; long and short
    shared prefixes."""
    if small:
        mixed = Prefill("mixed", (5, 1, 9), (5, 20, 30), 4, 2, 16)
        return [
            _prefill_case(Prefill("2x20", (20, 20), (20, 20), 4, 2, 16)),
            _prefill_case(mixed),
            _prefill_case(replace(mixed, head_dim=32, block_size=GROUP_ROWS, codes="int4")),
            _cascade_case(Cascade(4, 32, 9, 4, 2, 16)),
        ]
    prompts = [
        Prefill(f"{batch}x{length}", (length,) * batch, (length,) * batch, block_size=block_size)
        for (batch, length), block_size in itertools.product(((8, 2048), (2, 8192)), (16, 64, 1))
    ]
    prompts += [
        Prefill("4x1024 of 17408", (1024,) * 4, (17408,) * 4),
        Prefill("1024, 512, 256 and 61 decode", (1024, 512, 256, *(1,) * 61), (4096,) * 64),
        Prefill("64x64 of 4096", (64,) * 64, (4096,) * 64),
        Prefill("8x2048", (2048,) * 8, (2048,) * 8, 32, 8, 64),
        Prefill("8x2048", (2048,) * 8, (2048,) * 8, 16, 4, 256),
    ]
    for codes in ("int8", "float8_e4m3", "int4"):
        form = {"block_size": GROUP_ROWS if codes == "int4" else 16, "codes": codes}
        prompt = Prefill("8x2048", (2048,) * 8, (2048,) * 8, **form)
        prompts += [prompt, Prefill("4x1024 of 17408", (1024,) * 4, (17408,) * 4, **form)]
    shared = [
        Cascade(32, 8192, 256),
        Cascade(128, 8192, 256),
        Cascade(64, 32768, 512),
        Cascade(8, 4000, 256),
    ]
    return [*map(_prefill_case, prompts), *map(_cascade_case, shared)]


def _cache(blocks: int, shape: Prefill | Cascade, codes: str = "") -> tuple[Any, Any, Any]:
    """Keys, values, and the blocks in the order of the requests."""
    extents = blocks, shape.block_size, shape.heads_kv, shape.head_dim
    order = np.random.default_rng(0).permutation(blocks).astype(np.int32)
    return (*caches(extents, codes), order)


def _prefill_case(shape: Prefill) -> Case:
    equal = len(set(shape.queries)) == 1 == len(set(shape.keys))

    def build() -> Workload:
        xp = array_module()
        counts = [-(-keys // shape.block_size) for keys in shape.keys]
        k, v, order = _cache(sum(counts), shape, shape.codes)
        host = np.zeros((len(counts), max(counts)), np.int32)
        for row, count, end in zip(host, counts, np.cumsum(counts), strict=True):
            row[:count] = order[end - count : end]
        table, lengths = xp.asarray(host), xp.asarray(np.asarray(shape.keys, np.int32))
        q = normal((sum(shape.queries), shape.heads_q, shape.head_dim), _DTYPE)
        given: dict[str, Any] = {}
        if equal:
            q = q.reshape(len(shape.keys), -1, *q.shape[1:])
        else:
            given["cu_seqlens_q"] = xp.asarray(np.cumsum([0, *shape.queries]).astype(np.int32))
        out = xp.empty_like(q)
        impls: dict[str, Callable[[], Call]] = {
            "cukit": lambda: partial(paged_attention, q, k, v, table, lengths, out=out, **given)
        }
        if shape.head_dim == 128 and shape.codes in ("", "float8_e4m3"):
            scale = FLOAT8_SCALE if shape.codes else None
            stored = (k.storage, v.storage) if shape.codes else (k, v)
            arguments = q, *stored, table, shape.queries, shape.keys
            for backend in ("fa2",) if shape.codes else ("fa2", "fa3"):
                name = f"flashinfer-{backend}"
                impls[name] = partial(paged_peers.prefill, *arguments, backend, scale)
        if equal and not shape.codes:
            rows = [
                cache[table].reshape(len(counts), -1, *cache.shape[2:])[:, : shape.keys[0]]
                for cache in (k, v)
            ]
            impls["cukit-dense"] = lambda: partial(flash_attention, q, *rows, causal=True)
            if shape.queries == shape.keys:  # torch aligns its causal mask to the top left
                dense = DenseShape(
                    len(counts), shape.keys[0], shape.heads_q, shape.heads_kv, shape.head_dim, True
                )
                for name, backend in BACKENDS.items():
                    impls[name] = partial(forward_impl, backend, dense, q, *rows)
        return Workload(impls=impls, expected=lambda: _expected(shape, q, k, v, table))

    return Case(
        family="attention",
        op="paged_attention",
        name=str(shape),
        dtype=_DTYPE,
        build=build,
        flops=shape.flops,
        bytes=shape.bytes,
    )


def _cascade_case(shape: Cascade) -> Case:
    def build() -> Workload:
        xp = array_module()
        shared, own = shape.shared // shape.block_size, -(-shape.own // shape.block_size)
        k, v, order = _cache(shared + shape.batch * own, shape)
        host = np.empty((shape.batch, shared + own), np.int32)
        host[:, :shared] = order[:shared]
        host[:, shared:] = order[shared:].reshape(shape.batch, own)
        keys = shape.shared + shape.own
        table, lengths = xp.asarray(host), xp.full(shape.batch, keys, np.int32)
        q = normal((shape.batch, 1, shape.heads_q, shape.head_dim), _DTYPE)
        arguments = (q, k, v, table, lengths)
        out = xp.empty_like(q)
        prefill = Prefill(
            "", (1,) * shape.batch, (keys,) * shape.batch, shape.heads_q, shape.heads_kv
        )
        return Workload(
            impls={
                "cukit": lambda: partial(cascade_attention, *arguments, shape.shared, out=out),
                "cukit-flat": lambda: partial(paged_attention, *arguments, out=xp.empty_like(q)),
                "flashinfer": partial(paged_peers.cascade, q, k, v, table, shape.shared, shape.own),
                "flashinfer-flat": partial(
                    paged_peers.decode, q, k, v, table, [keys] * shape.batch
                ),
            },
            expected=lambda: _expected(prefill, q, k, v, table),
        )

    return Case(
        family="attention",
        op="cascade_attention",
        name=str(shape),
        dtype=_DTYPE,
        build=build,
        bytes=shape.bytes,
    )


def _expected(shape: Prefill, q: Any, k: Any, v: Any, table: Any) -> Any:
    """The reference per request and KV head, in float32."""
    xp = array_module()
    whole = xp.empty(q.shape, xp.float32)
    q, out = (x.reshape(-1, *x.shape[-2:]) for x in (q, whole))
    group = shape.heads_q // shape.heads_kv
    ends = itertools.accumulate(shape.queries)
    for blocks, queries, keys, end in zip(table, shape.queries, shape.keys, ends, strict=True):
        wide = [decoded(cache, blocks) for cache in (k, v)]
        for head in range(shape.heads_kv):
            rows, heads = slice(end - queries, end), slice(head * group, (head + 1) * group)
            own = (cache[:, :, head].reshape(1, -1, 1, cache.shape[-1])[:, :keys] for cache in wide)
            out[rows, heads] = attend(q[rows, heads].astype(xp.float32)[None], *own, causal=True)[0]
    return whole
