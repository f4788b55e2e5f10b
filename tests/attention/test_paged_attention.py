"""Attention over a paged cache, with NaN in everything that must not be read."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import cukit as ck
from cukit.attention.paged import _paged_arguments, _paged_plan, paged
from cukit.attention.paged._paged_plan import PagedConfig, plan_paged_attention
from cukit.core.arrays import bfloat16, float16, namespace
from cukit.core.device import typical_device
from cukit.errors import ArrayDtypeError, ArrayError, ArrayShapeError, ConfigError
from cukit.reference import paged_attention as reference
from tests.contract import array_module
from tests.quick_run import emulated

DTYPES = (float16, bfloat16)
ROUNDING = {float16: 2.0**-11, bfloat16: 2.0**-8}


class Cache:
    """A cache with shuffled blocks; rows that belong to no request are NaN."""

    def __init__(
        self,
        lengths: list[int],
        *,
        block_size: int = 16,
        heads_q: int = 4,
        heads_kv: int = 2,
        head_dim: int = 64,
        value_dim: int | None = None,
        seq_q: int = 1,
        dtype: Any = bfloat16,
        hidden: int = 0,
        seed: int = 0,
    ) -> None:
        """hidden: number of leading keys of each request that are NaN too."""
        generator = np.random.default_rng(seed)
        value_dim = value_dim or head_dim
        counts = [-(-length // block_size) for length in lengths]
        order = generator.permutation(sum(counts) + 2)
        widths = head_dim, value_dim
        self.k, self.v = (
            np.full((order.size, block_size, heads_kv, width), np.nan, dtype) for width in widths
        )
        self.table = np.full((len(lengths), max(counts, default=0) + 1), 2**30, np.int32)
        taken = iter(order.tolist())
        for b, length in enumerate(lengths):
            blocks = np.fromiter(itertools.islice(taken, counts[b]), np.int32)
            self.table[b, : counts[b]] = blocks
            places = np.arange(min(hidden, length), length)
            for array in (self.k, self.v):
                shape = (places.size, *array.shape[2:])
                rows = generator.standard_normal(shape, np.float32).astype(dtype)
                array[blocks[places // block_size], places % block_size] = rows
            self.table[b, : hidden // block_size] = 2**30
        self.lengths = np.asarray(lengths, np.int32)
        shape = (len(lengths), seq_q, heads_q, head_dim)
        self.q = generator.standard_normal(shape, np.float32).astype(dtype)

    def expected(self, **options: Any) -> Any:
        """The result in float64, with zeros for NaN."""
        k, v = (np.nan_to_num(array.astype(np.float64)) for array in (self.k, self.v))
        table = np.where(self.table == 2**30, 0, self.table)
        sinks = options.pop("sinks", None)
        options.pop("batch_invariant", None)
        sinks = None if sinks is None else sinks.astype(np.float64)
        return reference.paged_attention(
            self.q.astype(np.float64), k, v, table, self.lengths,
            sinks=sinks, return_lse=True, **options,
        )  # fmt: skip

    def check(self, device: str, tolerance: float = 2.0, **options: Any) -> None:
        """Checks the output and lse, and that a second call is bitwise equal."""
        xp = array_module(device)
        arrays = [xp.asarray(a) for a in (self.q, self.k, self.v, self.table, self.lengths)]
        given = {n: xp.asarray(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
        out, lse = ck.paged_attention(*arrays, return_lse=True, **given)
        again = ck.paged_attention(*arrays, **given)
        want, want_lse = self.expected(**options)
        host = (lambda a: a) if xp is np else xp.asnumpy
        assert host(out).tobytes() == host(again).tobytes()
        assert namespace(out) is xp
        # Probabilities and output are rounded to 16 bits.
        bound = tolerance * ROUNDING[np.dtype(self.q.dtype)] * (np.abs(want).max(initial=0) + 0.1)
        got = host(out).astype(np.float64)
        assert np.isfinite(got).all()
        assert np.abs(got - want).max(initial=0) <= bound
        empty = np.isneginf(want_lse)
        assert (np.isneginf(host(lse)) == empty).all()
        np.testing.assert_allclose(host(lse)[~empty], want_lse[~empty], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 5, 16, 64, 256])
@pytest.mark.parametrize("lengths", [[1], [64], [0, 7, 200, 0, 65], [300, 1, 1, 1, 130, 64, 33]])
@emulated(lambda lengths, block_size: len(lengths) == 5 or block_size == 5)
def test_any_lengths_and_blocks(
    device: str, dtype: Any, block_size: int, lengths: list[int]
) -> None:
    Cache(lengths, block_size=block_size, dtype=dtype).check(device)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(
    ("heads_q", "heads_kv", "seq_q"), [(1, 1, 1), (5, 1, 3), (8, 2, 5), (40, 1, 1)]
)
@emulated(lambda head_dim, heads_q: (head_dim == 80) == (heads_q == 5) or heads_q == 40 == head_dim)
def test_any_heads(device: str, head_dim: int, heads_q: int, heads_kv: int, seq_q: int) -> None:
    shape = {"head_dim": head_dim, "heads_q": heads_q, "heads_kv": heads_kv, "seq_q": seq_q}
    Cache([70, 2, 0, 129], **shape).check(device)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"window_size": (20, 0)},
        {"causal": False, "window_size": (3, 1)},
        {"softcap": 2.0},
        {"scale": 0.7},
        {"sinks": np.linspace(-3, 3, 4, dtype=np.float32)},
        {"window_size": (9, None), "softcap": 1.5, "sinks": np.full(4, -np.inf, np.float32)},
    ],
    ids=str,
)
def test_options(device: str, options: dict[str, Any], batch_invariant: bool) -> None:
    hidden = 32 if "window_size" in options else 0
    cache = Cache([90, 200, 70, 0], seq_q=2, hidden=hidden, block_size=8)
    cache.check(device, batch_invariant=batch_invariant, **options)


@pytest.mark.parametrize("codes", [ck.int8, ck.float8_e4m3], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shared", ["none", "cache", "head", "key"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@emulated(lambda head_dim, shared: head_dim in (80, 128) and shared in ("none", "key"))
def test_caches_of_codes(device: str, codes: Any, shared: str, head_dim: int) -> None:
    check_codes(device, codes, shared, head_dim)


def check_codes(
    device: str, codes: Any, shared: str, head_dim: int, *, seq_q: int = 1, ends: Any = None
) -> None:
    """Scales that differ by up to a factor of 1000; compared with float64 on decoded values.

    If seq_q is above 1, the decoded values are rounded to float16. ends: cu_seqlens_q of packed
    queries.
    """
    xp = array_module(device)
    lengths = [70, 2, 0, 129, 700]
    shape = {"heads_q": 6, "heads_kv": 2, "head_dim": head_dim, "seq_q": seq_q}
    cache = Cache(lengths, **shape, dtype=float16)
    generator = np.random.default_rng(1)
    shapes = {"none": None, "cache": (1,) * 4, "head": (1, 1, 2, 1), "key": (*cache.k.shape[:3], 1)}
    extents = shapes[shared]
    given, values = [], []
    for array, most in ((cache.k, 3.0), (cache.v, 300.0)):
        unused = np.isnan(array)
        scales = None
        axes = {"cache": None, "head": (0, 1, 3), "key": 3}.get(shared)
        if extents is not None:
            spread = generator.uniform(-3, 0, extents)
            scales = (most * 10**spread / 100).astype(np.float32)
        codes_of = ck.QuantizedArray.encode(
            np.nan_to_num(array.astype(np.float32)) * (1 if scales is None else 60 * scales),
            codes, scales=scales, axis=axes,
        )  # fmt: skip
        values.append(np.asarray(codes_of.dense(), np.float64))
        storage = codes_of.storage.copy()
        storage[unused] = 0x7F
        if scales is not None and shared == "key":
            scales[unused[..., :1]] = np.nan
        given.append(
            ck.QuantizedArray(
                xp.asarray(storage),
                codes,
                storage.shape,
                scales=None if scales is None else xp.asarray(scales),
                axis=axes,
            )
        )
    cache.k, cache.v = (each.astype(float16) if seq_q > 1 else each for each in values)
    options = {}
    if ends is not None:
        cache.q = cache.q.reshape(-1, 6, head_dim)[: ends[-1]]
        options["cu_seqlens_q"] = ends
    want, want_lse = cache.expected(**options)
    arrays = [xp.asarray(a) for a in (cache.q, cache.table, cache.lengths)]
    options = {name: xp.asarray(array) for name, array in options.items()}
    out, lse = ck.paged_attention(arrays[0], *given, *arrays[1:], return_lse=True, **options)
    host = np.asarray if xp is np else xp.asnumpy
    got = host(out).astype(np.float64)
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= 2.0**-9 * np.abs(want).max()
    seen = ~np.isneginf(want_lse)
    np.testing.assert_allclose(host(lse)[seen], want_lse[seen], atol=1e-3, rtol=1e-4)


def int4_cache(
    values: Any, axis: int, group_size: int, unused: Any, xp: Any
) -> tuple[ck.QuantizedArray, Any]:
    """An int4 cache (KIVI), and the decoded values. With groups along axis 1, channels are far from
    zero; with groups along axis 3, scales and zero points of unused rows are NaN."""
    shape = values.shape
    spread = np.random.default_rng(2).uniform(-20, 20, (1, 1, *shape[2:]))
    values = np.nan_to_num(values) + (spread if axis == 1 else 0)
    split = (*shape[:axis], shape[axis] // group_size, group_size, *shape[axis + 1 :])
    blocks = values.reshape(split)
    low, high = blocks.min(axis + 1), blocks.max(axis + 1)
    scales = np.maximum((high - low) / 15, np.abs(low) / 2000 + 1e-3).astype(np.float16)
    zeros = (-8 - low / scales).astype(np.float16)
    if axis == 3:
        scales[unused], zeros[unused] = np.nan, np.nan
    wide = [np.repeat(x.astype(np.float64), group_size, axis) for x in (scales, zeros)]
    with np.errstate(invalid="ignore"):
        levels = np.clip(np.rint(values / wide[0] + wide[1]), -8, 7)
    levels = np.nan_to_num(levels).astype(np.int64)
    packed = (levels[..., ::2] & 15 | (levels[..., 1::2] & 15) << 4).astype(np.uint8)
    factors = [xp.asarray(x) for x in (scales, zeros)]
    if axis == 3:  # the rows of a head are contiguous
        factors = [xp.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in factors]
    cache = ck.QuantizedArray(xp.asarray(packed), ck.int4, shape, *factors, axis, group_size)
    return cache, (levels - wide[1]) * wide[0]


@pytest.mark.parametrize(
    ("head_dim", "heads_q", "seq_q", "options"),
    [
        (128, 6, 1, {}),
        (96, 40, 1, {"softcap": 20.0}),
        (64, 2, 3, {"window_size": (70, None), "sinks": np.array([0.5, 1], np.float32)}),
        (128, 8, 2, {"causal": False, "batch_invariant": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("group_rows", [32, 64])
@emulated(lambda head_dim, group_rows: (head_dim == 96) == (group_rows == 32))
def test_caches_of_int4(
    device: str, head_dim: int, heads_q: int, seq_q: int, options: dict[str, Any], group_rows: int
) -> None:
    check_int4(device, head_dim, heads_q, seq_q, options, group_rows)


def check_int4(
    device: str, head_dim: int, heads_q: int, seq_q: int, options: dict[str, Any], group_rows: int
) -> None:
    """Key channels far from zero; compared with float64 on decoded values."""
    xp = array_module(device)
    cache = Cache(
        [70, 2, 0, 129, 700], heads_q=heads_q, heads_kv=2, head_dim=head_dim, seq_q=seq_q,
        block_size=128, dtype=float16,
    )  # fmt: skip
    cache.q = (cache.q / 4).astype(float16)
    unused = np.isnan(cache.k[..., 0])
    k, k_values = int4_cache(cache.k.astype(np.float64), 1, group_rows, unused, xp)
    v, v_values = int4_cache(cache.v.astype(np.float64), 3, head_dim, unused, xp)
    cache.k, cache.v = k_values, np.nan_to_num(v_values)
    want, want_lse = cache.expected(**options)
    arrays = [xp.asarray(a) for a in (cache.q, cache.table, cache.lengths)]
    given = {n: xp.asarray(a) if isinstance(a, np.ndarray) else a for n, a in options.items()}
    out, lse = ck.paged_attention(arrays[0], k, v, *arrays[1:], return_lse=True, **given)
    host = np.asarray if xp is np else xp.asnumpy
    got = host(out).astype(np.float64)
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= 2.0**-7 * np.abs(want).max()
    seen = ~np.isneginf(want_lse)
    np.testing.assert_allclose(host(lse)[seen], want_lse[seen], atol=0.04, rtol=1e-3)


@pytest.mark.parametrize(
    ("head_dim", "heads_q", "seq_q", "dtype", "options"),
    [
        (128, 6, 1, bfloat16, {}),
        (96, 40, 1, float16, {"softcap": 20.0}),
        (64, 2, 3, bfloat16, {"window_size": (70, None), "sinks": np.array([0.5, 1], np.float32)}),
        (128, 8, 2, float16, {"causal": False, "batch_invariant": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("group_rows", [32, 64])
@emulated(lambda head_dim, group_rows: (head_dim == 96) == (group_rows == 32))
def test_recent_keys_are_not_quantised(
    device: str,
    head_dim: int,
    heads_q: int,
    seq_q: int,
    dtype: Any,
    options: dict[str, Any],
    group_rows: int,
) -> None:
    check_recent(device, head_dim, heads_q, seq_q, dtype, options, group_rows)


def check_recent(
    device: str,
    head_dim: int,
    heads_q: int,
    seq_q: int,
    dtype: Any,
    options: dict[str, Any],
    group_rows: int,
) -> None:
    """Codes and ring buffers in one launch; NaN after a request's codes and in unused ring rows."""
    xp = array_module(device)
    lengths, packed = [70, 2, 0, 129, 700, 300, 128], [64, 0, 0, 64, 640, 192, 128]
    cache = Cache(
        lengths, heads_q=heads_q, heads_kv=2, head_dim=head_dim, seq_q=seq_q, block_size=128,
        dtype=dtype,
    )  # fmt: skip
    cache.q = (cache.q.astype(np.float32) / 4).astype(dtype)
    num_rows = 110
    rings = np.array([4, 2**30, 2**30, 0, 6, 1, 2**30], np.int32)
    rings[1] = 2
    shape = 7, num_rows, 2, head_dim
    recent_k, recent_v = (np.full(shape, np.nan, dtype) for _ in range(2))
    coded = np.zeros(cache.k.shape[:2], bool)
    whole = [np.nan_to_num(each.astype(np.float64)) for each in (cache.k, cache.v)]
    for b, (length, first) in enumerate(zip(lengths, packed, strict=True)):
        old, new = np.arange(first), np.arange(first, length)
        coded[cache.table[b, old // 128], old % 128] = True
        places = cache.table[b, new // 128], new % 128
        for ring, rows in ((recent_k, cache.k), (recent_v, cache.v)):
            if new.size:
                ring[rings[b], new % num_rows] = rows[places]
    unused = np.repeat(~coded[..., None], 2, axis=2)
    k, k_values = int4_cache(
        np.where(coded[..., None, None], whole[0], np.nan), 1, group_rows, unused, xp
    )
    v, v_values = int4_cache(
        np.where(coded[..., None, None], whole[1], np.nan), 3, head_dim, unused, xp
    )
    cache.k, cache.v = (
        np.where(coded[..., None, None], np.nan_to_num(values), exact)
        for values, exact in ((k_values, whole[0]), (v_values, whole[1]))
    )
    want, want_lse = cache.expected(**options)
    recent = ck.RecentKV(*(xp.asarray(a) for a in (recent_k, recent_v, rings)),
                         xp.asarray(np.array(packed, np.int32)))  # fmt: skip
    arrays = [xp.asarray(a) for a in (cache.q, cache.table, cache.lengths)]
    given = {n: xp.asarray(a) if isinstance(a, np.ndarray) else a for n, a in options.items()}
    given |= {"recent": recent, "return_lse": True}
    out, lse = ck.paged_attention(arrays[0], k, v, *arrays[1:], **given)
    again, _ = ck.paged_attention(arrays[0], k, v, *arrays[1:], **given)
    host = np.asarray if xp is np else xp.asnumpy
    assert host(out).tobytes() == host(again).tobytes()
    got = host(out).astype(np.float64)
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= (2.0**-7 + 2 * ROUNDING[dtype]) * np.abs(want).max()
    seen = ~np.isneginf(want_lse)
    np.testing.assert_allclose(host(lse)[seen], want_lse[seen], atol=0.04, rtol=1e-3)


@pytest.mark.parametrize(
    ("cache_format", "step", "warps", "stages"),
    [("", 32, 2, 2), ("int8", 16, 4, 3), ("int8", 32, 1, 2), ("float8_e4m3", 16, 8, 2)],
)
@emulated(lambda cache_format: True)
@pytest.mark.usefixtures("fresh_plans")
def test_other_tilings(
    device: str,
    cache_format: str,
    step: int,
    warps: int,
    stages: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tilings that profiling/paged_variants.py measures."""
    plan = paged.plan_paged_attention
    tiling = {"step": step, "warps": warps, "stages": stages, "blocks_per_sm": 1}
    monkeypatch.setattr(
        paged, "plan_paged_attention", lambda *a, **k: replace(plan(*a, **k), **tiling)
    )
    if cache_format:
        check_codes(device, {"int8": ck.int8}.get(cache_format, ck.float8_e4m3), "key", 128)
    else:
        Cache([500, 3, 150, 0, 70], heads_q=6, heads_kv=2).check(device)


@pytest.mark.parametrize(
    ("lengths", "heads_q", "seq_q", "options"),
    [
        ([500], 32, 1, {}),
        ([1], 8, 1, {}),
        ([0], 16, 1, {}),
        ([3000], 80, 2, {"softcap": 20.0}),
        (
            [1500],
            8,
            5,
            {"window_size": (70, None), "sinks": np.linspace(0, 2, 8, dtype=np.float32)},
        ),
    ],
    ids=str,
)
@emulated(lambda lengths: True)
def test_a_cluster_processes_a_problem(
    device: str, lengths: list[int], heads_q: int, seq_q: int, options: dict[str, Any]
) -> None:
    """Eight key heads of one request: clusters of 16 on sm_90."""
    cache = Cache(lengths, heads_q=heads_q, heads_kv=8, head_dim=128, seq_q=seq_q)
    cache.check(device, **options)


@pytest.mark.parametrize("cache_format", ["", "int8", "int4", "recent"])
@emulated(lambda cache_format: True)
@pytest.mark.usefixtures("fresh_plans")
def test_clusters_of_several_requests(
    device: str, cache_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters of eight."""
    monkeypatch.setattr(_paged_plan, "_CLUSTER", 8)
    monkeypatch.setattr(_paged_plan, "_CLUSTER_SHARE", 0)
    check_cache_format(device, cache_format)


@pytest.mark.parametrize(
    ("cache_format", "heads_q"), [("int4", 2), ("int4", 14), ("int8", 6), ("float8_e4m3", 6)]
)
@emulated(lambda cache_format: True)
@pytest.mark.usefixtures("fresh_plans")
def test_thread_blocks_of_one_warp(
    device: str, cache_format: str, heads_q: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_paged_plan, "_MANY_PROBLEMS", 0)
    check_cache_format(device, cache_format, heads_q)


@pytest.mark.parametrize("head_dim", [40, 64])
@emulated(lambda head_dim: True)
def test_narrow_heads_of_many_problems(device: str, head_dim: int) -> None:
    """More problems (a request and a KV head each) than SMs."""
    lengths = [300, 0, 129, 64, 1] + [7] * 65
    Cache(lengths, heads_q=6, heads_kv=2, head_dim=head_dim).check(device)


@pytest.mark.parametrize("options", [{}, {"window_size": (70, 0), "softcap": 20.0}], ids=str)
@emulated(lambda options: True)
def test_sixteen_rows_of_few_problems(device: str, options: dict[str, Any]) -> None:
    cache = Cache([700, 3, 150, 0, 70], heads_q=16, heads_kv=1, head_dim=128, dtype=float16)
    cache.check(device, **options)


def check_cache_format(device: str, cache_format: str, heads_q: int = 6) -> None:
    """Checks caches of one format with five to seven requests and two key heads. "recent": int4
    with recent keys."""
    if cache_format in ("int8", "float8_e4m3"):
        check_codes(device, {"int8": ck.int8}.get(cache_format, ck.float8_e4m3), "key", 128)
    elif cache_format == "int4":
        check_int4(device, 128, heads_q, 1, {}, 64)
    elif cache_format == "recent":
        check_recent(device, 128, heads_q, 1, bfloat16, {}, 64)
    else:
        Cache([500, 3, 150, 0, 70], heads_q=heads_q, heads_kv=2).check(device)


def test_plans_of_few_and_many_problems() -> None:
    device = typical_device("sm_90a")

    def plan(batch: int, heads_kv: int = 8, **options: Any) -> PagedConfig:
        return plan_paged_attention(
            128, 128, heads_kv, 4, "bfloat16", device, batch=batch, **options
        )

    assert plan(1).cluster == plan(2, 4).cluster == 16
    assert plan(1).num_blocks == 128
    assert plan(1).team == 1
    for other in (
        plan(2),
        plan(1, 1),
        plan(0),
        plan(1, packed=True),
        plan(1, batch_invariant=True),
    ):
        assert other.cluster == 1
    many, few = (plan(batch, cache_format="int4", group_rows=64) for batch in (128, 32))
    assert (many.warps, many.stages, many.blocks_per_sm) == (1, 2, 8)
    assert (few.warps, few.stages, few.blocks_per_sm) == (4, 3, 2)
    for cache_format in ("int8", "float8_e4m3"):
        many, few = (plan(batch, cache_format=cache_format) for batch in (128, 32))
        assert (many.warps, many.stages, many.blocks_per_sm) == (1, 2, 8)
        assert (few.warps, few.stages, few.blocks_per_sm) == (4, 2, 3)


def test_tilings_of_16_bits_follow_problems_and_rows() -> None:
    device = typical_device("sm_90a")

    def tiling(batch: int, *shape: int, **options: Any) -> tuple[int, int, int, int]:
        config = plan_paged_attention(*shape, "bfloat16", device, batch=batch, **options)
        return config.step, config.warps, config.blocks_per_sm, config.stages

    assert tiling(32, 64, 64, 8, 4) == (32, 4, 3, 2)
    for usual in (
        tiling(8, 64, 64, 8, 4),
        tiling(0, 64, 64, 8, 4),
        tiling(32, 64, 64, 8, 16),
        tiling(32, 64, 64, 8, 4, batch_invariant=True),
    ):
        assert usual[:3] == (16, 4, 2)
    assert tiling(32, 128, 128, 1, 16) == (16, 8, 1, 3)
    for usual in (
        tiling(32, 128, 128, 8, 16),
        tiling(0, 128, 128, 1, 16),
        tiling(32, 128, 128, 1, 16, packed=True),
        tiling(32, 128, 128, 1, 8),
    ):
        assert usual[1:3] == (4, 2)


def test_values_may_be_narrower(device: str) -> None:
    Cache([90, 3], head_dim=96, value_dim=64).check(device)


@pytest.mark.parametrize("length", [1, 1023, 1024, 1025, 5000])
@emulated(lambda length: length == 1025)
def test_a_request_does_not_depend_on_the_batch(device: str, length: int) -> None:
    """Bitwise equal alone and in a batch, in other blocks of another cache."""
    xp = array_module(device)
    alone = Cache([length], seed=1)
    among = Cache([7, length, 2600 if device == "gpu" else 70, 0], seed=2)
    places = np.arange(length)
    for own, other in ((alone.k, among.k), (alone.v, among.v)):
        other[among.table[1][places // 16], places % 16] = own[
            alone.table[0][places // 16], places % 16
        ]
    among.q[1] = alone.q[0]
    results = [
        ck.paged_attention(
            *(xp.asarray(a) for a in (c.q, c.k, c.v, c.table, c.lengths)), batch_invariant=True
        )
        for c in (alone, among)
    ]
    assert (results[0][0] == results[1][1]).all()


def test_a_slab_of_the_manager(device: str) -> None:
    """Views of a KVCacheManager's slab with two layers, written at the slots that it assigns."""
    cache = ck.KVCacheManager(32, 16, num_layers=2, num_heads_kv=2, head_dim=64)
    xp = namespace(cache.slab.array)
    if (device == "gpu") != (xp is not np):
        pytest.skip("with a GPU, the slab is in GPU memory")
    generator = np.random.default_rng(0)
    rows = xp.asarray(generator.standard_normal((2, 50, 2, 64), np.float32).astype(np.float16))
    cache.allocate("a", range(50))
    blocks, places = np.divmod(cache.slots("a"), 16)
    cache.keys(1)[blocks, places] = rows[0]
    cache.values(1)[blocks, places] = rows[1]
    q = xp.asarray(generator.standard_normal((1, 1, 4, 64), np.float32).astype(np.float16))
    table, lengths = map(xp.asarray, cache.block_table(["a"]))
    out: Any = ck.paged_attention(q, cache.keys(1), cache.values(1), table, lengths)
    dense: Any = ck.flash_attention(q, rows[:1], rows[1:], causal=True)
    assert float(abs(out.astype(np.float32) - dense.astype(np.float32)).max()) < 2e-3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": np.zeros((1, 1, 3, 64), np.float32)}, ArrayShapeError, "must divide those of q"),
        ({"block_table": np.zeros((1, 2), np.int64)}, ArrayDtypeError, "block_table"),
        ({"seq_lens": np.array([33], np.int32)}, ConfigError, "from 0 to 32"),
        ({"seq_lens": np.array([-1], np.int32)}, ConfigError, "from 0 to 32"),
        ({"block_table": np.array([[0, 4]], np.int32)}, ConfigError, r"block_table\[0, 1\] is 4"),
        ({"v_cache": np.zeros((4, 16, 2, 72), np.float32)}, ArrayShapeError, "at most"),
        ({"k_cache": np.zeros((4, 16, 2, 64), np.float16)}, ArrayDtypeError, "k_cache"),
        ({"softcap": -1.0}, ConfigError, "softcap"),
        ({"causal": 1}, ConfigError, "causal"),
        ({"checked": 1}, ConfigError, "checked"),
        ({"out": np.zeros((1, 1, 4, 32), np.float32)}, ArrayError, "out"),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {
        "q": np.zeros((1, 1, 4, 64), np.float32),
        "k_cache": np.zeros((4, 16, 2, 64), np.float32),
        "v_cache": np.zeros((4, 16, 2, 64), np.float32),
        "block_table": np.array([[0, 1]], np.int32),
        "seq_lens": np.array([20], np.int32),
    }
    ck.paged_attention(**arguments)
    with pytest.raises(error, match=message):
        ck.paged_attention(**(arguments | change))


@pytest.mark.parametrize(
    ("lengths", "entries", "message"),
    [
        ([20, 33, 0], {}, r"from 0 to 32, .* but seq_lens\[1\] is 33"),
        ([20, 32, -(2**31)], {}, r"seq_lens\[2\] is -2147483648"),
        ([20, 17, 0], {(1, 1): 4}, r"block_table\[1, 1\] is 4, but the cache has 4 blocks"),
        ([20, 17, 0], {(0, 0): 2**31 - 1, (1, 0): -1}, r"block_table\[0, 0\] is 2147483647"),
        ([20, 17, 0], {(1, 0): -7}, r"block_table\[1, 0\] is -7"),
        ([16, 17, 0], {(0, 1): 2**30, (2, 0): -1}, None),
    ],
)
def test_checked_calls_reject_invalid_tables_and_lengths(
    device: str,
    lengths: list[int],
    entries: dict[tuple[int, int], int],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the CPU every call is checked; on the GPU the kernel must not run with such tables."""
    xp = array_module(device)
    table = np.array([[0, 1], [2, 3], [1, 1]], np.int32)
    for place, block in entries.items():
        table[place] = block
    q, cache = xp.ones((3, 1, 2, 64), float16), xp.ones((4, 16, 1, 64), float16)
    arguments = q, cache, cache, xp.asarray(table), xp.asarray(lengths, np.int32)
    if message is None:
        assert (ck.paged_attention(*arguments, checked=True)[:2] == 1).all()
        return
    with pytest.raises(ConfigError, match=message):
        ck.paged_attention(*arguments, checked=True)
    monkeypatch.setattr(_paged_arguments, "_CHECKED", True)  # CUKIT_CHECKED=1
    with pytest.raises(ConfigError, match=message):
        ck.paged_attention(*arguments)


@pytest.mark.gpu
def test_a_graph_replays_with_other_lengths() -> None:
    import cupy

    cache = Cache([100, 700, 3], seed=3)
    arrays = [cupy.asarray(a) for a in (cache.q, cache.k, cache.v, cache.table, cache.lengths)]
    out = cupy.empty_like(arrays[0])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        ck.paged_attention(*arrays, out=out)
        stream.begin_capture()
        ck.paged_attention(*arrays, out=out)
        graph = stream.end_capture()
        for lengths in ([100, 700, 3], [5, 1, 0], [100, 650, 2]):
            arrays[4][...] = cupy.asarray(lengths, np.int32)
            graph.launch(stream)
            stream.synchronize()
            assert (out == ck.paged_attention(*arrays)).all()


@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize(
    ("num_blocks", "lengths", "heads_q"),
    [
        *((blocks, [500, 3, 150, 0, 70], 6) for blocks in (1, 2, 5)),
        (5, [500, 3, 150, 0, 70], 24),  # rows for which partial results merge in column pairs
        (2, [128] * 17, 6),  # rounded up from 17 tiles to nine whole problems of two tiles
        (7, [1088] * 3, 6),  # rounded up from eight tiles to nine, half a problem
        (9, [1088] * 5, 24),  # not rounded: 10 tiles
    ],
)
def test_a_few_thread_blocks_share_problems(
    num_blocks: int, lengths: list[int], heads_q: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work of a thread block starts or ends within a problem, or includes whole problems."""
    monkeypatch.setattr(paged, "plan_paged_attention", partial(_with_blocks, 2 * num_blocks))
    with ck.backend("emulator"):
        Cache(lengths, heads_q=heads_q, heads_kv=2).check("emulator")


@pytest.mark.usefixtures("fresh_plans")
def test_shares_of_equal_requests_are_whole_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one team nor two teams split a problem, so both give bitwise the same result."""
    cache = Cache([128] * 17, heads_q=6, heads_kv=2)
    arrays = cache.q, cache.k, cache.v, cache.table, cache.lengths
    results = []
    for teams in (1, 2):
        monkeypatch.setattr(paged, "plan_paged_attention", partial(_with_blocks, 2 * teams))
        paged._prepare.forget()  # type: ignore[attr-defined]
        with ck.backend("emulator"):
            results.append(np.asarray(ck.paged_attention(*arrays)).tobytes())
    assert results[0] == results[1]


def _with_blocks(num_blocks: int, *args: Any, **kwargs: Any) -> PagedConfig:
    return replace(plan_paged_attention(*args, **kwargs), num_blocks=num_blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("heads_q", [8, 32])
def test_large_batches_of_unequal_lengths(heads_q: int) -> None:
    lengths = np.random.default_rng(5).zipf(1.3, 40).clip(0, 9000).tolist()
    Cache([*lengths, 20000], heads_q=heads_q, heads_kv=2, head_dim=128).check("gpu")
