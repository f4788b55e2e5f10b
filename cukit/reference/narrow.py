"""8-bit and 4-bit storage formats: encoding and decoding."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cukit.reference._xp import array_namespace

Array = Any

FLOAT8 = {"float8_e4m3": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
LARGEST = {"float8_e4m3": 448.0, "float8_e5m2": 57344.0, "int8": 127.0, "int4": 7.0}
SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: reciprocals of smaller numbers may be infinite."""


def largest(dtype: Any) -> float:
    """The largest finite number of a floating-point dtype, including bfloat16."""
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def encode(x: Array, name: str) -> Array:
    """Encodes `x` [..., n] in the format `name`."""
    if name == "int4":
        return encode_int4(x)
    return encode_int8(x) if name == "int8" else encode_float8(x, name)


def decode(storage: Array, name: str, extent: int) -> Array:
    """Decodes storage to float32; `extent` is the length of the last axis of the values."""
    if name == "int4":
        return decode_int4(storage, extent)
    return storage.astype(np.float32) if name == "int8" else decode_float8(storage, name)


def encode_float8(x: Array, name: str) -> Array:
    """Rounds to the nearest float8 (ties to even), saturating to the largest finite value; uint8.

    NaN stays NaN; infinities saturate. Micikevicius et al., "FP8 Formats for Deep Learning".
    """
    xp = array_namespace(x)
    host = np.asarray(x.get() if xp is not np else x, np.float32)
    with np.errstate(invalid="ignore"):  # NaN
        codes = np.clip(host, -LARGEST[name], LARGEST[name]).astype(FLOAT8[name])
    return xp.asarray(codes.view(np.uint8))


def decode_float8(storage: Array, name: str) -> Array:
    """Decodes uint8 storage to float32."""
    xp = array_namespace(storage)
    values = np.arange(256, dtype=np.uint8).view(FLOAT8[name]).astype(np.float32)
    return xp.asarray(values)[storage]


def encode_int4(x: Array) -> Array:
    """Rounds to the nearest integer in [-8, 7] (ties to even) and packs two per byte.

    The first of a pair is in the low bits. A last axis of odd length is padded with 0. NaN becomes
    0.
    """
    xp = array_namespace(x)
    values = xp.minimum(xp.maximum(encode_int8(x), -8), 7)
    if values.shape[-1] % 2:
        padding = [(0, 0)] * (values.ndim - 1) + [(0, 1)]
        values = xp.pad(values, padding)
    nibbles = values.view(xp.uint8) & 15
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def decode_int4(storage: Array, extent: int) -> Array:
    """Decodes packed nibbles to float32; `extent` is the length of the last axis of the values."""
    xp = array_namespace(storage)
    pairs = xp.stack((storage & 15, storage >> 4), axis=-1).astype(xp.int8)
    signed = (pairs ^ 8) - 8
    unpacked = signed.reshape(*storage.shape[:-1], 2 * storage.shape[-1])
    return unpacked[..., :extent].astype(xp.float32)


def encode_int8(x: Array) -> Array:
    """Rounds to the nearest integer in [-128, 127] (ties to even). NaN becomes 0."""
    xp = array_namespace(x)
    values = x.astype(xp.float32)
    return xp.clip(xp.rint(xp.where(xp.isnan(values), 0, values)), -128, 127).astype(xp.int8)


def broadcast_factors(factors: Array, shape: tuple[int, ...], block: tuple[int, ...]) -> Array:
    """Expands one factor per block to a float32 array that broadcasts to `shape`."""
    xp = array_namespace(factors)
    factors = factors.astype(xp.float32)
    for axis, (extent, size) in enumerate(zip(shape, block, strict=True)):
        if 1 < size < extent:
            kept = (slice(None),) * axis + (slice(extent),)
            factors = xp.repeat(factors, size, axis=axis)[kept]
    return factors


def quantize(x: Array, scales: Array, zero_points: Array | None, block: tuple[int, ...]) -> Array:
    """x * (1 / scale) + zero_point in float32, before rounding to codes; one factor per block.

    A scale with an absolute value below SMALLEST_SCALE is treated as 1.
    """
    xp = array_namespace(x)
    wide = scales.astype(np.float32)
    inverses = 1 / xp.where(xp.abs(wide) < SMALLEST_SCALE, np.float32(1), wide)
    with np.errstate(invalid="ignore"):  # infinities
        scaled = x.astype(np.float32) * broadcast_factors(inverses, x.shape, block)
    if zero_points is None:
        return scaled
    return scaled + broadcast_factors(zero_points, x.shape, block)


def dequantize(
    codes: Array, scales: Array, zero_points: Array | None, block: tuple[int, ...]
) -> Array:
    """(code - zero_point) * scale in float32, for codes given as float32; one factor per block."""
    if zero_points is not None:
        codes = codes - broadcast_factors(zero_points, codes.shape, block)
    return codes * broadcast_factors(scales, codes.shape, block)
