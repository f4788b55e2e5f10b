"""Scans, sorts, reductions and histograms, with the functions of NumPy and CuPy."""

from __future__ import annotations

from typing import Any

from cukit.reference._xp import array_namespace

Array = Any


def parallel_scan(
    x: Array,
    *,
    axis: int = -1,
    operation: str = "sum",
    exclusive: bool = False,
    reverse: bool = False,
) -> Array:
    """Cumulative sums or products along an axis."""
    xp = array_namespace(x)
    ordered = xp.flip(x, axis) if reverse else x
    scan = xp.cumsum if operation == "sum" else xp.cumprod
    dtype = xp.float32 if x.dtype == xp.float16 else x.dtype
    cumulative = scan(ordered.astype(dtype, copy=False), axis=axis, dtype=dtype).astype(x.dtype)
    if exclusive:
        cumulative = xp.moveaxis(cumulative, axis, 0)
        before = xp.full_like(cumulative, 0 if operation == "sum" else 1)
        before[1:] = cumulative[:-1]
        cumulative = xp.moveaxis(before, 0, axis)
    return xp.ascontiguousarray(xp.flip(cumulative, axis) if reverse else cumulative)


def parallel_sort(
    x: Array, *, axis: int = -1, descending: bool = False, return_indices: bool = False
) -> Array | tuple[Array, Array]:
    """Stable sort along an axis, optionally with the indices."""
    xp = array_namespace(x)
    given = xp.flip(x, axis) if descending else x
    order = xp.argsort(xp.ascontiguousarray(given), axis=axis, kind="stable")
    if descending:
        order = xp.flip(x.shape[axis] - 1 - order, axis)
    ordered = xp.take_along_axis(x, order, axis=axis)
    return (ordered, xp.ascontiguousarray(order).astype(xp.int64)) if return_indices else ordered


def strided_reduction(
    x: Array,
    *,
    axis: int | tuple[int, ...] | None = -1,
    operation: str = "sum",
    keepdims: bool = False,
) -> Array:
    """Sum, product, mean, maximum or minimum over axes of an array with any strides."""
    xp = array_namespace(x)
    if operation in ("max", "min"):
        return xp.asarray(getattr(xp, operation)(x, axis=axis, keepdims=keepdims))
    function = {"sum": xp.sum, "product": xp.prod, "mean": xp.mean}[operation]
    dtype = xp.float32 if x.dtype == xp.float16 else None
    result = xp.asarray(function(x, axis=axis, keepdims=keepdims, dtype=dtype))
    return result.astype(x.dtype) if dtype is not None else result


def histogram(x: Array, bins: int, *, low: float, high: float) -> Array:
    """Counts of values in equal bins from `low` to `high`; the last bin includes `high`."""
    xp = array_namespace(x)
    wide = x.astype(xp.float64 if x.dtype.itemsize > 4 else xp.float32, copy=False)
    inside = (wide >= low) & (wide <= high)
    scale = wide.dtype.type(bins / (high - low))
    index = xp.where(inside, wide - wide.dtype.type(low), 0) * scale
    index = xp.where(inside, xp.minimum(index.astype(xp.int64), bins - 1), bins)
    return xp.bincount(index.ravel(), minlength=bins + 1)[:bins].astype(xp.int64)
