"""Operands for tests of quantised products, made without the ops that quantise."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cukit.core.narrow_dtype import float8_e4m3, int8
from cukit.core.quantized_array import QuantizedArray
from tests.contract import to_device

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


def int8_operand(
    rng: np.random.Generator,
    rows: int,
    k: int,
    *,
    scales: str | None = "row",
    zero_points: bool = False,
) -> QuantizedArray:
    """int8 codes of the whole range [rows, k]; scales of "row" or "tensor", or None."""
    codes = rng.integers(-128, 128, (rows, k)).astype(np.int8)
    if scales is None:
        return QuantizedArray(codes, int8, (rows, k))
    axis, count = (1, rows) if scales == "row" else (None, 1)
    factors = rng.uniform(0.5, 2.0, (count, 1)).astype(np.float32)
    zeros = rng.integers(-30, 30, (count, 1)).astype(np.int8) if zero_points else None
    return QuantizedArray(codes, int8, (rows, k), factors, zeros, axis)


def float8_operand(
    rng: np.random.Generator, rows: int, k: int, *, scales: str | None, scale: float = 1.0
) -> QuantizedArray:
    """Normally distributed values as float8 codes [rows, k].

    scales: None, "tensor", "row", "columns" (one per 128 elements of a row, in column-major order)
        or "blocks" (one per 128 x 128 elements).
    """
    values = rng.standard_normal((rows, k)) * scale
    codes = values.astype(FLOAT8).view(np.uint8)
    steps = -(-k // 128)
    count = {"tensor": 1, "row": rows, "columns": rows, "blocks": -(-rows // 128)}
    if scales is None:
        return QuantizedArray(codes, float8_e4m3, (rows, k))
    shape = (count[scales], steps if scales in ("columns", "blocks") else 1)
    factors = rng.uniform(0.5, 2.0, shape).astype(np.float32)
    if scales == "columns":
        padded = np.zeros((steps, -(-rows // 4) * 4), np.float32)
        padded[:, :rows] = factors.T
        return QuantizedArray(codes, float8_e4m3, (rows, k), padded[:, :rows].T, None, 1, 128)
    if scales == "blocks":
        return QuantizedArray(codes, float8_e4m3, (rows, k), factors, None, (0, 1), 128)
    axis = None if scales == "tensor" else 1
    return QuantizedArray(codes, float8_e4m3, (rows, k), factors, None, axis)


def place(device: str, *arrays: QuantizedArray) -> tuple[QuantizedArray, ...]:
    """Copy arrays to the "gpu" with the same strides; return them unchanged for other devices."""
    return tuple(_place(device, array) for array in arrays)


def _place(device: str, array: QuantizedArray) -> QuantizedArray:
    if device != "gpu":
        return array
    scales: Any = array.scales
    if scales is not None and scales.shape[1] > 1 and scales.strides[0] == scales.itemsize:
        (placed,) = to_device(device, scales.base)
        scales = placed[:, : array.shape[0]].T
    else:
        (scales,) = to_device(device, scales)
    storage, zero_points = to_device(device, array.storage, array.zero_points)
    return QuantizedArray(
        storage, array.dtype, array.shape, scales, zero_points, array.axis, array.group_size
    )


def absolute_product(a: QuantizedArray, b: QuantizedArray) -> np.ndarray[Any, Any]:
    """|a| |b|^T, to which bounds of rounding errors are proportional."""
    left, right = (np.abs(_dense(array)) for array in (a, b))
    return left @ right.T


def _dense(array: QuantizedArray) -> np.ndarray[Any, Any]:
    """The values in float64, computed without the op `decode`."""
    codes = array.storage.view(FLOAT8 if array.dtype == float8_e4m3 else np.int8)
    values = codes.astype(np.float64)
    if array.zero_points is not None:
        values = values - array.zero_points
    if array.scales is None:
        return values
    rows, steps = array.scales.shape
    factors = array.scales.astype(np.float64)
    if steps > 1:
        factors = factors.repeat(128, axis=1)[:, : array.shape[1]]
    if 1 < rows < array.shape[0]:
        factors = factors.repeat(128, axis=0)[: array.shape[0]]
    return values * factors
