"""Keys and values as int4 codes, with a scale and a zero point per group (KIVI)."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukit.reference._xp import array_namespace

Array = Any

MIN_SCALE = np.float32(2.0**-14)
"""The smallest normal float16."""
MAX_SCALE = np.float32(65504)
"""The largest finite float16."""
MAX_ZERO = np.float32(1024)
"""Bound on abs(x) / scale: float16 represents such zero points to within half a code."""


def group_codes(x: Array, axis: int) -> tuple[Array, Array, Array]:
    """Codes (uint8, two per byte along the last axis), float16 scales and zero points, one per
    group along `axis`."""
    xp = array_namespace(x)
    x = x.astype(np.float32)
    low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):  # infinities and NaN
        most = xp.maximum(abs(low), abs(high))
        steps = xp.maximum((high - low) / np.float32(15), most / MAX_ZERO)
        steps = xp.minimum(xp.maximum(steps, MIN_SCALE), MAX_SCALE)
        scales = xp.where(xp.isfinite(most), steps, np.float32(np.nan)).astype(np.float16)
        inverse = np.float32(1) / scales.astype(np.float32)
        zeros = (np.float32(-8) - low * inverse).astype(np.float16)
        levels = xp.rint(x * inverse + zeros.astype(np.float32))
        levels = xp.clip(xp.where(xp.isnan(levels), np.float32(-8), levels), -8, 7)
    levels = levels.astype(np.int8).view(np.uint8) & np.uint8(15)
    return levels[..., ::2] | levels[..., 1::2] << np.uint8(4), scales, zeros


def pack_kv(k: Array, v: Array, k_cache: Any, v_cache: Any, sources: Array, targets: Array) -> None:
    """Packs groups `sources` of k and v into groups `targets` of the caches, which have the arrays
    `storage`, `scales` and `zero_points`. Pairs with a group that does not exist are skipped."""
    xp = array_namespace(k)
    parts = [(each.storage, each.scales, each.zero_points) for each in (k_cache, v_cache)]
    codes, scales, _ = parts[0]
    size = codes.shape[1] // scales.shape[1]
    counts = [blocks * (rows // size) for blocks, rows in (k.shape[:2], codes.shape[:2])]
    known = (sources >= 0) & (sources < counts[0]) & (targets >= 0) & (targets < counts[1])
    used = xp.nonzero(known)[0]
    for new, (codes, scales, zeros), axis in ((k, parts[0], 1), (v, parts[1], 3)):
        values = new[_rows(sources[used], new.shape[1], size)]
        packed = group_codes(values, axis)
        rows = _rows(targets[used], codes.shape[1], size)
        codes[rows] = packed[0]
        places = rows if axis == 3 else (rows[0][:, 0], rows[1][:, 0] // size)
        for to, factors in ((scales, packed[1]), (zeros, packed[2])):
            to[places] = factors if axis == 3 else factors[:, 0]


def _rows(groups: Array, block_size: int, size: int) -> tuple[Array, Array]:
    """Blocks and rows of the tokens of groups, [groups, size] each."""
    xp = array_namespace(groups)
    first = groups.astype(np.int64)[:, None] * size + xp.arange(size)
    return first // block_size, first % block_size
