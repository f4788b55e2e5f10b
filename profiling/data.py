"""Inputs of the cases: random CuPy arrays, or NumPy arrays without a GPU.

Floating-point values are normally distributed, never constant: kernels draw less power on constant
data, and can then be measurably faster than on real data.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import count
from typing import Any

import ml_dtypes
import numpy as np

from cukit.analyzer.correctness import array_module

__all__ = ["DTYPES", "array_module", "integers", "normal"]

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


# A counter-based generator, without cuRAND: SplitMix64 hashes the element's index. Box-Muller uses
# the upper 24 bits of the hash, times 2^-24, for the radius, and the lower 24 bits, times 2^-23, as
# the argument of cospi.
_BITS = """
    unsigned long long bits = seed + 0x9E3779B97F4A7C15ull * (i + 1);
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ull;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
    bits ^= bits >> 31;
"""
_NORMAL = """
    const float radius = sqrtf(-2.0f * logf(((bits >> 40) + 1) * 5.9604645e-8f));
    value = radius * cospif((bits & 0xFFFFFF) * 1.1920929e-7f);
"""
_INTEGER = "value = low + (long long)(((bits >> 32) * span) >> 32);"

_seeds = count(20)


@lru_cache(maxsize=1)
def _normal_kernel() -> Any:
    return array_module().ElementwiseKernel(
        "uint64 seed", "float32 value", _BITS + _NORMAL, "cukit_normal"
    )


@lru_cache(maxsize=1)
def _integer_kernel() -> Any:
    return array_module().ElementwiseKernel(
        "uint64 seed, int64 low, uint64 span", "int64 value", _BITS + _INTEGER, "cukit_integers"
    )


def normal(shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Any:
    """Return `scale` times a standard normal sample of `shape`, rounded to `dtype`."""
    xp, seed = array_module(), next(_seeds)
    if xp is np:
        sample = np.random.default_rng(seed).standard_normal(shape, np.float32)
    else:
        sample = _normal_kernel()(np.uint64(seed << 32), size=math.prod(shape)).reshape(shape)
    sample *= np.float32(scale)
    return sample.astype(DTYPES[dtype], copy=False)


def integers(low: int, high: int, shape: tuple[int, ...], dtype: str = "int32") -> Any:
    """Return uniform integers in [low, high)."""
    xp, seed = array_module(), next(_seeds)
    if xp is np:
        return np.random.default_rng(seed).integers(low, high, shape).astype(dtype)
    span = np.uint64(high - low)
    sample = _integer_kernel()(np.uint64(seed << 32), np.int64(low), span, size=math.prod(shape))
    return sample.astype(dtype).reshape(shape)
