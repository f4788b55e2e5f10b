"""What ops on a paged cache share: its storage, codes and scales."""

from __future__ import annotations

from typing import Any

from cukit.core.arrays import ACCESS_BYTES, Array, address_of
from cukit.core.quantized_array import QuantizedArray
from cukit.errors import ArrayDtypeError, ArrayError, ArrayLayoutError, ArrayShapeError

CODES = {"": 0, "float8_e4m3": 1, "int8": 2}
"""What a cache may hold, by its number in the kernels; "" is q's dtype."""

_CODE_HEAD_DIM_STEP = 16


def cache_parts(op: str, k_cache: Any, v_cache: Any) -> tuple[str, Any, Any, Any, Any]:
    """What codes both caches hold ("" for none), and their storage and scales."""
    quantized = [isinstance(cache, QuantizedArray) for cache in (k_cache, v_cache)]
    if not any(quantized):
        return "", k_cache, None, v_cache, None
    names = [getattr(getattr(cache, "dtype", None), "name", "") for cache in (k_cache, v_cache)]
    if not all(quantized) or names[0] != names[1] or names[0] not in CODES:
        raise ArrayDtypeError(
            f"{op}: k_cache and v_cache must both hold float8_e4m3 or both int8 codes, or both "
            f"elements of one float dtype, got {names[0]} and {names[1]}"
        )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.zero_points is not None:
            raise ArrayError(f"{op}: {name} has zero points, which no kernel takes")
        if cache.scales is not None and cache.scales.shape[-1] != 1:
            raise ArrayShapeError(
                f"{op}: the scales of {name} must be shared along head_dim, got shape "
                f"{cache.scales.shape}"
            )
    return names[0], k_cache.storage, k_cache.scales, v_cache.storage, v_cache.scales


def check_code_layout(op: str, k_cache: Array, v_cache: Array) -> None:
    """What kernels ask of storage of codes."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.shape[-1] % _CODE_HEAD_DIM_STEP:
            raise ArrayShapeError(
                f"{op}: head_dim (the last axis of {name}) must be a multiple of "
                f"{_CODE_HEAD_DIM_STEP} on the GPU, got {cache.shape[-1]}"
            )
        if any(step % ACCESS_BYTES for step in (address_of(cache), *cache.strides[:-1])):
            raise ArrayLayoutError(
                f"{op}: the start and the strides of {name} must be multiples of {ACCESS_BYTES} "
                f"bytes on the GPU, got strides {cache.strides}"
            )


def scale_strides(scales: Array | None) -> tuple[int, int, int]:
    """Over blocks, rows and heads, in elements; 0 along axes that share a scale."""
    if scales is None:
        return 0, 0, 0
    block, row, head = (
        0 if extent == 1 else stride // scales.itemsize
        for stride, extent in zip(scales.strides[:3], scales.shape[:3], strict=True)
    )
    return block, row, head
