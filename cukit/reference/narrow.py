"""Eight- and four-bit storage formats: rounding to them, and what the stored bits mean."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cukit.reference._xp import array_namespace

Array = Any

FLOAT8 = {"float8_e4m3": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
MOST = {"float8_e4m3": 448.0, "float8_e5m2": 57344.0}


def encode_float8(x: Array, name: str) -> Array:
    """Nearest float8 (ties to even) of each element, saturated to the largest finite, as uint8.

    NaN stays NaN; infinities saturate. Micikevicius et al., "FP8 Formats for Deep Learning".
    """
    xp = array_namespace(x)
    host = np.asarray(x.get() if xp is not np else x, np.float32)
    return xp.asarray(np.clip(host, -MOST[name], MOST[name]).astype(FLOAT8[name]).view(np.uint8))


def decode_float8(storage: Array, name: str) -> Array:
    """float32 values of uint8 storage."""
    xp = array_namespace(storage)
    values = np.arange(256, dtype=np.uint8).view(FLOAT8[name]).astype(np.float32)
    return xp.asarray(values)[storage]


def encode_int4(x: Array) -> Array:
    """Nearest integer in [-8, 7] (ties to even), two to a byte on the last axis, the first low.

    An odd last axis is padded with 0. NaN becomes 0.
    """
    xp = array_namespace(x)
    values = xp.clip(xp.rint(xp.nan_to_num(x, nan=0.0)), -8, 7).astype(xp.int8)
    if values.shape[-1] % 2:
        padding = [(0, 0)] * (values.ndim - 1) + [(0, 1)]
        values = xp.pad(values, padding)
    nibbles = values.view(xp.uint8) & 15
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def decode_int4(storage: Array, extent: int) -> Array:
    """float32 values of packed nibbles; `extent` is the length of the last axis unpacked."""
    xp = array_namespace(storage)
    pairs = xp.stack((storage & 15, storage >> 4), axis=-1).astype(xp.int8)
    signed = (pairs ^ 8) - 8
    return signed.reshape(*storage.shape[:-1], -1)[..., :extent].astype(xp.float32)
