"""Groups for `tests.sanitize`: one tile, a corner of one, ragged edges, more steps than stages."""

from __future__ import annotations

import numpy as np

from cukit.gemm import matmul_tma, pack_weight, quantized_linear
from tests.contract import random, to_device
from tests.gemm.test_matmul_tma import SHAPES
from tests.gemm.test_weight_only import FORMATS, float8, quantized
from tests.sanitize import Group


def tma() -> None:
    rng = np.random.default_rng(3)
    for m, n, k in [*SHAPES, (300, 520, 136)]:
        for dtype in ("float16", "bfloat16"):
            matmul_tma(*to_device("gpu", random(rng, (m, k), dtype), random(rng, (n, k), dtype)))


def weight_only() -> None:
    rng = np.random.default_rng(3)
    for form in FORMATS:
        packed = pack_weight(quantized(rng, 200, 264, form).to_device("gpu"))
        for m, dtype in ((3, "float16"), (150, "bfloat16")):
            quantized_linear(*to_device("gpu", random(rng, (m, 264), dtype)), packed)
    weight = quantized(rng, 200, 272, "int4 g64 zero points").to_device("gpu")
    quantized_linear(float8(rng, 70, 272).to_device("gpu"), weight)


GROUPS = {
    "matmul_tma": Group(tma, shares=True, quick=True),
    "quantized_linear": Group(weight_only, shares=True, quick=True),
}
