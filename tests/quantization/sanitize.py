"""Groups for `tests.sanitize`: conversion to narrow dtypes, quantisation, dequantisation."""

from __future__ import annotations

import itertools

import numpy as np

import cukit as ck
from tests.contract import DTYPES, random, to_device
from tests.quantization.test_encode import PER_BLOCK, SHAPES
from tests.quantization.test_quantize import GRANULARITIES, OPTIONS
from tests.sanitize import Group


def granularities() -> None:
    rng = np.random.default_rng(3)
    for shape, granularity in GRANULARITIES.values():
        (x,) = to_device("gpu", random(rng, shape, "bfloat16"))
        for dtype, options in list(OPTIONS.values())[1:5]:
            ck.dequantize(ck.quantize(x, dtype, **granularity, **options), "bfloat16")


def searched_clips() -> None:
    rng = np.random.default_rng(3)
    for shape in ((5, 96), (3, 2056), (3, 101)):
        (x,) = to_device("gpu", random(rng, shape, "float32"))
        ck.quantize(x, ck.int4, clip="mse", zero_points=True)


def codes() -> None:
    rng = np.random.default_rng(3)
    types = (ck.float8_e4m3, ck.float8_e5m2, ck.int8, ck.int4)
    shapes = (*SHAPES, *((size,) for size in PER_BLOCK))
    for shape, dtype, wide in itertools.product(shapes, types, DTYPES):
        (placed,) = to_device("gpu", random(rng, shape, wide))
        ck.QuantizedArray.encode(placed, dtype).decode(wide)


GROUPS = {
    "narrow types": Group(codes, quick=True),
    "granularities": Group(granularities, shares=True, quick=True),
    "searched clips": Group(searched_clips, shares=True),
}
