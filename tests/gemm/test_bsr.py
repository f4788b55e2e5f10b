"""bsr_matmul: sparse times dense, dense times sparse, and blocks of a dense product."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from cukit.gemm import BlockPattern, BlockSparseMatrix, bsr_matmul
from cukit.gemm.bsr_launch import MatmulSm90, SampledSm90
from cukit.gemm.bsr_plan import (
    TILINGS,
    BsrMatmulConfig,
    BsrSampledConfig,
    Transposed,
)
from cukit.reference import bsr as reference
from tests.contract import (
    another_order,
    assert_close,
    check_against_reference,
    poisoned,
    random,
    to_device,
)

# Blocks of both kernels, with an empty block row, block rows of unlike length, and a ragged last
# group of rows. (mask, block size)
MASKS = {
    16: [[1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 0], [1, 0, 0, 0, 0]] * 2,
    32: [[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 1]],
    64: [[1, 0, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 0, 0, 0]],
    128: [[1, 1], [0, 0], [0, 1]],
}
HOPPER = [tiling for tilings in TILINGS.values() for tiling in tilings]


def pattern_of(block):
    return BlockPattern.from_mask(np.array(MASKS[block], bool), block)


def values_of(rng, pattern, dtype):
    shape = (pattern.num_blocks, pattern.block_size, pattern.block_size)
    return random(rng, shape, dtype, scale=max(pattern.shape) ** -0.5)


def name(tiling):
    return f"{tiling.block}-{tiling.columns}"


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
    """Of activations [batch, seq_len, features], as in a sparse linear layer and its backward."""
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
    """The inner extent is no multiple of a step."""
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
def test_every_tiling(device, rng, tiling, flag):
    """Wider results than a tile, more tiles than blocks of the grid, more steps than stages."""
    if device == "cpu":
        pytest.skip("a choice of the kernel")
    pattern = pattern_of(tiling.block)
    m, k = pattern.shape[::-1] if flag else pattern.shape
    n = tiling.columns + 40
    values = values_of(rng, pattern, "bfloat16")
    dense = random(rng, (n, k) if flag else (k, n), "bfloat16")
    out = poisoned(device, (n, m) if flag else (m, n), "bfloat16")
    config = BsrMatmulConfig("bfloat16", tiling.block, Transposed(flag, flag, flag), tiling)
    placed = to_device(device, values, dense)
    xp = np if device == "emulator" else __import__("cupy")
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


@pytest.mark.parametrize("tiling", HOPPER, ids=name)
def test_every_tiling_of_a_sampled_product(device, rng, tiling):
    if device == "cpu":
        pytest.skip("a choice of the kernel")
    block = tiling.block
    pattern = BlockPattern.from_mask(np.ones((2, tiling.columns // block + 1), bool), block)
    (m, n), k = pattern.shape, 8 * tiling.tile_k + 8
    a, b = random(rng, (m, k), "bfloat16", scale=k**-0.5), random(rng, (k, n), "bfloat16")
    values = poisoned(device, (pattern.num_blocks, block, block), "bfloat16")
    config = BsrSampledConfig("bfloat16", block, False, False, tiling)
    xp = np if device == "emulator" else __import__("cupy")
    SampledSm90(config, pattern, k, xp)(*to_device(device, a, b), values)
    wide = reference.bsr_matmul(a.astype(np.float64), b.astype(np.float64), pattern=pattern)
    assert_close("values", values, reference.bsr_matmul(a, b, pattern=pattern), wide)
