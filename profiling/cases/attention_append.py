"""Cases of `append_kv` (RoPE, quantisation and the write into a cache) and of `pack_kv`.

The peer of `append_kv` into a bfloat16 cache is torch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cukit.attention import append_kv, pack_kv
from cukit.core.narrow_dtype import float8_e4m3, int8
from cukit.core.quantized_array import QuantizedArray
from cukit.reference import rope as rope_reference
from profiling import layer_peers, peers
from profiling.case import Case, Workload
from profiling.cases.attention_paged import GROUP_ROWS, grouped_cache
from profiling.data import array_module, normal

HEADS_Q, HEADS_KV, BLOCK_SIZE = 32, 8, 16


def cases(small: bool = False) -> list[Case]:
    """Packing to int4; a decode step and a prompt, for each dtype of the cache."""
    if small:
        return [*(_case(5, 16, codes) for codes in ("", "int8")), _pack_case(2, 32)]
    return [
        _pack_case(32, 128),
        _pack_case(2048, 128),
        *(
            _case(tokens, 128, codes)
            for codes in ("", "int8", "float8_e4m3")
            for tokens in (128, 16384)
        ),
    ]


def _pack_case(groups: int, head_dim: int) -> Case:
    """Packs `groups` blocks of 64 tokens from bfloat16 to int4, keys and values."""

    def build() -> Workload:
        xp = array_module()
        shape = groups, GROUP_ROWS, HEADS_KV, head_dim
        k, v = (normal(shape, "bfloat16") for _ in range(2))
        caches = grouped_cache(shape, 1), grouped_cache(shape, 3)
        order = np.random.default_rng(0).permutation(groups)
        arguments = k, v, *caches, xp.arange(groups), xp.asarray(order)

        def ours() -> Any:
            pack_kv(*arguments)
            return caches[0].scales

        def expected() -> Any:
            scales = xp.empty(caches[0].scales.shape, xp.float32)
            rows = k.astype(xp.float32)
            scales[arguments[5], 0] = (rows.max(axis=1) - rows.min(axis=1)) / 15
            return scales

        return Workload(impls={"cukit": lambda: ours}, expected=expected)

    rows = 2 * groups * GROUP_ROWS * HEADS_KV
    return Case(
        family="attention",
        op="pack_kv",
        name=f"{groups}x{GROUP_ROWS}x{HEADS_KV}x{head_dim}",
        dtype="bfloat16",
        build=build,
        bytes=rows * (2 * head_dim + head_dim // 2 + 2 + 2 * head_dim // GROUP_ROWS),
    )


def _case(tokens: int, head_dim: int, codes: str) -> Case:
    def build() -> Workload:
        xp = array_module()
        generator = np.random.default_rng(0)
        blocks = 4 * -(-tokens // BLOCK_SIZE)
        slots = xp.asarray(generator.permutation(blocks * BLOCK_SIZE)[:tokens])
        q, k, v = (
            normal((tokens, heads, head_dim), "bfloat16") for heads in (HEADS_Q, HEADS_KV, HEADS_KV)
        )
        angles = xp.asarray(generator.uniform(0, 6, (tokens, head_dim // 2)).astype(np.float32))
        tables = xp.cos(angles), xp.sin(angles)
        positions = xp.arange(tokens, dtype=xp.int32)
        shape = blocks, BLOCK_SIZE, HEADS_KV, head_dim
        caches = [_cache(shape, codes, q) for _ in range(2)]
        rope_arguments = {"q": q, "cos": tables[0], "sin": tables[1], "position_ids": positions}
        ours = partial(append_kv, k, v, caches[0], caches[1], slots, **rope_arguments)
        expected = partial(rope_reference.rope, q[None], k[None], *tables)
        impls = {"cukit": lambda: ours}
        if not codes:
            given = (q, k, v, *tables, *(_cache(shape, "", q) for _ in range(2)), slots)
            for name, compiled in (("torch-eager", False), ("torch-compile", True)):
                impls[name] = partial(_torch_impl, given, compiled)
        return Workload(impls=impls, expected=lambda: expected()[0][0])

    read = 2 * tokens * (HEADS_Q + 2 * HEADS_KV) * head_dim + 4 * tokens * head_dim + 12 * tokens
    stored = (head_dim + 4 if codes else 2 * head_dim) * 2 * HEADS_KV
    written = tokens * (stored + 2 * HEADS_Q * head_dim)
    return Case(
        family="attention",
        op="append_kv",
        name=f"{tokens}x{HEADS_Q}/{HEADS_KV}x{head_dim}{f' {codes}' if codes else ''}",
        dtype="bfloat16",
        build=build,
        bytes=read + written,
    )


def _cache(shape: tuple[int, ...], codes: str, like: Any) -> Any:
    xp = array_module()
    if not codes:
        return xp.zeros(shape, like.dtype)
    blocks, block_size, heads, _ = shape
    dtype = int8 if codes == "int8" else float8_e4m3
    scales = xp.ones((blocks, heads, block_size, 1), xp.float32).swapaxes(1, 2)
    return QuantizedArray(xp.zeros(shape, dtype.storage_dtype), dtype, shape, scales, axis=-1)


def _torch_impl(arrays: tuple[Any, ...], compiled: bool) -> Any:
    turn = layer_peers.torch_rope(peers.torch())

    def append(
        q: Any, k: Any, v: Any, cos: Any, sin: Any, k_cache: Any, v_cache: Any, slots: Any
    ) -> Any:
        q, k = turn(q, k, cos, sin)
        k_cache.view(-1, *k.shape[1:])[slots] = k
        v_cache.view(-1, *v.shape[1:])[slots] = v
        return q

    return peers.forward(append, *arrays, compiled=compiled)
