"""Groups for `tests.sanitize`: one tile, a corner of one, ragged edges, more steps than stages."""

from __future__ import annotations

import itertools

import numpy as np

from cukit.gemm import (
    grouped_gated_linear,
    grouped_gemm,
    grouped_gemm_backward,
    grouped_gemm_fp8,
    matmul_fp8,
    matmul_int8,
    matmul_tma,
)
from tests.contract import random, to_device
from tests.gemm.quantized_operands import float8_operand, int8_operand, place
from tests.gemm.test_fp8 import KINDS
from tests.gemm.test_grouped import GROUPS as GROUPED
from tests.gemm.test_grouped import Groups
from tests.gemm.test_grouped_fp8 import operands, placed
from tests.gemm.test_matmul_tma import SHAPES
from tests.sanitize import Group


def tma() -> None:
    rng = np.random.default_rng(3)
    for m, n, k in [*SHAPES, (300, 520, 136)]:
        for dtype in ("float16", "bfloat16"):
            matmul_tma(*to_device("gpu", random(rng, (m, k), dtype), random(rng, (n, k), dtype)))


def eight_bits() -> None:
    """Narrow tiles that split k, wide ones, and results that no tensor map describes."""
    rng = np.random.default_rng(4)
    for m, n, k in [(3, 40, 1300), (130, 137, 1300), (700, 1160, 400)]:
        a, b = place("gpu", int8_operand(rng, m, k, zero_points=True), int8_operand(rng, n, k))
        matmul_int8(a, b)
        for left, right in KINDS.values():
            operands = (
                float8_operand(rng, m, k, scales=left),
                float8_operand(rng, n, k, scales=right),
            )
            matmul_fp8(*place("gpu", *operands))


def grouped() -> None:
    """Both layouts, rows as rows and as columns, gradients; float8."""
    rng = np.random.default_rng(3)
    for counts, set_aside in itertools.product(GROUPED.values(), (False, True)):
        groups = Groups(rng, counts, set_aside, 72, "bfloat16")
        where = groups.where("gpu")
        weights = random(rng, (len(counts), 136, 72), "bfloat16")
        grad = groups.rows(rng, 136, "bfloat16")
        x, weights, grad = to_device("gpu", groups.x, weights, grad)
        grouped_gemm(x, weights, **where)
        grouped_gated_linear(x, weights, **where, keep=True)
        grouped_gemm_backward(grad, x, weights, **where)
        codes, matrices = (placed("gpu", array) for array in operands(rng, groups, 136, 208))
        grouped_gemm_fp8(codes, matrices, **where)


GROUPS = {
    "grouped": Group(grouped, shares=True),
    "matmul_tma": Group(tma, shares=True, quick=True),
    "matmul_8bit": Group(eight_bits, shares=True, quick=True),
}
