"""Inputs of the cases: random CuPy arrays where there is a GPU, NumPy arrays where there is none.

Always drawn from a normal distribution, never zeros: constant data draws less power and can run
measurably faster than real data.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


@lru_cache(maxsize=1)
def array_module() -> ModuleType:
    """CuPy if it sees a GPU, else NumPy."""
    try:
        import cupy
    except ImportError:
        return np
    return cupy if cupy.cuda.is_available() else np


@lru_cache(maxsize=1)
def _generator() -> Any:
    return array_module().random.default_rng(20)


def normal(shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Any:
    """`scale` times a standard normal sample of `shape`, rounded to `dtype`."""
    xp = array_module()
    sample = _generator().standard_normal(shape, dtype=xp.float32)
    sample *= xp.float32(scale)
    return sample.astype(DTYPES[dtype], copy=False)


def integers(low: int, high: int, shape: tuple[int, ...], dtype: str = "int32") -> Any:
    """Uniform integers in [low, high)."""
    return _generator().integers(low, high, size=shape).astype(dtype)
