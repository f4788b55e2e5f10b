"""Paged attention with many queries per request, on the Hopper forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import cukit as ck
from cukit.attention.flash._problem import AttentionProblem
from cukit.attention.paged import _paged_gather, _paged_prefill
from cukit.attention.paged._paged_prefill_plan import (
    PagedForwardConfig,
    few_packed_queries,
    plan_paged_prefill,
    prefers_gather,
    prefers_prefill,
)
from cukit.core import backend
from cukit.core.arrays import bfloat16, float16
from cukit.core.device import KIB, current_device, typical_device
from cukit.errors import ArrayDtypeError, ArrayShapeError, ConfigError
from tests.attention.test_paged_attention import (
    DTYPES,
    Cache,
    check_codes,
    check_int4,
    check_recent,
)
from tests.contract import array_module
from tests.quick_run import emulated
from tests.recorder import Recorder

H200 = typical_device("sm_90")
PROBLEM = AttentionProblem(8, 2048, 1, 32, 8, 128, "bfloat16", True)


@pytest.fixture
def prefill(device: str, fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """`device`, with every supported call on the Hopper forward."""
    if device != "cpu" and current_device().arch != "sm_90":
        pytest.skip("the kernel is for Hopper")
    monkeypatch.setattr(_paged_prefill, "prefers_prefill", lambda *_, **__: True)
    monkeypatch.setattr(_paged_gather, "prefers_gather", lambda *_, **__: False)
    return device


@pytest.fixture
def copied_cache(prefill: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """`prefill`; every call first copies the keys and values of up to three requests at a time."""
    monkeypatch.setattr(_paged_gather, "prefers_gather", lambda *_, **__: True)
    monkeypatch.setattr(_paged_gather, "_MAX_REQUESTS", 3)
    return prefill


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 7, 16, 24, 64, 256])
@pytest.mark.parametrize("lengths", [[140], [0, 77, 200, 30, 300]], ids=str)
@emulated(
    lambda lengths, block_size, dtype: (
        len(lengths) == 5 and (dtype == bfloat16) == (block_size % 16 == 0)
    )
)
def test_any_blocks(prefill: str, dtype: Any, block_size: int, lengths: list[int]) -> None:
    """Any block size; also requests without keys, and with fewer keys than queries."""
    Cache(lengths, block_size=block_size, dtype=dtype, seq_q=70).check(prefill)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("block_size", [7, 16])
@pytest.mark.parametrize(("heads_q", "heads_kv", "seq_q"), [(1, 1, 200), (6, 2, 33)])
@emulated(
    lambda head_dim, heads_q, block_size: (
        (heads_q == 1) == (block_size == 7) == (head_dim in (80, 128))
    )
)
def test_any_heads(
    prefill: str, head_dim: int, block_size: int, heads_q: int, heads_kv: int, seq_q: int
) -> None:
    shape = {"head_dim": head_dim, "heads_q": heads_q, "heads_kv": heads_kv, "seq_q": seq_q}
    Cache([250, 0, 210], block_size=block_size, **shape).check(prefill)


def test_values_may_be_narrower(prefill: str) -> None:
    Cache([190, 3], head_dim=192, value_dim=128, seq_q=40).check(prefill)


@pytest.mark.parametrize("block_size", [7, 8])
@pytest.mark.parametrize(
    ("options", "hidden"),
    [
        ({"causal": False}, 0),
        ({"window_size": (20, 0)}, 61),
        ({"causal": False, "window_size": (30, 5)}, 51),
        ({"softcap": 2.0, "scale": 0.7}, 0),
        ({"sinks": np.linspace(-3, 3, 4, dtype=np.float32)}, 0),
        ({"window_size": (9, None), "softcap": 1.5, "sinks": np.full(4, -np.inf, np.float32)}, 72),
    ],
    ids=str,
)
@emulated(lambda block_size, hidden: (block_size == 7) == (hidden == 51))
def test_options(prefill: str, options: dict[str, Any], hidden: int, block_size: int) -> None:
    """Keys left of a request's window are NaN, also in blocks that are partly within the window."""
    cache = Cache([152, 300, 0], seq_q=70, hidden=hidden, block_size=block_size)
    cache.check(prefill, **options)


@pytest.mark.parametrize("block_size", [7, 16])
@pytest.mark.parametrize("window", [None, (40, 0)], ids=str)
def test_packed_queries(prefill: str, block_size: int, window: Any) -> None:
    """Whole prompts, a chunk of a prompt, decode steps, and requests without queries or keys."""
    counts = [70, 1, 0, 130, 1, 5]
    cache = Cache([70, 200, 40, 333, 1, 0], block_size=block_size, dtype=float16)
    ends = np.cumsum([0, *counts]).astype(np.int32)
    generator = np.random.default_rng(7)
    cache.q = generator.standard_normal((ends[-1], 4, 64), np.float32).astype(float16)
    cache.check(prefill, cu_seqlens_q=ends, window_size=window)


@pytest.mark.parametrize("heads_q", [1, 2])
def test_a_thread_block_processes_tiles_of_a_window_one_after_the_other(
    prefill: str, monkeypatch: pytest.MonkeyPatch, heads_q: int
) -> None:
    """The window of each query tile begins at a different key within its first key tile."""
    monkeypatch.setattr(PagedForwardConfig, "grid", lambda *_: 1)
    cache = Cache([384], heads_q=heads_q, heads_kv=1, head_dim=64, seq_q=384)
    cache.check(prefill, window_size=(100, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 7, 64])
@pytest.mark.parametrize(
    ("shape", "options", "hidden"),
    [
        ({"heads_q": 6, "heads_kv": 2, "head_dim": 80}, {}, 0),
        ({"head_dim": 192, "value_dim": 128}, {"causal": False}, 0),
        ({"head_dim": 256}, {"window_size": (20, 0)}, 61),
        ({}, {"causal": False, "window_size": (30, 5), "softcap": 2.0}, 51),
        ({}, {"window_size": (9, None), "sinks": np.full(4, -np.inf, np.float32)}, 72),
    ],
    ids=str,
)
@emulated(
    lambda hidden, block_size, dtype: (
        (hidden in (0, 72)) == (block_size == 7) == (dtype == bfloat16)
    )
)
def test_copied_caches(
    copied_cache: str, shape: Any, options: Any, hidden: int, block_size: int, dtype: Any
) -> None:
    """Also requests without keys, and with fewer keys than queries. Masked keys are NaN."""
    lengths = [152, 300, 0, 90, 71, 33, 200]
    lengths = [length for length in lengths if not hidden or length > 70 + 80] + [0] * bool(hidden)
    cache = Cache(lengths, seq_q=70, hidden=hidden, block_size=block_size, dtype=dtype, **shape)
    cache.check(copied_cache, **options)


@pytest.mark.parametrize("window", [None, (40, 0)], ids=str)
def test_copies_for_packed_queries(copied_cache: str, window: Any) -> None:
    counts = [70, 1, 0, 130, 1, 5, 64]
    cache = Cache([70, 200, 40, 333, 1, 0, 64], block_size=5, dtype=float16)
    ends = np.cumsum([0, *counts]).astype(np.int32)
    generator = np.random.default_rng(7)
    cache.q = generator.standard_normal((ends[-1], 4, 64), np.float32).astype(float16)
    cache.check(copied_cache, cu_seqlens_q=ends, window_size=window)


@pytest.mark.parametrize("codes", [ck.int8, ck.float8_e4m3], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shared", ["none", "cache", "head", "key"])
@pytest.mark.parametrize(
    ("head_dim", "packed"), [(64, True), (80, False), (128, True), (256, False)]
)
@emulated(
    lambda head_dim, shared, codes: head_dim == 80 and (shared == "key") == (codes is ck.int8)
)
def test_caches_of_codes(
    prefill: str, codes: Any, shared: str, head_dim: int, packed: bool
) -> None:
    ends = np.array([0, 70, 71, 71, 200, 300], np.int32) if packed else None
    check_codes(prefill, codes, shared, head_dim, seq_q=70, ends=ends)


@pytest.mark.parametrize(
    ("head_dim", "heads_q", "dtype", "options"),
    [
        (128, 6, bfloat16, {}),
        (64, 2, float16, {"window_size": (70, None), "sinks": np.array([0.5, 1], np.float32)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("group_rows", [32, 64])
@emulated(lambda head_dim, group_rows: (head_dim == 64) == (group_rows == 32))
def test_caches_of_int4(
    prefill: str, head_dim: int, heads_q: int, dtype: Any, options: dict[str, Any], group_rows: int
) -> None:
    check_int4(prefill, head_dim, heads_q, 50, options, group_rows)
    check_recent(prefill, head_dim, heads_q, 50, dtype, options, group_rows)


def test_no_queries(prefill: str) -> None:
    xp = array_module(prefill)
    cache = Cache([30, 20])
    arrays = [xp.asarray(a) for a in (cache.q[:0, 0], cache.k, cache.v, cache.table, cache.lengths)]
    ends = xp.zeros(3, np.int32)
    out, lse = ck.paged_attention(*arrays, cu_seqlens_q=ends, return_lse=True)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (4, 0)


def test_a_request_does_not_depend_on_the_batch(prefill: str) -> None:
    """Bitwise equal alone and in a batch, with other blocks."""
    xp = array_module(prefill)
    alone = Cache([210], seq_q=70, seed=1)
    among = Cache([90, 210, 0], seq_q=70, seed=2)
    places = np.arange(210)
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


@pytest.mark.gpu
@pytest.mark.parametrize("ragged", [False, True])
def test_a_graph_replays_with_other_lengths(ragged: bool) -> None:
    import cupy

    if current_device().arch != "sm_90":
        pytest.skip("the kernel is for Hopper")
    cache = Cache([700, 1500, 650], seq_q=600, heads_q=32, heads_kv=8, seed=3)
    arrays = [cupy.asarray(a) for a in (cache.q, cache.k, cache.v, cache.table, cache.lengths)]
    given = {}
    if ragged:
        arrays[0] = arrays[0].reshape(1800, 32, 64)
        given["cu_seqlens_q"] = cupy.asarray([0, 600, 1200, 1800], np.int32)
    out = cupy.empty_like(arrays[0])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        ck.paged_attention(*arrays, out=out, **given)
        stream.begin_capture()
        ck.paged_attention(*arrays, out=out, **given)
        graph = stream.end_capture()
        for lengths in ([700, 1500, 650], [5, 1, 0], [100, 1300, 2]):
            arrays[4][...] = cupy.asarray(lengths, np.int32)
            if ragged:
                given["cu_seqlens_q"][1:3] = cupy.asarray([lengths[0], 900], np.int32)
            graph.launch(stream)
            stream.synchronize()
            assert (out == ck.paged_attention(*arrays, **given)).all()


@pytest.mark.gpu
def test_caches_beyond_32_bit_offsets() -> None:
    """Blocks at both ends of caches of more than 2^31 elements."""
    import cupy

    if current_device().arch != "sm_90":
        pytest.skip("the kernel is for Hopper")
    small = Cache([600, 700], seq_q=512, heads_q=16, heads_kv=4, head_dim=128)
    blocks = 2**31 // (16 * 4 * 128) + 100
    try:
        caches = [cupy.full((blocks, 16, 4, 128), np.nan, bfloat16) for _ in range(2)]
    except cupy.cuda.memory.OutOfMemoryError:
        pytest.skip("the caches do not fit")
    rows = small.k.shape[0] // 2
    for cache, values in zip(caches, (small.k, small.v), strict=True):
        cache[:rows] = cupy.asarray(values[:rows])
        cache[rows - len(values) :] = cupy.asarray(values[rows:])
    table = np.where(small.table < rows, small.table, small.table + blocks - len(small.k))
    given = [cupy.asarray(a) for a in (small.q, small.k, small.v, small.table, small.lengths)]
    want = ck.paged_attention(*given)
    got = ck.paged_attention(given[0], *caches, cupy.asarray(table.astype(np.int32)), given[4])
    assert (got == want).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cu_seqlens_q": np.array([0, 3], np.int64)}, ArrayDtypeError, "cu_seqlens_q"),
        ({"cu_seqlens_q": np.array([0, 2], np.int32)}, ConfigError, "from 0 to 3"),
        ({"cu_seqlens_q": np.array([], np.int32)}, ArrayShapeError, "cu_seqlens_q"),
        ({"cu_seqlens_q": np.array(0, np.int32)}, ArrayShapeError, "cu_seqlens_q"),
        ({"cu_seqlens_q": np.array([0, 1, 3], np.int32)}, ArrayShapeError, "block_table"),
        ({"q": np.zeros((1, 3, 4, 64), np.float32)}, ArrayShapeError, "q"),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {
        "q": np.zeros((3, 4, 64), np.float32),
        "k_cache": np.zeros((4, 16, 2, 64), np.float32),
        "v_cache": np.zeros((4, 16, 2, 64), np.float32),
        "block_table": np.array([[0, 1]], np.int32),
        "seq_lens": np.array([20], np.int32),
        "cu_seqlens_q": np.array([0, 3], np.int32),
    }
    ck.paged_attention(**arguments)
    with pytest.raises(error, match=message):
        ck.paged_attention(**(arguments | change))


def test_choice_of_the_kernel() -> None:
    def prefers(batch: int, seq_q: int, heads: tuple[int, int] = (32, 8), **options: Any) -> bool:
        problem = replace(
            PROBLEM, batch=batch, seq_len_q=seq_q, num_heads_q=heads[0], num_heads_kv=heads[1]
        )
        options.setdefault("batch_invariant", False)
        return prefers_prefill(problem, H200, **options)

    assert prefers(8, 2048)
    assert prefers(2, 8192)
    assert prefers(4, 1024)
    assert prefers(64, 64)
    assert prefers(64, 64, cache_format="int8")
    assert prefers(64, 64, cache_format="int4")
    assert not prefers(64, 16, cache_format="float8_e4m3")
    assert not prefers(64, 1)
    assert not prefers(64, 8)
    assert not prefers(1, 32), "32 tiles leave most SMs idle"
    assert not prefers(64, 32, (8, 8)), "one tile of rows in the decode kernel"
    assert prefers(1, 64, batch_invariant=True) == prefers(500, 64, batch_invariant=True)
    assert not prefers_prefill(PROBLEM, typical_device("sm_80"), batch_invariant=False)
    assert not prefers_prefill(PROBLEM, typical_device("sm_100"), batch_invariant=False)


def test_choice_of_caches_to_copy() -> None:
    """The cache is copied if the copy saves more time in the forward than it takes, as measured
    (profiling/notes/paged_prefill.md)."""

    def prefers(batch: int, seq_q: int, block_size: int, **changes: Any) -> bool:
        problem = replace(PROBLEM, batch=batch, seq_len_q=seq_q, **changes)
        slowdown = plan_paged_prefill(problem, block_size, True, H200).slowdown
        return prefers_gather(problem, slowdown, H200, batch_invariant=False)

    narrow = {"head_dim": 64}
    wide = {"head_dim": 256, "num_heads_q": 16, "num_heads_kv": 4}
    for copied in (
        (8, 2048, 1), (2, 8192, 7), (64, 64, 1), (1, 512, 1), (16, 256, 1),
        (8, 2048, 8), (2, 8192, 8), (4, 1024, 8),
        (2, 8192, 16), (1, 32768, 16), (1, 32768, 32), (1, 4096, 16),
    ):  # fmt: skip
        assert prefers(*copied), copied
    for direct in (
        (4, 128, 1), (8, 2048, 16), (8, 2048, 32), (2, 8192, 32), (2, 8192, 64), (2, 8192, 128),
        (4, 1024, 16), (64, 64, 16), (8, 256, 16),
    ):  # fmt: skip
        assert not prefers(*direct), direct
    assert prefers(2, 8192, 8, **narrow)
    assert not prefers(8, 2048, 16, **narrow)
    assert prefers(2, 8192, 16, **wide)
    assert prefers(8, 2048, 8, **wide)
    assert not prefers(8, 2048, 16, **wide)
    assert not prefers(4, 1024, 64, **wide)
    assert not prefers(2, 8192, 80, **wide), "blocks are whole tiles"
    assert prefers(2, 8192, 16, head_dim=96)
    assert prefers(2, 8192, 16, head_dim=192)
    assert prefers(1, 8 * 2048 * 8, 1, varlen=True)
    assert not prefers(512, 512, 1, varlen=True), "one query per request"


@pytest.mark.parametrize(
    ("block_size", "keys", "copied"), [(16, 8192, True), (16, 1 << 20, False), (1, 1 << 20, True)]
)
def test_a_large_cache_is_copied_only_if_that_saves_much(
    block_size: int, keys: int, copied: bool
) -> None:
    """The block table has room for `keys` keys."""
    recorder = Recorder("sm_90")
    before = backend.activate(recorder)
    try:
        q = np.zeros((2, 8192, 32, 128), bfloat16)
        cache = np.zeros((1, block_size, 8, 128), bfloat16)
        table = np.zeros((2, keys // block_size), np.int32)
        ck.paged_attention(q, cache, cache, table, np.zeros(2, np.int32))
    finally:
        backend.activate(before)
    assert ("gather_kv" in [spec.entry for spec in recorder.loaded]) == copied


def test_small_packed_batches_of_few_queries_take_the_decode_kernel() -> None:
    packed = replace(PROBLEM, varlen=True)
    assert few_packed_queries(replace(packed, batch=2, seq_len_q=16))
    assert not few_packed_queries(replace(packed, batch=2, seq_len_q=17))
    assert not few_packed_queries(replace(packed, batch=8, seq_len_q=8)), "two launches"


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_boxes_hold_rows_of_one_block(head_dim: int) -> None:
    for block_size in range(1, 257):
        config = plan_paged_prefill(replace(PROBLEM, head_dim=head_dim), block_size, True, H200)
        rows, tile = config.page_rows, config.tiling.tile_n
        assert rows == 0 or (rows % 8 == 0 == tile % rows == block_size % rows)
        assert (rows == 0) == (block_size % 8 != 0)
        assert config.spec().shared_bytes + 2 * KIB <= H200.shared_bytes_per_block
    assert plan_paged_prefill(PROBLEM, 16, False, H200).page_rows == 0


def test_grids_are_bounded_by_their_tiles() -> None:
    config = plan_paged_prefill(PROBLEM, 16, True, H200)
    assert config.grid(8 * 2048, 8) == H200.num_sms
    small = plan_paged_prefill(replace(PROBLEM, batch=1, num_heads_q=2), 16, True, H200)
    assert small.grid(100, 1) == 2
