"""Block-sparse matrices: construction, errors, masks, transposes, and schedules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cukit.core.device import KIB, TYPICAL_DEVICES
from cukit.errors import ArrayDtypeError, ArrayError, ArrayShapeError, ConfigError
from cukit.gemm import BlockPattern, BlockSparseMatrix, bsr_from_mask, create_sparse_mask
from cukit.gemm.sparse._bsr_plan import (
    SAMPLED_TILINGS,
    TILINGS,
    Transposed,
    plan_bsr_matmul,
    plan_bsr_sampled,
)
from cukit.gemm.sparse._bsr_schedule import (
    assign_tiles,
    group_rows,
    matmul_work,
    sampled_pieces,
    sampled_work,
)
from tests.contract import random, to_device, to_host

HOPPER, A100 = TYPICAL_DEVICES["sm_90"], TYPICAL_DEVICES["sm_80"]

masks = st.integers(0, 7).flatmap(
    lambda rows: st.integers(1, 9).flatmap(
        lambda columns: st.lists(
            st.lists(st.booleans(), min_size=columns, max_size=columns),
            min_size=rows,
            max_size=rows,
        ).map(lambda mask: np.array(mask, bool).reshape(rows, columns))
    )
)


@settings(max_examples=40, deadline=None)
@given(masks)
def test_patterns_and_their_transposes(mask):
    pattern = BlockPattern.from_mask(mask, 16)
    np.testing.assert_array_equal(pattern.mask, mask)
    transposed, numbers = pattern.transposed
    np.testing.assert_array_equal(transposed.mask, mask.T)
    np.testing.assert_array_equal(pattern.rows[numbers], transposed.indices)
    np.testing.assert_array_equal(pattern.indices[numbers], transposed.rows)


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(rng, device, dtype):
    mask = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1]], bool)
    kept = np.kron(mask, np.ones((16, 16), bool))
    dense = np.where(kept, random(rng, kept.shape, dtype), 0).astype(random(rng, (), dtype).dtype)
    (placed,) = to_device(device, dense)
    found = BlockSparseMatrix.from_dense(placed, block_size=16)
    chosen = bsr_from_mask(placed, mask, 16)
    for matrix in (found, chosen):
        np.testing.assert_array_equal(matrix.pattern.mask, mask)
        np.testing.assert_array_equal(to_host(matrix.to_dense()), dense)
    again = BlockSparseMatrix.from_arrays(
        found.values, found.pattern.indices, found.pattern.indptr, found.shape
    )
    np.testing.assert_array_equal(to_host(again.to_dense()), dense)
    assert found.with_values(found.values).pattern is found.pattern


INDPTR, INDICES = np.array([0, 2, 3]), np.array([0, 2, 1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"indptr": INDPTR[:2]}, ArrayShapeError, "indptr of 2 block rows must have 3 elements"),
        ({"indptr": INDPTR + 1}, ArrayError, "end at the number of indices, 3, got 1 and 4"),
        ({"indptr": np.array([0, 4, 3])}, ArrayError, "must not decrease, got 4 followed by 3"),
        ({"indices": INDICES + 1}, ArrayError, "indices must be 0 to 2, got 1 to 3"),
        (
            {"indices": INDICES * 0 + 1},
            ArrayError,
            "strictly ascending, got 1 followed by 1",
        ),
        ({"indices": INDICES / 1.0}, ArrayDtypeError, "indices must be int32, int64, got float64"),
        ({"block_size": 24}, ConfigError, "block_size must be one of 16, 32, 64, 128, got 24"),
        ({"shape": (32, 40)}, ArrayShapeError, r"multiples of 16, got \(32, 40\)"),
    ],
)
def test_invalid_pattern_is_rejected(arguments, error, message):
    defaults = {"indptr": INDPTR, "indices": INDICES, "shape": (32, 48), "block_size": 16}
    with pytest.raises(error, match=message):
        BlockPattern(**{**defaults, **arguments})


def test_mismatched_values_are_rejected():
    pattern = BlockPattern(INDPTR, INDICES, (32, 48), 16)
    with pytest.raises(ArrayShapeError, match=r"values must have shape \(3, 16, 16\)"):
        BlockSparseMatrix(np.zeros((2, 16, 16), np.float32), pattern)
    with pytest.raises(ArrayShapeError, match=r"must have the pattern's shape \(32, 48\)"):
        BlockSparseMatrix.from_dense(np.zeros((32, 32), np.float32), pattern)
    with pytest.raises(ConfigError, match="a pattern or a block_size"):
        BlockSparseMatrix.from_dense(np.zeros((32, 32), np.float32))


def test_masks():
    weight = np.kron(np.arange(12.0).reshape(3, 4), np.ones((16, 16)))
    largest = create_sparse_mask((48, 64), 16, 0.25, kind="magnitude", weight=weight)
    np.testing.assert_array_equal(np.argwhere(largest), [[2, 1], [2, 2], [2, 3]])
    banded = create_sparse_mask((64, 64), 16, 0.625, kind="banded")
    rows, columns = np.nonzero(banded)
    assert banded.sum() == 10
    assert abs(rows - columns).max() == 1
    drawn = [create_sparse_mask((128, 128), 16, 0.3, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0].sum() == round(0.3 * 64)
    assert (drawn[0] == drawn[1]).all()
    assert (drawn[0] != drawn[2]).any()
    for arguments, message in [
        ({"density": 1.5}, "density must be a finite number"),
        ({"kind": "odd"}, "kind must be one of"),
        ({"kind": "magnitude"}, "weight is required with kind='magnitude'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            create_sparse_mask(**{"shape": (32, 32), "block_size": 16, "density": 0.5, **arguments})


# ---- Schedules ----


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 9))
def test_tiles_are_distributed_evenly(costs, num_blocks):
    items = np.repeat(np.arange(len(costs), dtype=np.int32)[:, None], 4, axis=1)
    work = assign_tiles(items, np.array(costs, int), num_blocks)
    assert (work[:, -1] == -1).all()
    shares = [row[row[:, 0] >= 0, 0] for row in work]
    assert sorted(np.concatenate(shares)) == list(range(len(costs)))
    loads = [sum(costs[tile] for tile in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)
    assert all((np.diff(share) > 0).all() for share in shares)


def test_thread_blocks_have_similar_loads_for_a_random_pattern(rng):
    """The largest load is within 2% of the mean (3% without exchanges)."""
    mask = rng.random((128, 128)) < 0.1
    work = matmul_work(BlockPattern.from_mask(mask, 64).indptr, 4096, 64, 512, 132)
    blocks = np.where(work[..., 0] < 0, 0, work[..., 3] - work[..., 2]).sum(axis=1)
    loads = blocks * 64 + (work[..., 0] >= 0).sum(axis=1) * 128
    assert loads.max() < 1.02 * loads.mean()


@settings(max_examples=40, deadline=None)
@given(masks, st.integers(1, 300))
def test_the_work_of_a_product_covers_it_once(mask, n):
    pattern = BlockPattern.from_mask(mask, 64)
    work = matmul_work(pattern.indptr, n, 64, 128, 5).reshape(-1, 4)
    work = work[work[:, 0] >= 0]
    tiles = {(row, column) for row, column, *_ in work.tolist()}
    assert len(tiles) == len(work) == len(mask) * -(-n // 128)
    for row, _, begin, end in work:
        if mask[row].any():
            assert (begin, end) == tuple(pattern.indptr[row : row + 2])
        else:
            assert (begin, end) == (pattern.num_blocks, pattern.num_blocks + 1)


@settings(max_examples=40, deadline=None)
@given(masks, st.integers(1, 4))
def test_the_work_of_a_sampled_product_covers_each_block_once(mask, most):
    pattern = BlockPattern.from_mask(mask, 64)
    work = sampled_work(pattern.indptr, 7, most, 5).reshape(-1, 4)
    work = work[work[:, 0] >= 0]
    blocks = [(row, at) for row, first, count, _ in work for at in range(first, first + count)]
    assert sorted(blocks) == list(zip(pattern.rows, range(pattern.num_blocks), strict=True))
    assert (work[:, 2] <= most).all()
    assert (work[:, 3] == 7).all()


@settings(max_examples=40, deadline=None)
@given(masks, st.sampled_from([1, 2, 4]))
def test_groups_of_rows_list_each_block_once(mask, size):
    pattern = BlockPattern.from_mask(mask, 16)
    groups = group_rows(*pattern.entries(False), mask.shape[1], size)
    found = np.zeros_like(mask)
    for group in range(len(groups.starts) - 1):
        entries = slice(*groups.starts[group : group + 2])
        assert (np.diff(groups.columns[entries]) > 0).all()
        for column, indices in zip(
            groups.columns[entries], groups.block_indices[entries], strict=True
        ):
            for slot in np.flatnonzero(indices >= 0):
                row = group * size + slot
                assert pattern.rows[indices[slot]] == row
                assert pattern.indices[indices[slot]] == column
                found[row, column] = True
    np.testing.assert_array_equal(found, mask)
    pieces = sampled_pieces(groups.starts, 2)
    assert (pieces[:, 2] - pieces[:, 1]).sum() == groups.starts[-1]
    assert ((pieces[:, 2] - pieces[:, 1]) <= 2).all()


# ---- Plans ----


@pytest.mark.parametrize(
    "tiling",
    [each for tilings in (*TILINGS.values(), *SAMPLED_TILINGS.values()) for each in tilings],
)
def test_tilings_fit_hopper(tiling):
    assert tiling.shared_bytes + KIB <= HOPPER.shared_bytes_per_block


@pytest.mark.parametrize(
    ("block", "block_rows", "n", "device", "columns"),
    [
        (64, 128, 4096, HOPPER, 512),
        (64, 128, 1024, HOPPER, 256),
        (64, 128, 64, HOPPER, 128),
        (128, 64, 4096, HOPPER, 256),
        (128, 64, 512, HOPPER, 128),
        (32, 256, 4096, HOPPER, 512),
        (16, 512, 512, HOPPER, 256),
        (64, 128, 4096, A100, None),
    ],
)
def test_the_plan(block, block_rows, n, device, columns):
    transposed = Transposed(False, False, False)
    tiling = plan_bsr_matmul(block, block_rows, n, "bfloat16", transposed, device).tiling
    assert (None if tiling is None else tiling.columns) == columns


def test_transposed_operands_are_read_in_whole_cache_lines():
    """A transposed dense operand is read 64 elements at a time if the block size allows."""
    for block, tile_k in ((16, 32), (32, 32), (64, 64), (128, 64)):
        transposed = Transposed(False, True, True)
        config = plan_bsr_matmul(block, 8192 // block, 8192, "bfloat16", transposed, HOPPER)
        assert config.tiling is not None
        assert config.tiling.tile_k == tile_k


def test_clusters_need_an_even_number_of_column_tiles():
    for n, cluster in ((4096, 2), (4352, 1), (4400, 2)):
        transposed = Transposed(False, False, False)
        tiling = plan_bsr_matmul(128, 64, n, "bfloat16", transposed, HOPPER).tiling
        assert tiling is not None
        assert (tiling.columns, tiling.cluster) == (256, cluster)


@pytest.mark.parametrize(("counts", "columns"), [([8, 8], 512), ([4, 4], 256), ([1, 2], 128)])
def test_the_plan_of_a_sampled_product_computes_few_columns(counts, columns):
    starts = np.concatenate([[0], np.cumsum(counts)])
    config = plan_bsr_sampled(starts, 64, "bfloat16", False, False, HOPPER)
    assert config.tiling is not None
    assert config.tiling.columns == columns
