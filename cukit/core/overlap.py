"""Refuses outputs that cannot be written, or that share memory with inputs, where a kernel would
read what it has written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cukit.core.arrays import Array, address_of
from cukit.errors import ArrayLayoutError

_MOST_WORK = 10_000
"""Of the exact test for arrays with gaps; what takes longer counts as an overlap."""


def check_overlap(
    op: str,
    out: Array | None,
    *,
    name: str = "out",
    itself: str = "",
    **inputs: Array | None,
) -> None:
    """Raises ArrayLayoutError if `out` is read-only or shares memory with one of `inputs`, which
    may be None.

    name: what the op calls `out`.
    itself: the input that `out` may be (same address, shape and strides): for kernels whose threads
        write only elements that no other thread reads.
    """
    if out is None or out.size == 0:
        return
    if type(out) is np.ndarray and not out.flags.writeable:
        raise ArrayLayoutError(f"{op}: {name} is read-only")
    for key, array in inputs.items():
        if array is None or (key == itself and _same(out, array)):
            continue
        if _share(out, array):
            allowed = f"; {name} may be {key} itself" if key == itself else ""
            raise ArrayLayoutError(f"{op}: {name} overlaps {key} in memory{allowed}")


def _same(a: Array, b: Array) -> bool:
    return (
        address_of(a) == address_of(b)
        and a.shape == b.shape
        and a.strides == b.strides
        and a.dtype == b.dtype
    )


def _share(a: Array, b: Array) -> bool:
    (low, high), (other_low, other_high) = _bounds(a), _bounds(b)
    if low >= other_high or other_low >= high:
        return False
    if a.flags.c_contiguous and b.flags.c_contiguous:
        return True
    try:
        return bool(
            np.shares_memory(_shadow(a), _shadow(b), max_work=_MOST_WORK)  # type: ignore[arg-type]
        )
    except np.exceptions.TooHardError:
        return True


def _bounds(array: Array) -> tuple[int, int]:
    """First address, and the one behind the last byte."""
    low = high = address_of(array)
    if array.size == 0:
        return low, low
    if array.flags.c_contiguous:
        return low, low + int(array.nbytes)
    for extent, stride in zip(array.shape, array.strides, strict=True):
        span = (extent - 1) * stride
        low, high = (low + span, high) if span < 0 else (low, high + span)
    return low, high + int(array.itemsize)


def _shadow(array: Array) -> np.ndarray[Any, Any]:
    """A NumPy array at the same addresses, which is never read: NumPy compares addresses alone."""

    interface = {
        "version": 3,
        "data": (address_of(array), True),
        "shape": array.shape,
        "strides": array.strides,
        "typestr": f"|V{array.itemsize}",
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
