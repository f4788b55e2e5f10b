"""2-bit and 4-bit codes in groups that share a range, as KIVI stores keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cukit.core.arrays import Array, float32, namespace
from cukit.errors import ArrayShapeError


@dataclass(frozen=True)
class GroupCodes:
    """value = code * step + least, where `group_size` values along `axis` share step and least.

    The codes span a group's range from minimum to maximum, which need not include zero: channels
    of keys are often far from it. (A QuantizedArray with integer zero points always spans zero, and
    does not support 2 bits.)

    codes: uint8, the values' shape with 8 / bits values per byte along the last axis, the first in
        the lowest bits.
    bits: 2 or 4.
    axis: not negative.
    steps, least: the values' dtype if 16-bit, else float32; the values' shape with one element per
        group along `axis`.

    Implemented with NumPy or CuPy array operations.
    Paper: Liu et al., KIVI, arXiv:2402.02750.
    """

    codes: Array
    steps: Array
    least: Array
    bits: int
    axis: int
    group_size: int

    @classmethod
    def encode(cls, x: Array, bits: int, *, axis: int, group_size: int) -> GroupCodes:
        """Quantises `x` to the nearest codes, ties to even.

        Raises ArrayShapeError if group_size does not divide the axis, or 8 / bits the last axis.
        """
        per_byte = 8 // bits
        if x.shape[axis] % group_size or x.shape[-1] % per_byte:
            raise ArrayShapeError(
                f"GroupCodes: group_size must divide axis {axis} and {per_byte} the last axis, got "
                f"group_size {group_size} for shape {x.shape}"
            )
        xp = namespace(x)
        grouped = _grouped(x.astype(np.float32), axis, group_size)
        stored = x.dtype if x.dtype.itemsize == 2 else float32
        low, high = grouped.min(axis=axis + 1), grouped.max(axis=axis + 1)
        least = low.astype(stored)
        steps = ((high - low) / np.float32(2**bits - 1)).astype(stored)
        # Codes are computed with the rounded factors; a group of equal values has a step of 0.
        step, offset = (
            xp.expand_dims(factors.astype(np.float32), axis + 1) for factors in (steps, least)
        )
        levels = xp.rint((grouped - offset) / xp.where(step == 0, 1, step))
        codes = xp.clip(levels, 0, 2**bits - 1).astype(np.uint8).reshape(x.shape)
        packed = codes[..., ::per_byte]
        for i in range(1, per_byte):
            packed = packed | (codes[..., i::per_byte] << np.uint8(bits * i))
        return cls(packed, steps, least, bits, axis, group_size)

    def decode(self, dtype: Any = float32) -> Array:
        """The dequantised values."""
        xp = namespace(self.codes)
        shifts = xp.arange(0, 8, self.bits, dtype=np.uint8)
        codes = (self.codes[..., None] >> shifts) & np.uint8(2**self.bits - 1)
        codes = codes.reshape(*self.codes.shape[:-1], self.codes.shape[-1] * shifts.size)
        grouped = _grouped(codes.astype(np.float32), self.axis, self.group_size)
        steps, least = (
            xp.expand_dims(factors.astype(np.float32), self.axis + 1)
            for factors in (self.steps, self.least)
        )
        return (grouped * steps + least).reshape(codes.shape).astype(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, steps and minima."""
        return int(self.codes.nbytes + self.steps.nbytes + self.least.nbytes)


def _grouped(x: Array, axis: int, group_size: int) -> Array:
    """x with `axis` split in two: groups, and positions within a group."""
    shape = (*x.shape[:axis], x.shape[axis] // group_size, group_size, *x.shape[axis + 1 :])
    return x.reshape(shape)
