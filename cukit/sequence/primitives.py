"""Thin wrappers: scans, sorts, reductions and histograms of NumPy and CuPy (CUB)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cukit.core.arrays import Array, adopt, check_array, float16, float32, float64, int32, int64
from cukit.core.scalars import check_choice, check_flag, check_integer, check_number
from cukit.errors import ArrayShapeError, ConfigError
from cukit.reference import primitives as reference
from cukit.registry import register

_DTYPES = (float16, float32, float64, np.dtype(np.uint8), int32, int64)
_SCANS = ("sum", "product")
_REDUCTIONS = ("sum", "product", "mean", "max", "min")
_MAX_BINS = 1 << 24


def parallel_scan(
    x: Array,
    *,
    axis: int = -1,
    operation: str = "sum",
    exclusive: bool = False,
    reverse: bool = False,
) -> Array:
    """Cumulative sums or products along an axis.

    Args:
        x: float16|float32|float64|uint8|int32|int64 [..., n, ...], any strides.
        axis: the axis to scan along.
        operation: `"sum"` or `"product"`.
        exclusive: exclude the element itself; the first result is 0 or 1.
        reverse: scan from the end.

    Returns:
        An array with shape and dtype of `x`; float16 is accumulated in float32.

    Raises:
        ArrayError: invalid dtype or shape of `x`.
        ConfigError: an option out of range.

    Calls `cumsum` or `cumprod` of NumPy or CuPy; CuPy uses CUB.

    >>> import numpy as np, cukit as ck
    >>> ck.parallel_scan(np.arange(4), exclusive=True, reverse=True)
    array([6, 5, 3, 0])
    """
    op = "parallel_scan"
    x, axis = _check(op, x, axis)
    check_choice(op, "operation", operation, _SCANS)
    check_flag(op, "exclusive", exclusive)
    check_flag(op, "reverse", reverse)
    return reference.parallel_scan(
        x, axis=axis, operation=operation, exclusive=exclusive, reverse=reverse
    )


def parallel_sort(
    x: Array, *, axis: int = -1, descending: bool = False, return_indices: bool = False
) -> Array | tuple[Array, Array]:
    """Stable sort along an axis. Equal elements keep their order, also in descending sorts.

    Args:
        x: float16|float32|float64|uint8|int32|int64 [..., n, ...], any strides.
        axis: the axis to sort along.
        descending: largest first.
        return_indices: also return the original index of each element.

    Returns:
        The sorted array, shape and dtype of `x`; with `return_indices`, `(sorted, indices)`, the
        indices int64. NaN is the largest value.

    Raises:
        ArrayError: invalid dtype or shape of `x`.
        ConfigError: an option out of range.

    Calls `argsort` of NumPy or CuPy.

    >>> import numpy as np, cukit as ck
    >>> ck.parallel_sort(np.array([1, 3, 1, 3]), descending=True, return_indices=True)[1]
    array([1, 3, 0, 2])
    """
    op = "parallel_sort"
    x, axis = _check(op, x, axis)
    check_flag(op, "descending", descending)
    check_flag(op, "return_indices", return_indices)
    return reference.parallel_sort(
        x, axis=axis, descending=descending, return_indices=return_indices
    )


def strided_reduction(
    x: Array,
    *,
    axis: int | tuple[int, ...] | None = -1,
    operation: str = "sum",
    keepdims: bool = False,
) -> Array:
    """Sum, product, mean, maximum or minimum over axes of an array with any strides.

    Args:
        x: float16|float32|float64|uint8|int32|int64 [...], any strides: views are not copied.
        axis: one axis, a tuple of axes, or None for all.
        operation: `"sum"`, `"product"`, `"mean"`, `"max"` or `"min"`.
        keepdims: keep the reduced axes, with extent 1.

    Returns:
        The reduced array. Its dtype is that of `x` for floats (float16 is accumulated in float32)
        and for `"max"` and `"min"`; int64 (uint64 for uint8) for sums and products of integers,
        float64 for their means.

    Raises:
        ArrayError: invalid dtype or shape of `x`; no elements along the axes for an operation other
            than `"sum"` and `"product"`.
        ConfigError: an option out of range.

    Calls the reduction of NumPy or CuPy; CuPy uses CUB if the axes allow it.

    >>> import numpy as np, cukit as ck
    >>> ck.strided_reduction(np.arange(12).reshape(3, 4)[:, ::2], axis=0, operation="max")
    array([ 8, 10])
    """
    op = "strided_reduction"
    check_choice(op, "operation", operation, _REDUCTIONS)
    check_flag(op, "keepdims", keepdims)
    axes = axis if isinstance(axis, tuple) else (-1 if axis is None else axis,)
    for each in axes:
        x, _ = _check(op, x, each)
    places = [int(each) % x.ndim for each in axes]
    if len(set(places)) < len(places):
        raise ConfigError(f"{op}: axis must not contain duplicates, got {axis!r}")
    reduced = x.shape if axis is None else [x.shape[place] for place in places]
    if operation not in ("sum", "product") and 0 in reduced:
        raise ArrayShapeError(f"{op}: {operation} of no elements: x has shape {x.shape}")
    chosen = None if axis is None else tuple(places)
    return reference.strided_reduction(x, axis=chosen, operation=operation, keepdims=keepdims)


def histogram(x: Array, bins: int, *, low: float, high: float) -> Array:
    """Number of elements in each of `bins` equal bins from `low` to `high`.

    Args:
        x: float16|float32|float64|uint8|int32|int64 [...], any shape and strides.
        bins: 1 to 2^24.
        low, high: limits of the range; the last bin includes `high`. Values outside and NaN are
            not counted.

    Returns:
        int64 [bins].

    Raises:
        ArrayError: invalid dtype of `x`.
        ConfigError: `bins`, `low` or `high` out of range.

    Calls `bincount` of NumPy or CuPy, which synchronises on the GPU. Deterministic.

    >>> import numpy as np, cukit as ck
    >>> ck.histogram(np.array([0.0, 0.5, 1.0, 2.0, np.nan]), 2, low=0.0, high=2.0)
    array([2, 2])
    """
    op = "histogram"
    (x,) = adopt(op, x)
    check_array(op, "x", x, dtypes=_DTYPES, contiguous=None)
    check_integer(op, "bins", bins, least=1, most=_MAX_BINS)
    check_number(op, "low", low)
    check_number(op, "high", high, above=float(low))
    return reference.histogram(x, int(bins), low=float(low), high=float(high))


def _check(op: str, x: Any, axis: Any) -> tuple[Array, int]:
    """`x` as an array, and `axis` as a non-negative number."""
    (x,) = adopt(op, x)
    check_array(op, "x", x, dtypes=_DTYPES, min_ndim=1, contiguous=None)
    check_integer(op, "axis", axis, least=-x.ndim, most=x.ndim - 1)
    return x, int(axis) % x.ndim


_OPS: dict[str, Callable[..., Any]] = {
    "parallel_scan": parallel_scan,
    "parallel_sort": parallel_sort,
    "strided_reduction": strided_reduction,
    "histogram": histogram,
}
for _name, _function in _OPS.items():
    register(name=_name, family="sequence", function=_function, reference=getattr(reference, _name))
