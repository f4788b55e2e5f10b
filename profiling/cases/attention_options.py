"""Cases of masked attention: windows, block masks and variable-length sequences. Lengths are
log-uniform and sum to 65536.

The peers are torch's compiled flex_attention and, for sequences, its FlashAttention-2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cukit.attention import block_sparse_attention, flash_attention
from cukit.reference import attention as reference
from cukit.reference import block_sparse_attention as block_reference
from profiling import peers
from profiling.case import Call, Case, Workload, itemsize
from profiling.data import array_module, normal

DTYPE = "bfloat16"
DENSITY = 0.106
BLOCK = 128


def cases(small: bool = False) -> list[Case]:
    """Two windows, two densities of blocks, and sequences with and without a causal mask."""
    if small:
        return [
            window_case(60, 2, 16, 7),
            block_case(60, 2, 16, 0.5, 16),
            sequences_case([20, 0, 33], 2, 16, False),
            sequences_case([20, 0, 33], 2, 16, True),
        ]
    return [
        *(window_case(16384, 16, 128, window) for window in (1024, 4096)),
        *(block_case(16384, 32, 128, density, BLOCK) for density in (DENSITY, 0.5)),
        *(
            sequences_case(lengths_of(65536), 2048 // head_dim, head_dim, causal)
            for head_dim in (64, 128)
            for causal in (False, True)
        ),
    ]


def lengths_of(total: int, least: int = 64, most: int = 16384) -> list[int]:
    """Log-uniform lengths, the same in every run."""
    rng = np.random.default_rng(1)
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(int(np.exp(rng.uniform(np.log(least), np.log(most)))))
    lengths[-1] -= sum(lengths) - total
    return lengths


def _arrays(rows: tuple[int, ...], heads: int, head_dim: int) -> list[Any]:
    return [normal((*rows, heads, head_dim), DTYPE) for _ in range(3)]


def _wide(*arrays: Any) -> tuple[Any, ...]:
    return tuple(array.astype(array_module().float32) for array in arrays)


def by_head(function: Callable[..., Any], *arrays: Any) -> Any:
    """The reference, one head at a time: the scores of all heads would not fit in memory."""
    heads = range(arrays[0].shape[-2])
    parts = [function(*_wide(*(array[..., h : h + 1, :] for array in arrays))) for h in heads]
    return array_module().concatenate(parts, axis=-2)


def _flex_impl(visible: Callable[..., Any], rows: int, *arrays: Any) -> Call:
    """torch's compiled flex_attention; `visible` is its mask function."""
    flex = peers.optional("torch.nn.attention.flex_attention")
    mask = flex.create_block_mask(visible, 1, 1, rows, rows)
    attention = peers.compile_function(flex.flex_attention)

    def function(q: Any, k: Any, v: Any) -> Any:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return attention(*heads, block_mask=mask).transpose(1, 2)

    return peers.forward(function, *arrays)


def window_case(seq_len: int, heads: int, head_dim: int, window: int) -> Case:
    """Causal attention of each query to its own key and the `window` keys before it."""

    def build() -> Workload:
        arrays = _arrays((1, seq_len), heads, head_dim)
        options = {"causal": True, "window_size": (window, None)}

        def visible(batch: Any, head: Any, i: Any, j: Any) -> Any:
            return (i >= j) & (i - j <= window)

        return Workload(
            impls={
                "cukit": lambda: partial(flash_attention, *arrays, **options),
                "torch-flex": lambda: _flex_impl(visible, seq_len, *arrays),
            },
            expected=lambda: by_head(partial(reference.flash_attention, **options), *arrays),
        )

    pairs = (window + 1) * (seq_len - window / 2)
    return _case("flash_attention", f"d{head_dim} 1x{heads}x{seq_len} window {window}", build,
                 4 * head_dim * heads * pairs, 4 * seq_len * heads * head_dim)  # fmt: skip


def block_case(seq_len: int, heads: int, head_dim: int, density: float, block: int) -> Case:
    """Tiles of `block` queries x `block` keys, each unmasked with probability `density`."""
    blocks = -(-seq_len // block)
    mask = np.random.default_rng(2).random((1, blocks, blocks)) < density

    def build() -> Workload:
        arrays = _arrays((1, seq_len), heads, head_dim)
        placed = array_module().asarray(mask)

        def flex() -> Call:
            seen = peers.to_torch(placed.astype(np.uint8)).bool()[0]
            return _flex_impl(lambda b, h, i, j: seen[i // block, j // block], seq_len, *arrays)

        expected = partial(
            block_reference.block_sparse_attention, block_mask=placed, block_size=block
        )
        return Workload(
            impls={
                "cukit": lambda: partial(block_sparse_attention, *arrays, placed, block_size=block),
                "torch-flex": flex,
            },
            expected=lambda: by_head(expected, *arrays),
        )

    flops = 4 * head_dim * heads * float(mask.sum()) * block * block
    name = f"d{head_dim} 1x{heads}x{seq_len} block {block} density {density}"
    return _case("block_sparse_attention", name, build, flops, 4 * seq_len * heads * head_dim)


def sequences_case(lengths: list[int], heads: int, head_dim: int, causal: bool) -> Case:
    """Variable-length sequences."""
    total, longest = sum(lengths), max(lengths)

    def build() -> Workload:
        xp = array_module()
        arrays = _arrays((total,), heads, head_dim)
        ends = xp.asarray(np.cumsum([0, *lengths]).astype(np.int32))
        options = {
            "causal": causal,
            "cu_seqlens_q": ends,
            "cu_seqlens_kv": ends,
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
        }

        def flash() -> Call:
            varlen = peers.optional("torch.nn.attention.varlen").varlen_attn
            cu = peers.to_torch(ends)
            window = (-1, 0) if causal else (-1, -1)

            def function(q: Any, k: Any, v: Any) -> Any:
                return varlen(q, k, v, cu, cu, longest, longest, window_size=window)

            return peers.forward(function, *arrays)

        return Workload(
            impls={
                "cukit": lambda: partial(flash_attention, *arrays, **options),
                "torch-flash": flash,
            },
            expected=lambda: by_head(partial(reference.flash_attention, **options), *arrays),
        )

    flops = 4 * head_dim * heads * sum(length**2 for length in lengths) / (2 if causal else 1)
    mask = " causal" if causal else ""
    name = f"d{head_dim} {len(lengths)} sequences of {total}x{heads}{mask}"
    return _case("flash_attention", name, build, flops, 4 * total * heads * head_dim)


def _case(op: str, name: str, build: Callable[[], Workload], flops: float, elements: int) -> Case:
    return Case(
        family="attention",
        op=op,
        name=name,
        dtype=DTYPE,
        build=build,
        flops=flops,
        bytes=elements * itemsize(DTYPE),
    )
