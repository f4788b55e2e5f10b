"""Scales, zero points and codes, with one scale per block."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cukit.reference import narrow
from cukit.reference._xp import array_namespace

Array = Any

SMALLEST_SCALE = narrow.SMALLEST_SCALE
CLIP_CANDIDATES = {"absmax": 1, "mse": 16}
CLIP_STEP = 1 / 32
"""A clip mode tries CLIP_CANDIDATES fractions 1, 1 - CLIP_STEP, ... of a block's range."""

INTEGERS = {"int8": 127, "int4": 7}


def quantize(
    x: Array,
    name: str,
    block: tuple[int, ...],
    *,
    zero_points: bool = False,
    clip: str = "absmax",
    scale_dtype: Any = np.float32,
    power_of_two: bool = False,
) -> tuple[Array, Array, Array | None]:
    """Quantises `x` [..., n] to the format `name`: storage, scales, and int8 zero points or None.

    block: extents of the blocks that share a scale.
    """
    xp = array_namespace(x)
    x = x.astype(np.float32, copy=False)
    if not x.size:
        shape = tuple(-(-n // size) for n, size in zip(x.shape, block, strict=True))
        zeros = xp.zeros(shape, np.int8) if zero_points else None
        return narrow.encode(x, name), xp.ones(shape, scale_dtype), zeros
    low, high = _extremes(x, block)
    if not zero_points:
        high = xp.maximum(high, -low)
        low = None
    best: Any = None
    for i in range(CLIP_CANDIDATES[clip]):
        part = np.float32(1 - i * CLIP_STEP)
        scales, zeros = _factors(high * part, None if low is None else low * part, name,
                                 scale_dtype, power_of_two)  # fmt: skip
        codes = narrow.encode(narrow.quantize(x, scales, zeros, block), name)
        if clip == "absmax":
            return codes, scales, zeros
        values = narrow.dequantize(narrow.decode(codes, name, x.shape[-1]), scales, zeros, block)
        with np.errstate(invalid="ignore", over="ignore"):  # infinities
            difference = values.astype(np.float64) - x
            error = _sums(difference * difference, block)
        if best is None:
            best = error, scales, zeros
            continue
        better = error < best[0]
        best = tuple(
            None if new is None else xp.where(better, new, old)
            for new, old in zip((error, scales, zeros), best, strict=True)
        )
    _, scales, zeros = best
    return narrow.encode(narrow.quantize(x, scales, zeros, block), name), scales, zeros


def dequantize(
    storage: Array,
    name: str,
    extent: int,
    scales: Array,
    zero_points: Array | None,
    block: tuple[int, ...],
) -> Array:
    """(code - zero_point) * scale in float32; `extent` is the length of the values' last axis."""
    codes = narrow.decode(storage, name, extent)
    return narrow.dequantize(codes, scales, zero_points, block)


def _in_blocks(x: Array, block: tuple[int, ...]) -> Array:
    """x, zero-padded to full blocks, as [blocks along each axis..., elements]."""
    xp = array_namespace(x)
    block = tuple(min(size, n) for size, n in zip(block, x.shape, strict=True))
    counts = [-(-n // size) for n, size in zip(x.shape, block, strict=True)]
    padding = [(0, c * s - n) for c, s, n in zip(counts, block, x.shape, strict=True)]
    split = [extent for pair in zip(counts, block, strict=True) for extent in pair]
    axes = [*range(0, 2 * x.ndim, 2), *range(1, 2 * x.ndim, 2)]
    blocks = xp.pad(x, padding).reshape(split).transpose(axes)
    return blocks.reshape(*counts, math.prod(block))


def _extremes(x: Array, block: tuple[int, ...]) -> tuple[Array, Array]:
    """Minimum and maximum of 0 and the values of each block. NaN if a block contains NaN."""
    xp = array_namespace(x)
    blocks = _in_blocks(x, block)
    return xp.minimum(blocks.min(axis=-1), 0), xp.maximum(blocks.max(axis=-1), 0)


def _sums(x: Array, block: tuple[int, ...]) -> Array:
    return _in_blocks(x, block).sum(axis=-1)


def _factors(
    high: Array, low: Array | None, name: str, scale_dtype: Any, power_of_two: bool
) -> tuple[Array, Array | None]:
    """Scales of blocks with the given extremes, and zero points if `low` is given."""
    xp = array_namespace(high)
    if low is None:
        return _round_scales(
            high / np.float32(narrow.LARGEST[name]), scale_dtype, power_of_two
        ), None
    most = INTEGERS[name]
    levels = np.float32(2 * most + 1)
    steps = _flush(high / levels) + _flush(-low / levels)
    scales = _round_scales(steps, scale_dtype, power_of_two)
    with np.errstate(invalid="ignore"):  # infinities
        steps = xp.rint(-low * (np.float32(1) / scales.astype(np.float32)))
    zeros = xp.clip(xp.nan_to_num(steps, nan=most + 1) - (most + 1), -most - 1, most)
    return scales, zeros.astype(np.int8)


def _flush(x: Array) -> Array:
    """Flushes subnormal numbers to 0, as the kernels do; `x` is not negative."""
    xp = array_namespace(x)
    return xp.where(x < SMALLEST_SCALE, xp.zeros_like(x), x)


def _round_scales(scales: Array, dtype: Any, power_of_two: bool) -> Array:
    """Rounds up to a power of two if requested, then rounds to `dtype`, saturating. Scales below
    SMALLEST_SCALE become 1, non-finite ones NaN."""
    xp = array_namespace(scales)
    finite = xp.isfinite(scales)
    scales = _flush(scales)
    if power_of_two:
        bits = scales.astype(np.float32).view(np.uint32)
        scales = ((bits + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)).view(np.float32)
    most = np.float32(narrow.largest(dtype))
    rounded = xp.minimum(scales, most).astype(dtype)
    rounded = xp.where(rounded.astype(np.float32) < SMALLEST_SCALE, xp.ones_like(rounded), rounded)
    return xp.where(finite, rounded, xp.full_like(rounded, np.nan))
