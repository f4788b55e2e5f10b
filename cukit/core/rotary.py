"""Checks of the cos and sin tables of rotary embeddings."""

from __future__ import annotations

from cukit.core.arrays import Array, check_array, float32, float64
from cukit.errors import ArrayShapeError


def check_rotary_tables(op: str, cos: Array, sin: Array, head_dim: int) -> tuple[int, int]:
    """Checks `cos` and `sin` [max_positions, rotary_dim / 2] and returns their shape."""
    check_array(op, "cos", cos, dtypes=(float32, float64), ndim=2)
    check_array(op, "sin", sin, dtypes=(cos.dtype,), shape=cos.shape)
    max_positions, half = cos.shape
    if not 0 < 2 * half <= head_dim:
        raise ArrayShapeError(
            f"{op}: cos must have 1 to head_dim / 2 = {head_dim / 2:g} columns, got {cos.shape}"
        )
    return max_positions, half
