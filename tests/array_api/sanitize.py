"""Groups for `tests.sanitize`: conversions to narrow types and back."""

from __future__ import annotations

import itertools

import numpy as np

import cukit as ck
from tests.array_api.test_narrow import PER_BLOCK, SHAPES
from tests.contract import DTYPES, random, to_device
from tests.sanitize import Group


def narrow() -> None:
    rng = np.random.default_rng(3)
    types = (ck.float8_e4m3, ck.float8_e5m2, ck.int8, ck.int4)
    shapes = (*SHAPES, *((size,) for size in PER_BLOCK))
    for shape, dtype, wide in itertools.product(shapes, types, DTYPES):
        (placed,) = to_device("gpu", random(rng, shape, wide))
        ck.QuantizedArray.encode(placed, dtype).decode(wide)


GROUPS = {"narrow types": Group(narrow, quick=True)}
