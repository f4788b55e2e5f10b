"""Cases of `mla_attention`: decode steps over latents in blocks of 64 in random order, with the 128
heads of DeepSeek-V3 and its shards under tensor parallelism (64, 16 heads).

The peers are FlashMLA and FlashInfer on the same cache; the FP8 cases have no peer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cukit.attention import encode_mla_latents, mla_attention
from cukit.reference import mla_attention as reference
from profiling import peers
from profiling.case import Call, Case, Workload, itemsize
from profiling.data import array_module, normal

BLOCK = 64
LATENT, WIDTH = reference.LATENT_DIM, reference.LATENT_DIM + reference.ROPE_DIM
_WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True)
class Shape:
    """Requests of a decode step."""

    name: str
    lengths: tuple[int, ...]
    heads: int
    seq_q: int = 1
    coded: bool = False

    def __str__(self) -> str:
        return f"{self.heads} heads {self.name}" + (f" x {self.seq_q}" if self.seq_q > 1 else "")

    @property
    def token_bytes(self) -> int:
        return reference.CODE_BYTES if self.coded else WIDTH * itemsize("bfloat16")


def cases(small: bool = False) -> list[Case]:
    """Cases bound by memory (16 heads), by tensor cores (128) and by both (64); one long request;
    requests of different lengths; draft tokens; FP8."""
    if small:
        return [_case(Shape("mixed", (3, 90), 2, 2)), _case(Shape("2x70", (70, 70), 3, coded=True))]
    batches = ((128, 4096), (128, 8192), (32, 8192), (16, 8192), (1, 32768))
    shapes = [
        Shape(f"{batch}x{length}", (length,) * batch, heads)
        for batch, length in batches
        for heads in (16, 64, 128)
    ]
    shapes += [
        Shape("128x4096", (4096,) * 128, 128, 2),
        Shape("32x4096", (4096,) * 32, 16, 4),
        Shape("131072 + 31x4096", (131072, *(4096,) * 31), 128),
        Shape("32x8064", (8064,) * 32, 128),
        *(Shape("32x8192", (8192,) * 32, heads, coded=True) for heads in (16, 64, 128)),
        Shape("128x4096", (4096,) * 128, 64, coded=True),
        *(Shape("1x32768", (32768,), heads, coded=True) for heads in (16, 64, 128)),
    ]
    return [_case(shape) for shape in shapes]


def _case(shape: Shape) -> Case:
    batch, keys = len(shape.lengths), sum(shape.lengths)

    def build() -> Workload:
        xp = array_module()
        counts = [-(-length // BLOCK) for length in shape.lengths]
        order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
        host = np.zeros((batch, max(counts)), np.int32)
        for row, count, end in zip(host, counts, np.cumsum(counts), strict=True):
            row[:count] = order[end - count : end]
        table, lengths = xp.asarray(host), xp.asarray(np.asarray(shape.lengths, np.int32))
        q = normal((batch, shape.seq_q, shape.heads, WIDTH), "bfloat16")
        cache = normal((sum(counts), BLOCK, 1, WIDTH), "bfloat16")
        if shape.coded:
            cache = encode_mla_latents(cache)
        arguments = (q, cache, table, lengths)
        out = xp.empty((*q.shape[:-1], LATENT), q.dtype)
        impls: dict[str, Callable[[], Call]] = {
            "cukit": lambda: partial(mla_attention, *arguments, out=out)
        }
        if not shape.coded:
            impls["flash-mla"] = partial(_flash_mla, *arguments)
            impls["flashinfer"] = partial(_flashinfer, shape, *arguments)
        return Workload(impls=impls, expected=lambda: _expected(*arguments))

    rows = batch * shape.seq_q * shape.heads
    return Case(
        family="attention",
        op="mla_attention",
        name=str(shape),
        dtype="float8_e4m3" if shape.coded else "bfloat16",
        build=build,
        flops=2.0 * shape.heads * shape.seq_q * keys * (WIDTH + LATENT),
        bytes=keys * shape.token_bytes + rows * (WIDTH + LATENT) * itemsize("bfloat16"),
    )


def _flash_mla(q: Any, cache: Any, table: Any, lengths: Any) -> Call:
    flash_mla = peers.optional("flash_mla")
    heads, seq_q = q.shape[2], q.shape[1]
    plan = flash_mla.get_mla_metadata(peers.to_torch(lengths), seq_q * heads, 1)

    def function(q: Any, cache: Any, table: Any, lengths: Any) -> Any:
        return flash_mla.flash_mla_with_kvcache(
            q, cache, table, lengths, LATENT, *plan, softmax_scale=reference.SCALE, causal=True
        )[0]

    return peers.forward(function, q, cache, table, lengths)


def _flashinfer(shape: Shape, q: Any, cache: Any, table: Any, lengths: Any) -> Call:
    torch, mla = peers.torch(), peers.optional("flashinfer.mla")
    counts = [-(-length // BLOCK) for length in shape.lengths]
    ends = torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32, device="cuda")
    used = [table[b, :count] for b, count in enumerate(counts)]
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = mla.BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
    wrapper.plan(
        shape.seq_q * torch.arange(len(counts) + 1, dtype=torch.int32, device="cuda"),
        ends,
        peers.to_torch(array_module().concatenate(used)),
        peers.to_torch(lengths),
        shape.heads,
        LATENT,
        WIDTH - LATENT,
        BLOCK,
        True,
        reference.SCALE,
        torch.bfloat16,
        torch.bfloat16,
    )

    def function(q: Any, cache: Any) -> Any:
        rows, latents = q.flatten(0, 1), cache[:, :, 0]
        out = wrapper.run(
            rows[..., :LATENT], rows[..., LATENT:], latents[..., :LATENT], latents[..., LATENT:]
        )
        return out.view(*q.shape[:-1], LATENT)

    return peers.forward(function, q, cache)


def _expected(q: Any, cache: Any, table: Any, lengths: Any) -> Any:
    """The reference per request, in float32: the whole cache would not fit in memory."""
    xp = array_module()
    out = xp.empty((*q.shape[:-1], LATENT), xp.float32)
    for b, length in enumerate(np.asarray(lengths.get() if xp is not np else lengths).tolist()):
        used = table[b, : -(-length // BLOCK)]
        own = xp.arange(used.size, dtype=xp.int32)[None]
        rows = cache[used]
        rows = rows if rows.dtype == np.uint8 else rows.astype(xp.float32)
        row = q[b : b + 1].astype(xp.float32)
        out[b] = reference.mla_attention(row, rows, own, lengths[b : b + 1])[0]
    return out
