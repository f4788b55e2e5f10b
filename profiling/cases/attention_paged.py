"""Cases of `paged_attention`: decode steps over a cache in blocks that lie in random order.

The peers are torch's scaled_dot_product_attention backends on the same keys side by side: what a
cache without blocks would cost. They take equal lengths only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cukit.attention import merge_attention_states, paged_attention
from cukit.reference import paged_attention as reference
from profiling import peers
from profiling.case import Call, Case, Workload, itemsize
from profiling.cases.attention import BACKENDS
from profiling.data import array_module, normal


@dataclass(frozen=True)
class Shape:
    """Requests of a decode step."""

    name: str
    lengths: tuple[int, ...]
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    block_size: int = 16

    def __str__(self) -> str:
        heads = f"{self.heads_q}/{self.heads_kv}"
        return f"d{self.head_dim} {heads} {self.name} page {self.block_size}"

    @property
    def equal(self) -> bool:
        return len(set(self.lengths)) == 1


def cases(small: bool = False) -> list[Case]:
    """Long and short requests, few and many, of equal and very unequal lengths."""
    if small:
        mixed = Shape("mixed", (3, 40), 4, 1, 24)
        return [_case(Shape("2x20", (20, 20), 4, 2, 16)), _case(mixed), _merge_case(2, 3, 4, 16)]
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
    merges = [_merge_case(128, 1, 32, 128), _merge_case(1, 16384, 32, 128)]
    return [_case(shape) for shape in shapes] + merges


def _case(shape: Shape) -> Case:
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
        k, v = normal(block, "bfloat16"), normal(block, "bfloat16")
        arguments = (q, k, v, table, lengths)
        out = xp.empty_like(q)
        arms: dict[str, Callable[[], Call]] = {
            "cukit": lambda: partial(paged_attention, *arguments, out=out),
            "cukit-invariant": lambda: partial(
                paged_attention, *arguments, out=xp.empty_like(q), batch_invariant=True
            ),
        }
        if shape.equal:
            for name, backend in BACKENDS.items():
                arms[name] = partial(_dense_arm, backend, shape, q, k, v, table)
        return Workload(arms=arms, expected=lambda: _expected(*arguments))

    rows = 2 * keys * shape.heads_kv + 2 * batch * shape.heads_q
    return Case(
        family="attention",
        op="paged_attention",
        name=str(shape),
        dtype="bfloat16",
        build=build,
        bytes=rows * shape.head_dim * itemsize("bfloat16"),
    )


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

        arms: dict[str, Callable[[], Call]] = {
            "cukit": lambda: partial(merge_attention_states, *arguments),
            "torch-compile": lambda: peers.forward(torch_merge, *arguments, compiled=True),
        }
        return Workload(arms=arms, expected=expected)

    rows = batch * seq_len * heads
    return Case(
        family="attention",
        op="merge_attention_states",
        name=f"{batch}x{seq_len}x{heads}x{head_dim}",
        dtype="bfloat16",
        build=build,
        bytes=3 * rows * (head_dim * itemsize("bfloat16") + itemsize("float32")),
    )


def _dense_arm(backend: str, shape: Shape, q: Any, k: Any, v: Any, table: Any) -> Call:
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


def _expected(q: Any, k: Any, v: Any, table: Any, lengths: Any) -> Any:
    """Request by request, in float32: the whole cache would not fit."""
    xp = array_module()
    out = xp.empty(q.shape, xp.float32)
    for b, length in enumerate(np.asarray(lengths.get() if xp is not np else lengths).tolist()):
        used = table[b, : -(-length // k.shape[1])]
        own = xp.arange(used.size, dtype=xp.int32)[None]
        row, keys, values = (x.astype(xp.float32) for x in (q[b : b + 1], k[used], v[used]))
        out[b] = reference.paged_attention(row, keys, values, own, lengths[b : b + 1])[0]
    return out
