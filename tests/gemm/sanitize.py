"""Groups for `tests.sanitize`: one tile, a corner of one, ragged edges, more steps than stages."""

from __future__ import annotations

from functools import partial

import numpy as np

from cukit import gemm
from cukit.gemm import (
    BlockSparseMatrix,
    bsr_matmul,
    gated_linear,
    gated_linear_backward,
    linear,
    linear_backward,
)
from cukit.gemm.linear_plan import Product, configure
from cukit.gemm.linear_sm90 import LinearSm90
from tests.contract import poisoned, random, to_device
from tests.gemm import test_bsr
from tests.gemm.test_linear import SHAPES, TILINGS, operands
from tests.sanitize import Group


def forward() -> None:
    rng = np.random.default_rng(3)
    for m, n, k in [*SHAPES, (300, 520, 136)]:
        for dtype in ("float16", "bfloat16"):
            x, w = to_device("gpu", *operands(rng, m, 2 * n, k, dtype))
            (bias,) = to_device("gpu", random(rng, (2 * n,), dtype))
            linear(x, w, bias, "gelu_tanh", return_preactivation=True)
            gated_linear(x, w, return_preactivation=True)


def block_sparse(block: int) -> None:
    """All three products, in both orders of each operand; rows without blocks, ragged columns."""
    rng = np.random.default_rng(4)
    pattern = test_bsr.pattern_of(block)
    (values,) = to_device("gpu", test_bsr.values_of(rng, pattern, "bfloat16"))
    matrix = BlockSparseMatrix(values, pattern)
    m, n = pattern.shape
    for first, second in ((False, False), (True, True), (True, False)):
        inner, k = (m, n)[not first], 104
        x = random(rng, (72, inner) if second else (inner, 72), "bfloat16")
        a = random(rng, (k, m) if first else (m, k), "bfloat16")
        b = random(rng, (n, k) if second else (k, n), "bfloat16")
        x, a, b = to_device("gpu", x, a, b)
        bsr_matmul(matrix, x, transpose_a=first, transpose_b=second)
        bsr_matmul(x.T.copy(), matrix, transpose_a=second, transpose_b=not first)
        bsr_matmul(a, b, transpose_a=first, transpose_b=second, pattern=pattern)


def depth() -> None:
    rng = np.random.default_rng(5)
    logits, x = random(rng, (2, 1500), "float32"), random(rng, (2, 1500, 40), "bfloat16")
    logits, x = to_device("gpu", logits, x)
    routing = gemm.depth_router(logits, 700)
    y = gemm.depth_gather(x, routing.indices)
    out = gemm.depth_combine(x, y, routing.weights, routing.slots)
    _, grad = gemm.depth_combine_backward(out, y, routing.weights, routing.indices)
    gemm.depth_router_backward(grad, routing.weights, routing.slots)


def backward() -> None:
    rng = np.random.default_rng(3)
    for m, n, k in [*SHAPES, (300, 520, 136)]:
        x, w = to_device("gpu", *operands(rng, m, 2 * n, k, "bfloat16"))
        grad, z = to_device("gpu", *(random(rng, (m, 2 * n), "bfloat16") for _ in range(2)))
        linear_backward(grad, x, w, z, "silu", with_bias=True)
        gated_linear_backward(grad[:, :n].copy(), x, w, z)


def tilings() -> None:
    """Split, transposed and shared tiles, which the plan takes for larger products only."""
    rng = np.random.default_rng(3)
    m, n, k = 136, 296, 520
    x, w = to_device("gpu", *operands(rng, m, n, k, "bfloat16"))
    for tiling in TILINGS:
        out = poisoned("gpu", (m, n), "bfloat16")
        LinearSm90(configure(Product(m, n, k, "bfloat16"), tiling, 2))(x, w, None, None, out, None)


GROUPS = {
    "linear": Group(forward, shares=True, quick=True),
    "linear backward": Group(backward),
    "linear tilings": Group(tilings, shares=True),
    "bsr_matmul sm90": Group(partial(block_sparse, 64), shares=True, quick=True),
    "bsr_matmul sm90 128": Group(partial(block_sparse, 128), shares=True),
    "bsr_matmul": Group(partial(block_sparse, 16), shares=True, quick=True),
    "depth": Group(depth, shares=True),
}
