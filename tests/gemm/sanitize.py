"""Groups for `tests.sanitize`: full and partial tiles, ragged edges, more k steps than stages."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np

from cukit.gemm import (
    BlockSparseMatrix,
    bsr_matmul,
    gated_linear,
    gated_linear_backward,
    gemv,
    grouped_gated_linear,
    grouped_gemm,
    grouped_gemm_backward,
    grouped_gemm_fp8,
    linear,
    linear_backward,
    matmul_fp8,
    matmul_int8,
    pack_weight,
    quantized_linear,
)
from cukit.gemm.dense._gated_gradient import TILING, GatedGradientSm90
from cukit.gemm.dense._linear_launch import LinearSm90
from cukit.gemm.dense._linear_plan import Product, configure
from cukit.gemm.quantized import _matmul_8bit_plan as plan_8bit
from cukit.gemm.quantized._matmul_8bit_launch import Matmul8BitSm90
from cukit.gemm.quantized._matmul_8bit_plan import Product8Bit
from cukit.gemm.sparse._bsr_plan import TILINGS as SPARSE_TILINGS
from tests.contract import poisoned, random, to_device
from tests.gemm import test_bsr, test_fp8, test_grouped, test_grouped_fp8
from tests.gemm.quantized_operands import float8_operand, int8_operand, place
from tests.gemm.test_gemv import SIZES as GEMV_SIZES
from tests.gemm.test_linear import OVERLAPPED, SHAPES, TILINGS, operands
from tests.gemm.test_weight_only import EXPANDED, FORMATS, check_tiling, float8, quantized
from tests.sanitize import Group


def forward() -> None:
    rng = np.random.default_rng(3)
    for m, n, k in [*SHAPES, (300, 520, 136)]:
        for dtype in ("float16", "bfloat16"):
            x, w = to_device("gpu", *operands(rng, m, 2 * n, k, dtype))
            (bias,) = to_device("gpu", random(rng, (2 * n,), dtype))
            linear(x, w, bias, "gelu_tanh", return_preactivation=True)
            gated_linear(x, w, return_preactivation=True)


def backward() -> None:
    rng = np.random.default_rng(3)
    for m, n, k in [*SHAPES, (300, 520, 136)]:
        x, w = to_device("gpu", *operands(rng, m, 2 * n, k, "bfloat16"))
        grad, z = to_device("gpu", *(random(rng, (m, 2 * n), "bfloat16") for _ in range(2)))
        linear_backward(grad, x, w, z, "silu", with_bias=True)
        gated_linear_backward(grad[:, :n].copy(), x, w, z)
        (down,) = to_device("gpu", random(rng, (2 * n, n), "bfloat16"))
        gated_linear_backward(grad, x, w, z, down=down)


def gradient_through_the_next_layer() -> None:
    rng = np.random.default_rng(3)
    m, n, k = 328, 512, 136
    placed = to_device("gpu", *(random(rng, x, "bfloat16") for x in ((m, k), (k, n), (m, 2 * n))))
    config = configure(Product(m, n, k, "bfloat16", major_b="MN"), TILING, 2)
    GatedGradientSm90(config, "silu")(*placed, poisoned("gpu", (m, 2 * n), "bfloat16"))


def tilings() -> None:
    """Split-k, transposed, clustered and overlapped tilings, whichever the plan would select."""
    rng = np.random.default_rng(3)
    m, n, k = 136, 296, 520
    x, w = to_device("gpu", *operands(rng, m, n, k, "bfloat16"))
    for tiling in (*TILINGS, *OVERLAPPED):
        out = poisoned("gpu", (m, n), "bfloat16")
        LinearSm90(configure(Product(m, n, k, "bfloat16"), tiling, 2))(x, w, None, None, out, None)


def eight_bits() -> None:
    """Narrow split-k tiles, wide tiles, and outputs with rows that a tensor map cannot describe."""
    rng = np.random.default_rng(4)
    for m, n, k in [(3, 40, 1300), (130, 137, 1300), (700, 1160, 400)]:
        a, b = place("gpu", int8_operand(rng, m, k, zero_points=True), int8_operand(rng, n, k))
        matmul_int8(a, b)
        for left, right in test_fp8.KINDS.values():
            matmul_fp8(
                *place(
                    "gpu",
                    float8_operand(rng, m, k, scales=left),
                    float8_operand(rng, n, k, scales=right),
                )
            )
    m, n, k = 200, 328, 1300
    for kind in ("row", "blocks"):
        a, b = place("gpu", *test_fp8.operands(rng, m, n, k, kind))
        product = Product8Bit("Float8E4M3", "bfloat16", promoted=True, blocks=kind == "blocks")
        for tiling in test_fp8.WIDE:  # chosen by the plan only for larger problems
            launch = Matmul8BitSm90(plan_8bit.configure(product, tiling, m, n, 2), m, n, k, 1, 1)
            launch(a.storage, b.storage, poisoned("gpu", (m, n), "bfloat16"), a.scales, b.scales)


def grouped() -> None:
    """Both layouts, plain and transposed tiles, gradients, unaligned rows; FP8."""
    rng = np.random.default_rng(3)
    for counts, fixed_capacity, (n, k) in itertools.product(
        test_grouped.GROUPS.values(), (False, True), ((144, 72), (46, 37))
    ):
        groups = test_grouped.Groups(rng, counts, fixed_capacity, k, "bfloat16")
        where = groups.where("gpu")
        weights = random(rng, (len(counts), n, k), "bfloat16")
        grad = groups.rows(rng, n, "bfloat16")
        x, weights, grad = to_device("gpu", groups.x, weights, grad)
        grouped_gemm(x, weights, **where)
        grouped_gated_linear(x, weights, **where, keep=True)
        grouped_gemm_backward(grad, x, weights, **where)
        pair = test_grouped_fp8.operands(rng, groups, 136, 208)
        grouped_gemm_fp8(*(test_grouped_fp8.placed("gpu", each) for each in pair), **where)


def block_sparse(block: int) -> None:
    """All three products, operands plain and transposed; rows without blocks, ragged columns."""
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
    for tiling in SPARSE_TILINGS[block]:
        if tiling.cluster > 1:
            test_bsr.test_every_tiling("gpu", rng, tiling, flag=False, wide_box=True)


def weight_only() -> None:
    rng = np.random.default_rng(3)
    for form in FORMATS:
        packed = pack_weight(quantized(rng, 200, 264, form).to_device("gpu"))
        for m, dtype in ((3, "float16"), (150, "bfloat16")):
            quantized_linear(*to_device("gpu", random(rng, (m, 264), dtype)), packed)
    weight = quantized(rng, 200, 272, "int4 g64 zero points").to_device("gpu")
    for m in (70, 300):
        quantized_linear(float8(rng, m, 272).to_device("gpu"), weight)
    for name in EXPANDED:
        check_tiling("gpu", rng, *EXPANDED[name], in_pieces=False)


def few_tokens() -> None:
    rng = np.random.default_rng(3)
    for (m, n, k), transpose in itertools.product(GEMV_SIZES, (False, True)):
        a, b = (
            random(rng, (m, k), "bfloat16"),
            random(rng, (n, k) if transpose else (k, n), "bfloat16"),
        )
        gemv(*to_device("gpu", a, b), transpose_b=transpose)


GROUPS = {
    "gemv": Group(few_tokens, shares=True, quick=True),
    "grouped": Group(grouped, shares=True),
    "matmul_8bit": Group(eight_bits, shares=True, quick=True),
    "linear": Group(forward, shares=True, quick=True),
    "linear backward": Group(backward),
    "gated gradient": Group(gradient_through_the_next_layer),
    "linear tilings": Group(tilings, shares=True),
    "bsr_matmul sm90": Group(partial(block_sparse, 64), shares=True, quick=True),
    "bsr_matmul sm90 128": Group(partial(block_sparse, 128), shares=True),
    "bsr_matmul": Group(partial(block_sparse, 16), shares=True, quick=True),
    "quantized_linear": Group(weight_only, shares=True, quick=True),
}
