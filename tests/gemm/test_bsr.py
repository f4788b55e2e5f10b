"""bsr_matmul: sparse times dense, dense times sparse, and blocks of a dense product."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from cukit.errors import ArrayDtypeError, ArrayLayoutError, ArrayShapeError, ConfigError
from cukit.gemm import BlockPattern, BlockSparseMatrix, bsr_matmul, create_sparse_mask
from cukit.gemm.sparse import _bsr_launch
from cukit.gemm.sparse._bsr_launch import MatmulSm80, MatmulSm90, SampledSm80, SampledSm90
from cukit.gemm.sparse._bsr_plan import (
    SAMPLED_TILINGS,
    TILINGS,
    BsrMatmulConfig,
    BsrSampledConfig,
    Transposed,
    prefers_dense,
)
from cukit.gemm.sparse._bsr_schedule import group_rows, matmul_work, pad_groups
from cukit.reference import bsr as reference
from tests.contract import (
    another_order,
    array_module,
    assert_close,
    check_against_reference,
    poisoned,
    random,
    to_device,
    to_host,
)

# Masks by block size, with an empty block row, block rows of different lengths, and a partly filled
# last group of block rows.
MASKS = {
    16: [[1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 0], [1, 0, 0, 0, 0]] * 2,
    32: [[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 1]],
    64: [[1, 0, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 0, 0, 0]],
    128: [[1, 1], [0, 0], [0, 1]],
}
HOPPER = [tiling for tilings in TILINGS.values() for tiling in tilings]
HOPPER_SAMPLED = [tiling for tilings in SAMPLED_TILINGS.values() for tiling in tilings]


def pattern_of(block):
    return BlockPattern.from_mask(np.array(MASKS[block], bool), block)


def values_of(rng, pattern, dtype):
    shape = (pattern.num_blocks, pattern.block_size, pattern.block_size)
    return random(rng, shape, dtype, scale=max(pattern.shape) ** -0.5)


def name(tiling):
    return f"{tiling.block}-{tiling.columns}" + ("-cluster" if tiling.cluster > 1 else "")


@pytest.mark.parametrize("block", MASKS)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_sparse_times_dense(device, rng, block, transpose_a, transpose_b):
    pattern = pattern_of(block)
    inner = pattern.shape[not transpose_a]
    dense = random(rng, (72, inner) if transpose_b else (inner, 72), "bfloat16")
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    check_against_reference(
        lambda values, b: bsr_matmul(BlockSparseMatrix(values, pattern), b, **options),
        lambda values, b: reference.bsr_matmul(BlockSparseMatrix(values, pattern), b, **options),
        (values_of(rng, pattern, "bfloat16"), dense),
        device=device,
    )


@pytest.mark.parametrize("block", MASKS)
@pytest.mark.parametrize("transpose_b", [False, True])
def test_dense_times_sparse(device, rng, block, transpose_b):
    """Activations [batch, seq_len, features], as in a sparse linear layer and its backward pass."""
    pattern = pattern_of(block)
    x = random(rng, (3, 11, pattern.shape[transpose_b]), "float16")
    check_against_reference(
        lambda x, values: bsr_matmul(
            x, BlockSparseMatrix(values, pattern), transpose_b=transpose_b
        ),
        lambda x, values: reference.bsr_matmul(
            x, BlockSparseMatrix(values, pattern), transpose_b=transpose_b
        ),
        (x, values_of(rng, pattern, "float16")),
        device=device,
    )


@pytest.mark.parametrize("block", MASKS)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_blocks_of_a_dense_product(device, rng, block, transpose_a, transpose_b):
    """The inner extent, 104, is not a multiple of a k step."""
    pattern = pattern_of(block)
    (m, n), k = pattern.shape, 104
    a = random(rng, (k, m) if transpose_a else (m, k), "bfloat16", scale=k**-0.5)
    b = random(rng, (n, k) if transpose_b else (k, n), "bfloat16")
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b, "pattern": pattern}
    check_against_reference(
        lambda a, b: bsr_matmul(a, b, **options).values,
        partial(reference.bsr_matmul, **options),
        (a, b),
        device=device,
    )


@pytest.mark.parametrize("tiling", HOPPER, ids=name)
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("wide_box", [False, True])
def test_every_tiling(device, rng, monkeypatch, tiling, flag, wide_box):
    """Results are wider than a tile; block rows have different lengths, and one is empty. A grid
    for two SMs, so thread blocks process several tiles."""
    if flag and wide_box:
        pytest.skip("a transposed operand has one box anyway")
    if device == "cpu":
        pytest.skip("the CPU has no such kernels")
    pattern = pattern_of(tiling.block)
    m, k = pattern.shape[::-1] if flag else pattern.shape
    n = tiling.columns + (64 if wide_box else 40)
    values = values_of(rng, pattern, "bfloat16")
    dense = random(rng, (n, k) if flag else (k, n), "bfloat16")
    out = poisoned(device, (n, m) if flag else (m, n), "bfloat16")
    config = BsrMatmulConfig(
        "bfloat16", tiling.block, Transposed(flag, flag, flag), tiling, wide_box
    )
    placed = to_device(device, values, dense)
    xp = array_module(device)
    two_sms = replace(_bsr_launch.current_device(), num_sms=2)
    monkeypatch.setattr(_bsr_launch, "current_device", lambda: two_sms)
    launch = MatmulSm90(config, pattern, m, n, xp)
    for repeat in range(2):
        with another_order(device, repeat):
            launch(*placed, out)
    options = {"transpose_a": flag, "transpose_b": flag}
    plain = reference.bsr_matmul(BlockSparseMatrix(values, pattern), dense, **options)
    wide = reference.bsr_matmul(
        BlockSparseMatrix(values.astype(np.float64), pattern), dense.astype(np.float64), **options
    )
    assert_close("out", out, *(x.T if flag else x for x in (plain, wide)))


def test_entries_that_share_a_stage_are_padded(rng):
    """Groups have an even number of entries; empty groups use the padding after the last group."""
    mask = rng.random((20, 15)) < 0.15
    mask[4:8] = False
    pattern = BlockPattern.from_mask(mask, 16)
    groups = group_rows(*pattern.entries(False), 15, 4)
    assert pad_groups(groups, 1) is groups
    padded = pad_groups(groups, 2)
    work = matmul_work(padded.starts, 512, 16, 512, 4, padding=2)
    items = {item[0]: item for item in work.reshape(-1, 4) if item[0] >= 0}
    for index in range(5):
        first, end = groups.starts[index : index + 2]
        *_, begin, stop = items[index]
        if first == end:
            assert (begin, stop) == (padded.columns.size, padded.columns.size + 2)
            continue
        assert (begin, stop) == tuple(padded.starts[index : index + 2])
        assert (stop - begin) % 2 == 0
        assert 0 <= stop - begin - (end - first) < 2
        last = begin + end - first
        np.testing.assert_array_equal(padded.columns[begin:last], groups.columns[first:end])
        np.testing.assert_array_equal(
            padded.block_indices[begin:last], groups.block_indices[first:end]
        )
        assert (padded.columns[last:stop] == -1).all()
        assert (padded.block_indices[last:stop] == -1).all()


@pytest.mark.parametrize("sparse_first", [False, True])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_products_of_the_expanded_matrix(
    device, rng, monkeypatch, sparse_first, transpose_a, transpose_b
):
    """Products of the expanded matrix, which the plan chooses for large matrices of many small
    blocks."""
    monkeypatch.setattr("cukit.gemm.sparse.bsr.prefers_dense", lambda *_, **__: True)
    pattern = pattern_of(32)
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    inner = pattern.shape[not transpose_a] if sparse_first else pattern.shape[transpose_b]
    rows_first = not transpose_b if sparse_first else transpose_a
    dense = (inner, 72) if rows_first else (72, inner)

    def product(function, values, dense):
        matrix = BlockSparseMatrix(values, pattern)
        return function(*((matrix, dense) if sparse_first else (dense, matrix)), **options)

    check_against_reference(
        partial(product, bsr_matmul),
        partial(product, reference.bsr_matmul),
        (values_of(rng, pattern, "bfloat16"), random(rng, dense, "bfloat16")),
        device=device,
    )


def test_many_small_blocks_are_expanded():
    """A sparse [8192, 8192] times a dense [8192, 4096], as in the measurements."""
    m, n, k = 8192, 4096, 8192

    def entries(block, density):  # of a random pattern, in tiles of at least 64 rows
        slots = max(1, 64 // block)
        return round((1 - (1 - density) ** slots) * (m / block / slots) * (k / block))

    assert prefers_dense(entries(16, 0.2), 16, m, n, k)
    assert prefers_dense(entries(16, 0.1), 16, m, n, k, dense_transposed=True)
    assert not prefers_dense(entries(16, 0.01), 16, m, n, k, dense_transposed=True)
    for block, density in ((16, 0.1), (32, 0.1), (64, 0.1), (64, 0.5), (128, 0.1), (128, 0.5)):
        assert not prefers_dense(entries(block, density), block, m, n, k)
    assert prefers_dense(entries(64, 1.0), 64, m, n, k)
    assert not prefers_dense(4, 16, 64, 64, 64), "small matrices are not worth three launches"


@pytest.mark.parametrize("block", MASKS)
@pytest.mark.parametrize("flag", [False, True])
def test_the_sm80_kernels(device, rng, block, flag):
    """The mma.sync kernels, which are never planned on Hopper."""
    if device == "cpu":
        pytest.skip("the CPU has no such kernels")
    xp = array_module(device)
    pattern, n, k = pattern_of(block), 136, 200
    values = values_of(rng, pattern, "bfloat16")
    rows, inner = pattern.shape[::-1] if flag else pattern.shape
    dense = random(rng, (n, inner) if flag else (inner, n), "bfloat16")
    out = poisoned(device, (n, rows) if flag else (rows, n), "bfloat16")
    config = BsrMatmulConfig("bfloat16", block, Transposed(flag, flag, flag), None)
    launch = MatmulSm80(config, pattern, rows, n, xp)
    a = random(rng, (k, pattern.shape[0]) if flag else (pattern.shape[0], k), "bfloat16")
    b = random(rng, (k, pattern.shape[1]) if flag else (pattern.shape[1], k), "bfloat16")
    sampled = poisoned(device, values.shape, "bfloat16")
    sampled_config = BsrSampledConfig("bfloat16", block, flag, not flag, None)
    sampled_launch = SampledSm80(sampled_config, pattern, k, xp)
    for repeat in range(2):
        with another_order(device, repeat):
            launch(*to_device(device, values, dense), out)
            sampled_launch(*to_device(device, a, b), sampled)
    options = {"transpose_a": flag, "transpose_b": flag}
    wide = reference.bsr_matmul(
        BlockSparseMatrix(values.astype(np.float64), pattern), dense.astype(np.float64), **options
    )
    wide = wide.T if flag else wide
    assert_close("out", out, wide.astype(values.dtype), wide)
    options = {"transpose_a": flag, "transpose_b": not flag, "pattern": pattern}
    wide = reference.bsr_matmul(a.astype(np.float64), b.astype(np.float64), **options)
    assert_close("values", sampled, wide.astype(values.dtype), wide)


@pytest.mark.parametrize("tiling", HOPPER_SAMPLED, ids=name)
def test_every_tiling_of_a_sampled_product(device, rng, tiling):
    if device == "cpu":
        pytest.skip("the CPU has no such kernels")
    block = tiling.block
    mask = np.ones((2 * tiling.slots, tiling.columns // block + 1), bool)
    mask[0, ::3] = False
    pattern = BlockPattern.from_mask(mask, block)
    (m, n), k = pattern.shape, 8 * tiling.tile_k + 8
    a, b = random(rng, (m, k), "bfloat16", scale=k**-0.5), random(rng, (k, n), "bfloat16")
    values = poisoned(device, (pattern.num_blocks, block, block), "bfloat16")
    config = BsrSampledConfig("bfloat16", block, False, False, tiling)
    xp = array_module(device)
    SampledSm90(config, pattern, k, xp)(*to_device(device, a, b), values)
    wide = reference.bsr_matmul(a.astype(np.float64), b.astype(np.float64), pattern=pattern)
    assert_close("values", values, reference.bsr_matmul(a, b, pattern=pattern), wide)


def test_empty_operands(device):
    empty = BlockPattern.from_mask(np.zeros((2, 3), bool), 64)
    (x,) = to_device(device, np.ones((5, 192), np.float16))
    (values,) = to_device(device, np.ones((0, 64, 64), np.float16))
    weight = BlockSparseMatrix(values, empty)
    assert not to_host(bsr_matmul(x, weight, transpose_b=True)).any()
    full = pattern_of(64)
    none = to_device(device, np.ones((0, full.shape[0]), np.float16))[0]
    (kept,) = to_device(device, np.ones((full.num_blocks, 64, 64), np.float16))
    assert bsr_matmul(none, BlockSparseMatrix(kept, full)).shape == (0, full.shape[1])
    left, right = to_device(
        device, np.ones((full.shape[0], 0), np.float16), np.ones((0, full.shape[1]), np.float16)
    )
    assert not to_host(bsr_matmul(left, right, pattern=full).values).any()


def test_out_is_filled_and_returned(device, rng):
    pattern = pattern_of(64)
    x = random(rng, (16, pattern.shape[0]), "float16")
    values = values_of(rng, pattern, "float16")
    placed_x, placed = to_device(device, x, values)
    weight = BlockSparseMatrix(placed, pattern)
    out = poisoned(device, (16, pattern.shape[1]), "float16")
    assert bsr_matmul(placed_x, weight, out=out) is out
    np.testing.assert_array_equal(to_host(out), to_host(bsr_matmul(placed_x, weight)))
    grad = BlockSparseMatrix(poisoned(device, values.shape, "float16"), pattern)
    options = {"transpose_a": True, "pattern": weight}
    assert bsr_matmul(placed_x, out, out=grad, **options) is grad
    again = bsr_matmul(placed_x, out, **options)
    np.testing.assert_array_equal(to_host(grad.values), to_host(again.values))


@pytest.mark.gpu
def test_the_second_product_may_be_on_another_stream(rng):
    """The second product uses the schedule of the first one, which is queued behind other work on
    its stream."""
    cupy = pytest.importorskip("cupy")
    pattern = pattern_of(64)
    x, values = random(rng, (64, pattern.shape[1]), "bfloat16"), values_of(rng, pattern, "bfloat16")
    placed_x, placed = to_device("gpu", x, values)
    cupy.cuda.Device().synchronize()
    results = []
    for busy in (True, False):
        with cupy.cuda.Stream(non_blocking=True):
            if busy:
                large = cupy.ones((8192, 8192), np.float32)
                for _ in range(8):
                    cupy.matmul(large, large)
            weight = BlockSparseMatrix(placed, pattern)
            results.append(bsr_matmul(placed_x, weight, transpose_b=True))
    cupy.cuda.Device().synchronize()
    np.testing.assert_array_equal(to_host(results[1]), to_host(results[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [16, 64, 128])
def test_large(rng, block):
    """More tiles than thread blocks in the grid."""
    pattern = BlockPattern.from_mask(create_sparse_mask((2048, 4096), block, 0.2), block)
    x = random(rng, (4104, 4096), "bfloat16", scale=4096**-0.5)
    check_against_reference(
        lambda x, values: bsr_matmul(x, BlockSparseMatrix(values, pattern), transpose_b=True),
        lambda x, values: reference.bsr_matmul(
            x, BlockSparseMatrix(values, pattern), transpose_b=True
        ),
        (x, random(rng, (pattern.num_blocks, block, block), "bfloat16")),
        device="gpu",
    )


def test_errors_name_the_argument(device):
    pattern = BlockPattern.from_mask(np.ones((2, 3), bool), 16)
    values, x = to_device(device, np.ones((6, 16, 16), np.float16), np.ones((4, 48), np.float16))
    weight = BlockSparseMatrix(values, pattern)
    for arguments, error, message in [
        ((x, weight), ArrayShapeError, r"b of shape \(32, 48\) and a of shape \(4, 48\) do not"),
        ((weight, x), ArrayShapeError, "inner extents 48 and 4"),
        ((x.astype(np.float32), weight), ArrayDtypeError, "a must have the dtype of b"),
        ((weight, weight), ConfigError, "one of a and b must be dense"),
        ((x, x), ConfigError, "two dense operands need a pattern"),
    ]:
        with pytest.raises(error, match=f"bsr_matmul: .*{message}"):
            bsr_matmul(*arguments)
    with pytest.raises(ConfigError, match="pattern needs two dense operands"):
        bsr_matmul(x, weight, pattern=pattern)
    with pytest.raises(ArrayShapeError, match=r"the pattern's shape \(32, 48\), got \(4, 4\)"):
        bsr_matmul(x, x, transpose_b=True, pattern=pattern)
    with pytest.raises(ConfigError, match="out must be a BlockSparseMatrix of the pattern"):
        bsr_matmul(x, x, transpose_b=True, pattern=pattern, out=weight.values)
    with pytest.raises(ConfigError, match="pattern must be a BlockPattern"):
        bsr_matmul(x, x, transpose_b=True, pattern=np.ones((2, 3), bool))
    with pytest.raises(ArrayLayoutError, match="out overlaps b in memory"):
        bsr_matmul(x, weight, transpose_b=True, out=values.ravel()[:128].reshape(4, 32))
    if device != "cpu":
        with pytest.raises(ArrayShapeError, match="the last axis of b must be a multiple of 8"):
            bsr_matmul(weight, x[:3].T.copy())
