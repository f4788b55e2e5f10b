"""Groups for `tests.sanitize`: one tile, a corner of one, ragged edges, more steps than stages."""

from __future__ import annotations

import numpy as np

from cukit.gemm import matmul_tma
from tests.contract import random, to_device
from tests.gemm.test_matmul_tma import SHAPES
from tests.sanitize import Group


def tma() -> None:
    rng = np.random.default_rng(3)
    for m, n, k in [*SHAPES, (300, 520, 136)]:
        for dtype in ("float16", "bfloat16"):
            matmul_tma(*to_device("gpu", random(rng, (m, k), dtype), random(rng, (n, k), dtype)))


GROUPS = {"matmul_tma": Group(tma, shares=True, quick=True)}
