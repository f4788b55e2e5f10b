"""Rejects outputs that are read-only or overlap inputs, which a kernel would overwrite while it
reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cukit.core.arrays import Array, address_of
from cukit.errors import ArrayLayoutError

_MAX_WORK = 10_000
"""`max_work` of `numpy.shares_memory` for strided arrays; beyond it an overlap is assumed."""


def check_overlap(
    op: str,
    out: Array | None,
    /,
    *,
    name: str = "out",
    itself: str = "",
    **inputs: Array | None,
) -> None:
    """Raises ArrayLayoutError if `out` is read-only or shares memory with one of `inputs`.

    name: the op's name for `out`.
    itself: the input that `out` may be identical to (same address, shape, strides and dtype):
        for kernels whose threads write only elements that no other thread reads.
    inputs: None entries are skipped.
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
            np.shares_memory(_shadow(a), _shadow(b), max_work=_MAX_WORK)  # type: ignore[arg-type]
        )
    except np.exceptions.TooHardError:
        return True


def _bounds(array: Array) -> tuple[int, int]:
    """Address of the first byte, and one past the last."""
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
    """A NumPy array with the same addresses, for NumPy's overlap test, which reads no memory."""
    interface = {
        "version": 3,
        "data": (address_of(array), True),
        "shape": array.shape,
        "strides": array.strides,
        "typestr": f"|V{array.itemsize}",
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
