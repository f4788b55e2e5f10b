"""retrieve_top_k: compared with a sort of all scores; ties, ragged sizes, worst orders, NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from cukit.core.device import TYPICAL_DEVICES
from cukit.errors import ArrayDtypeError, ArrayShapeError, ConfigError
from cukit.graph_memory import retrieve_top_k
from cukit.graph_memory.retrieve import plan_maxima, plan_select
from cukit.reference import graph_memory as reference
from tests.contract import another_order, dtype_of, poison_pool, random, to_device, to_host
from tests.quick_run import possible


@dataclass(frozen=True)
class Size:
    queries: int
    rows: int
    dim: int
    k: int


SIZES = [
    Size(1, 1, 8, 1),
    Size(3, 700, 24, 250),
    Size(70, 97, 128, 33),
    Size(130, 250, 40, 40),
    Size(17, 300, 136, 64),
    Size(33, 257, 256, 16),
]
LARGE = [
    Size(256, 1_000_003, 128, 64),
    Size(1, 200_000, 128, 10),
    Size(300, 70_001, 96, 256),
]
SCORE = {"float16": 2e-6, "bfloat16": 2e-6}
"""Tolerance of scores, relative to dim times the largest element of memory: the order of the sums
differs."""


def run(device, queries, memory, k):
    """Call retrieve_top_k twice, check that the results are bitwise equal, and return them."""
    placed = to_device(device, queries, memory)
    runs = []
    for repeat in range(2):
        poison_pool(device)
        with another_order(device, repeat):
            runs.append([to_host(each) for each in retrieve_top_k(*placed, k)])
    for first, again in zip(*runs, strict=True):
        assert first.tobytes() == again.tobytes()
    return runs[0]


def check(device, queries, memory, k):
    """Scores are those of the returned rows, and no other row has a higher score."""
    scores, indices = run(device, queries, memory, k)
    assert scores.dtype == np.float32
    assert indices.dtype == np.int32
    assert scores.shape == indices.shape == (len(queries), k)
    wide = memory.astype(np.float32)
    some = slice(None, None, max(1, len(queries) * len(memory) >> 23))
    for query, own, rows in zip(
        queries[some].astype(np.float32), scores[some], indices[some], strict=True
    ):
        exact = wide @ query
        allowed = SCORE[queries.dtype.name] * max(1.0, float(np.abs(wide).max()) * len(query))
        assert len(set(rows.tolist())) == k
        np.testing.assert_allclose(own, exact[rows], rtol=0, atol=allowed)
        order = np.lexsort((rows, -own))
        np.testing.assert_array_equal(order, np.arange(k))
        exact[rows] = -np.inf
        assert exact.max() <= own[-1] + allowed


@pytest.mark.parametrize("size", SIZES + LARGE, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@possible(lambda device, size: device == "gpu" or size in SIZES)
def test_no_better_row_is_missed(device, rng, size, dtype):
    queries = random(rng, (size.queries, size.dim), dtype)
    check(device, queries, random(rng, (size.rows, size.dim), dtype), size.k)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("order", ["rising", "falling", "equal", "few"])
def test_small_integers_are_exact_and_ties_go_to_the_lowest_index(device, rng, dtype, order):
    """Also if every row is better than all rows before it."""
    num_rows, dim, k = 500, 16, 40
    queries = np.eye(5, dim).astype(dtype_of(dtype))
    column = {
        "rising": np.arange(num_rows) // 2,
        "falling": -(np.arange(num_rows) // 3),
        "equal": np.zeros(num_rows),
        "few": rng.integers(-1, 2, num_rows),
    }[order]
    memory = np.repeat(column[:, None], dim, axis=1)
    memory = memory.astype(dtype_of(dtype))
    scores, indices = run(device, queries, memory, k)
    exact = queries.astype(np.float64) @ memory.astype(np.float64).T
    want = np.argsort(-exact, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(indices, want)
    np.testing.assert_array_equal(scores, np.take_along_axis(exact, want, axis=1))


def test_nan_counts_as_minus_infinity(device, rng):
    memory = random(rng, (70, 16), "float16")
    memory[[3, 40]] = np.nan
    memory[5] = -np.inf
    queries = np.abs(random(rng, (2, 16), "float16"))
    queries[1] = np.nan
    scores, indices = run(device, queries, memory, 70)
    assert indices[0, -3:].tolist() == [3, 5, 40]
    assert np.isneginf(scores[0, -3:]).all()
    assert np.isfinite(scores[0, :-3]).all()
    np.testing.assert_array_equal(indices[1], np.arange(70))
    assert np.isneginf(scores[1]).all()


def test_the_reference_in_parts_equals_a_sort(rng, monkeypatch):
    queries, memory = rng.standard_normal((9, 6)), rng.integers(-2, 3, (400, 6)).astype(np.float64)
    want = np.argsort(-(queries @ memory.T), axis=1, kind="stable")[:, :12]
    monkeypatch.setattr(reference, "_SCORES_AT_ONCE", 1000)
    np.testing.assert_array_equal(reference.retrieve_top_k(queries, memory, 12).indices, want)


def test_queries_in_several_batches(device, rng, monkeypatch):
    if device == "cpu":
        pytest.skip("a requirement of the kernels")
    from cukit.graph_memory import retrieve

    monkeypatch.setattr(retrieve, "_MAXIMA_BYTES", 1)
    retrieve._prepare.forget()
    check(device, random(rng, (260, 40), "float16"), random(rng, (40, 40), "float16"), 3)
    retrieve._prepare.forget()


def test_errors_name_the_argument(rng):
    queries, memory = random(rng, (3, 8), "float16"), random(rng, (9, 8), "float16")
    with pytest.raises(ArrayShapeError, match=r"memory must have shape \(any, 8\)"):
        retrieve_top_k(queries, memory[:, :4].copy(), 2)
    with pytest.raises(ArrayDtypeError, match="memory must have the dtype of queries"):
        retrieve_top_k(queries, memory.astype(np.float32), 2)
    for k in (0, 257, 1.5, None):
        with pytest.raises(ConfigError, match="k must be an integer of 1 or more"):
            retrieve_top_k(queries, memory, k)
    with pytest.raises(ConfigError, match=r"k must be at most the number of rows \(9\), got 10"):
        retrieve_top_k(queries, memory, 10)


def test_limits_of_the_kernel_are_named(device, rng):
    if device == "cpu":
        pytest.skip("requirements of the kernels")
    for dim in (12, 264):
        arrays = to_device(
            device, random(rng, (2, dim), "float16"), random(rng, (5, dim), "float16")
        )
        with pytest.raises(ConfigError, match="dim must be a multiple of 8"):
            retrieve_top_k(*arrays, 1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_120"])
def test_the_plan(arch):
    device = TYPICAL_DEVICES[arch]
    config = plan_maxima(256, 1_000_000, 128, "bfloat16", device)
    assert (config.queries, config.blocks) == (256, device.num_sms)
    assert plan_maxima(5, 1000, 128, "bfloat16", device).blocks == 8
    for count in (1, 31, 31250, 1_000_000, 1 << 26):
        for k in (1, 64, 256):
            for num_queries in (1, 256, None):
                select = plan_select(count, k, num_queries, device)
                share = -(-count // select.parts)
                assert k * -(-share // select.threads) <= select.capacity
                assert k <= select.threads
                assert select.parts == 1 or select.parts * k < count


def test_parts_of_a_row_are_merged(device, rng, monkeypatch):
    """Parts are merged in several steps, as for tens of millions of rows."""
    if device == "cpu":
        pytest.skip("a requirement of the kernels")
    from cukit.graph_memory import retrieve

    parts = iter((8, 2, 1, 1))  # of the maxima, of two merges, of the new scores
    monkeypatch.setattr(
        retrieve, "plan_select", lambda *_: retrieve.SelectConfig(256, 4096, next(parts))
    )
    retrieve._prepare.forget()
    check(device, random(rng, (2, 64), "float16"), random(rng, (500, 64), "float16"), 3)
    retrieve._prepare.forget()
