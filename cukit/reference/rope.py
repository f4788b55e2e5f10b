"""Rotary position embedding (Su et al. 2021, RoFormer) of queries and keys, and its gradient.

A pair `(a, b)` of a head is rotated by the angle of its position: `(a cos - b sin, b cos + a sin)`.
Pairs are `(x[i], x[i + rotary_dim / 2])`, or `(x[2i], x[2i + 1])` if interleaved.
"""

from __future__ import annotations

from typing import Any

from cukit.reference._xp import array_namespace, check_range, working_dtype

Array = Any


def rope(
    q: Array,
    k: Array,
    cos: Array,
    sin: Array,
    position_ids: Array | None = None,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inplace: bool = False,
    out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """Rotates the first `rotary_dim` elements of every head of `q` and `k`; copies the others.

    q, k: `[batch, seq_len, num_heads, head_dim]`; cos, sin: `[max_positions, rotary_dim / 2]`;
    position_ids: `[batch, seq_len]` or `[seq_len]`, by default 0, 1, 2, ...
    """
    half = cos.shape[-1] if rotary_dim is None else rotary_dim // 2
    if position_ids is not None:
        check_range("rope", "position_ids", position_ids, cos.shape[0])
    rows = slice(q.shape[1]) if position_ids is None else position_ids
    cos, sin = cos[rows][..., None, :half], sin[rows][..., None, :half]
    q_out, k_out = (q, k) if inplace else out or (None, None)
    return (
        _rotate(q, cos, sin, interleaved, q_out),
        _rotate(k, cos, sin, interleaved, k_out),
    )


def rope_backward(
    grad_q: Array,
    grad_k: Array,
    cos: Array,
    sin: Array,
    position_ids: Array | None = None,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inplace: bool = False,
    out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """Gradient of `rope`: the rotation by the opposite angle."""
    options: dict[str, Any] = {"interleaved": interleaved, "rotary_dim": rotary_dim}
    return rope(grad_q, grad_k, cos, -sin, position_ids, inplace=inplace, out=out, **options)


def _rotate(x: Array, cos: Array, sin: Array, interleaved: bool, out: Array | None) -> Array:
    half = cos.shape[-1]
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(half), slice(half, 2 * half)
    dtype = working_dtype(x)
    a, b = x[..., first].astype(dtype, copy=False), x[..., second].astype(dtype, copy=False)
    rotated_a, rotated_b = a * cos - b * sin, b * cos + a * sin
    if out is None:
        out = array_namespace(x).empty(x.shape, x.dtype)
    if out is not x:
        out[..., 2 * half :] = x[..., 2 * half :]
    out[..., first], out[..., second] = rotated_a, rotated_b
    return out
