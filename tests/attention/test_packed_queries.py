"""Paged attention with packed queries: the decode kernel, and batches that use both kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cukit as ck
from cukit.attention.flash._arguments import score_options
from cukit.attention.flash._problem import AttentionProblem
from cukit.attention.paged import _paged_gather, paged
from cukit.attention.paged._paged_plan import plan_paged_attention
from cukit.attention.paged._paged_prefill import PreparedPrefill
from cukit.attention.paged._paged_prefill_plan import short_queries
from cukit.core.arrays import bfloat16, float16
from tests.attention.test_paged_attention import DTYPES, Cache, int4_cache
from tests.contract import array_module
from tests.quick_run import emulated

COUNTS = [70, 1, 0, 13, 1, 5, 0, 2, 9, 1]
LENGTHS = [70, 200, 40, 333, 1, 0, 0, 129, 64, 515]
"""Whole prompts, a chunk of a prompt, decode steps, requests without queries or without keys."""


def packed(
    counts: list[int] = COUNTS, lengths: list[int] = LENGTHS, **shape: Any
) -> tuple[Cache, Any]:
    """A cache, its q packed, and cu_seqlens_q."""
    cache = Cache(lengths, **shape)
    ends = np.cumsum([0, *counts]).astype(np.int32)
    q = np.random.default_rng(7).standard_normal((ends[-1], *cache.q.shape[2:]), np.float32)
    cache.q = q.astype(cache.q.dtype)
    return cache, ends


@pytest.fixture
def decode(device: str, fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """`device`, with every call on the decode kernel, as on GPUs other than Hopper."""
    monkeypatch.setattr(_paged_gather, "uses_forward", lambda *_, **__: False)
    return device


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 7, 16, 64])
@pytest.mark.parametrize(
    ("heads_q", "heads_kv", "head_dim"), [(4, 2, 64), (8, 8, 128), (20, 1, 96), (6, 2, 256)]
)
@emulated(
    lambda dtype, block_size, heads_q: (
        (dtype, block_size, heads_q)
        in [(bfloat16, 16, 4), (float16, 7, 8), (bfloat16, 1, 20), (float16, 64, 6)]
    )
)
def test_any_numbers_of_queries(
    decode: str, dtype: Any, block_size: int, heads_q: int, heads_kv: int, head_dim: int
) -> None:
    shape: dict[str, Any] = {"heads_q": heads_q, "heads_kv": heads_kv, "head_dim": head_dim}
    cache, ends = packed(block_size=block_size, dtype=dtype, **shape)
    cache.check(decode, cu_seqlens_q=ends)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"window_size": (20, 0)},
        {"causal": False, "window_size": (30, 5)},
        {"softcap": 2.0, "scale": 0.7},
        {"sinks": np.linspace(-3, 3, 4, dtype=np.float32)},
    ],
    ids=str,
)
def test_options(decode: str, options: dict[str, Any]) -> None:
    cache, ends = packed()
    cache.check(decode, cu_seqlens_q=ends, **options)


@pytest.mark.parametrize("counts", [[1] * 10, [2, 0, 0, 0, 0, 0, 0, 0, 0, 0], [0] * 9 + [40]])
def test_tiles_of_every_height(decode: str, counts: list[int]) -> None:
    """Tiles of 8, 16 and 32 rows; requests without queries before and after."""
    cache, ends = packed(counts, block_size=16)
    cache.check(decode, cu_seqlens_q=ends)


@pytest.mark.parametrize("num_blocks", [1, 3, 7])
def test_a_few_thread_blocks(decode: str, num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of a thread block begins and ends within a problem (a request and a KV head), and
    skips requests without queries."""
    monkeypatch.setattr(
        paged,
        "plan_paged_attention",
        lambda *a, **k: replace(plan_paged_attention(*a, **k), num_blocks=num_blocks, team=1),
    )
    cache, ends = packed()
    cache.check(decode, cu_seqlens_q=ends)


@pytest.mark.parametrize("codes", ["int8", "float8_e4m3", "int4", "recent"])
def test_quantised_caches(device: str, codes: str) -> None:
    """Compared with float64 on decoded values; packed queries of quantised caches use the decode
    kernel on every GPU."""
    xp = array_module(device)
    block_size = 128 if codes in ("int4", "recent") else 16
    cache, ends = packed(block_size=block_size, head_dim=64, dtype=float16)
    given: dict[str, Any] = {"cu_seqlens_q": xp.asarray(ends)}
    unused = np.isnan(cache.k[..., 0])
    caches = []
    if codes in ("int4", "recent"):
        for axis, name in ((1, "k"), (3, "v")):
            size = 64
            wide = getattr(cache, name).astype(np.float64)
            quantised, values = int4_cache(wide, axis, size, unused, xp)
            caches.append(quantised)
            setattr(cache, name, np.nan_to_num(values))
        if codes == "recent":
            newest = np.asarray([length % 64 for length in LENGTHS], np.int32)
            rings = [
                np.random.default_rng(i).standard_normal((10, 64, 2, 64)).astype(float16)
                for i in range(2)
            ]
            for b, (length, new) in enumerate(zip(LENGTHS, newest, strict=True)):
                keys = np.arange(length - new, length)
                blocks, rows = cache.table[b, keys // 128], keys % 128
                for name, ring in zip("kv", rings, strict=True):
                    getattr(cache, name)[blocks, rows] = ring[b, keys % 64].astype(np.float64)
            ring_k, ring_v = map(xp.asarray, rings)
            first = xp.asarray(np.asarray(LENGTHS, np.int32) - newest)
            numbers = xp.arange(10, dtype=xp.int32)
            given["recent"] = ck.RecentKV(ring_k, ring_v, numbers, first)
    else:
        kind = {"int8": ck.int8, "float8_e4m3": ck.float8_e4m3}[codes]
        factor = 30.0 if codes == "int8" else 1.0
        for name in "kv":
            wide = np.nan_to_num(getattr(cache, name).astype(np.float32))
            encoded = ck.QuantizedArray.encode(wide * factor, kind)
            scales = np.full((*wide.shape[:3], 1), 1 / factor, np.float32)
            storage = xp.asarray(encoded.storage)
            caches.append(
                ck.QuantizedArray(storage, kind, wide.shape, scales=xp.asarray(scales), axis=3)
            )
            setattr(cache, name, np.asarray(encoded.dense(), np.float64) / factor)
    cache.q = (cache.q / 4).astype(float16)
    want, want_lse = cache.expected(cu_seqlens_q=ends)
    q, table, lengths = (xp.asarray(a) for a in (cache.q, cache.table, cache.lengths))
    k, v = caches
    out, lse = ck.paged_attention(q, k, v, table, lengths, return_lse=True, **given)
    host = np.asarray if xp is np else xp.asnumpy
    got = host(out).astype(np.float64)
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= 2.0**-7 * np.abs(want).max()
    seen = ~np.isneginf(want_lse)
    assert (np.isneginf(host(lse)) == ~seen).all()
    np.testing.assert_allclose(host(lse)[seen], want_lse[seen], atol=0.04, rtol=1e-3)


@pytest.mark.parametrize("block_size", [7, 16])
@pytest.mark.parametrize("window", [None, (40, 0)], ids=str)
@emulated(lambda block_size, window: (block_size == 7) == (window is None))
def test_mixed_batches(device: str, block_size: int, window: Any) -> None:
    """On Hopper, the decode kernel runs requests of up to 8 queries (16 rows), the forward kernel
    all others."""
    counts = [*COUNTS[:-2], 8, 9]
    cache, ends = packed(counts, block_size=block_size, dtype=float16)
    cache.check(device, cu_seqlens_q=ends, window_size=window)


@pytest.mark.emulator
def test_choice_of_kernels_for_a_mixed_batch() -> None:
    with ck.backend("emulator"):
        cache, ends = packed()
        xp = array_module("emulator")
        arrays = [xp.asarray(a) for a in (cache.q, cache.k, cache.v, cache.table, cache.lengths)]
        ends = xp.asarray(ends)
        both = paged._prepare(
            "", score_options("x", True, None, None, None, None, None), False,
            *arrays[:3], None, None, *arrays[3:], None, None, ends, *[None] * 6,
        )  # fmt: skip
        assert isinstance(both, paged.PreparedPaged)
        assert isinstance(both.prefill, PreparedPrefill)


def test_choice_of_separate_decode_steps() -> None:
    mixed = AttentionProblem(64, 1853, 1, 32, 8, 128, "bfloat16", True, varlen=True)
    assert short_queries(mixed) == 4
    assert short_queries(replace(mixed, num_heads_q=64)) == 2
    assert short_queries(replace(mixed, num_heads_q=256)) == 0
    assert short_queries(replace(mixed, varlen=False)) == 0
    assert short_queries(replace(mixed, batch=7)) == 0
    assert short_queries(replace(mixed, batch=8, seq_len_q=16384)) == 0


@pytest.mark.gpu
def test_a_graph_replays_with_other_numbers_of_queries() -> None:
    """Replays with other lengths run some requests on the other kernel."""
    import cupy

    cache, ends = packed()
    arrays = [cupy.asarray(a) for a in (cache.q, cache.k, cache.v, cache.table, cache.lengths)]
    given = {"cu_seqlens_q": cupy.asarray(ends)}
    out = cupy.empty_like(arrays[0])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        ck.paged_attention(*arrays, out=out, **given)
        stream.begin_capture()
        ck.paged_attention(*arrays, out=out, **given)
        graph = stream.end_capture()
        for counts in (COUNTS, COUNTS[::-1], [1] * 9 + [sum(COUNTS) - 9]):
            given["cu_seqlens_q"][...] = cupy.cumsum(cupy.asarray([0, *counts], np.int32))
            out[...] = np.nan
            graph.launch(stream)
            stream.synchronize()
            assert (out == ck.paged_attention(*arrays, **given)).all()
