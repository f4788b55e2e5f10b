"""Groups for `tests.sanitize`: one tile, a corner of one, ragged edges, more steps than stages."""

from __future__ import annotations

import itertools

import numpy as np

from cukit.gemm import gemv, matmul_tma
from tests.contract import random, to_device
from tests.gemm.test_gemv import SIZES as GEMV_SIZES
from tests.gemm.test_matmul_tma import SHAPES
from tests.sanitize import Group


def tma() -> None:
    rng = np.random.default_rng(3)
    for m, n, k in [*SHAPES, (300, 520, 136)]:
        for dtype in ("float16", "bfloat16"):
            matmul_tma(*to_device("gpu", random(rng, (m, k), dtype), random(rng, (n, k), dtype)))


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
    "matmul_tma": Group(tma, shares=True, quick=True),
}
