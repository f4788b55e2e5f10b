"""Dense matrix products."""

from __future__ import annotations

import math
from typing import Any

from cukit.reference._xp import array_namespace, upcast, working_dtype
from cukit.reference.activations import activate, activation_slope

Array = Any


def matmul(
    a: Array,
    b: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: Array | None = None,
    accumulate: bool = False,
    out_dtype: Any = None,
) -> Array:
    """op(a) @ op(b), with all axes but the last flattened to rows."""
    xp = array_namespace(a)
    left, right = upcast(working_dtype(a, b), _rows(a), _rows(b))
    product = xp.matmul(left.T if transpose_a else left, right.T if transpose_b else right)
    shape = product.shape if transpose_a else (*a.shape[:-1], product.shape[1])
    product = product.reshape(shape)
    if out is None:
        return product.astype(a.dtype if out_dtype is None else out_dtype, copy=False)
    if accumulate:
        product = product + out.astype(product.dtype, copy=False)
    out[...] = product.astype(out.dtype, copy=False)
    return out


def linear(
    x: Array,
    w: Array,
    bias: Array | None = None,
    activation: str | None = None,
    *,
    return_preactivation: bool = False,
) -> Any:
    """`f(x w^T + bias)`, and optionally the pre-activation."""
    z = _product(x, w)
    if bias is not None:
        z = z + bias.astype(z.dtype, copy=False)
    y = activate(z, activation).astype(x.dtype, copy=False)
    return (y, z.astype(x.dtype, copy=False)) if return_preactivation else y


def linear_rope(x: Array, w: Array, cos: Array, sin: Array, rotated_heads: int) -> Array:
    """`x w^T`, the first `rotated_heads` heads of every row rotated; see `rope`."""
    xp = array_namespace(x)
    half = cos.shape[1]
    y = _product(x, w)
    if not y.size:
        return y.astype(x.dtype, copy=False)
    heads = y.reshape(-1, y.shape[-1] // (2 * half), 2, half)
    rows = xp.arange(heads.shape[0]) % cos.shape[0]
    c, s = upcast(y.dtype, cos[rows][:, None], sin[rows][:, None])
    a, b = heads[:, :rotated_heads, 0], heads[:, :rotated_heads, 1]
    rotated = xp.stack([a * c - b * s, b * c + a * s], axis=2)
    y = xp.concatenate([rotated, heads[:, rotated_heads:]], axis=1).reshape(y.shape)
    return y.astype(x.dtype, copy=False)


def gated_linear(
    x: Array,
    w: Array | tuple[Array, Array],
    activation: str = "silu",
    *,
    return_preactivation: bool = False,
) -> Any:
    """`f(x gate^T) * (x up^T)`, and optionally both products, concatenated."""
    xp = array_namespace(x)
    half = 0 if isinstance(w, tuple) else w.shape[0] // 2
    w_gate, w_up = w if isinstance(w, tuple) else (w[:half], w[half:])
    gate, up = _product(x, w_gate), _product(x, w_up)
    y = (activate(gate, activation) * up).astype(x.dtype, copy=False)
    if not return_preactivation:
        return y
    return y, xp.concatenate([gate, up], axis=-1).astype(x.dtype, copy=False)


def linear_backward(
    grad_out: Array,
    x: Array,
    w: Array,
    preactivation: Array | None = None,
    activation: str | None = None,
    *,
    with_bias: bool = False,
) -> tuple[Array, ...]:
    """Gradients of `linear` with respect to `x`, `w` and, with `with_bias`, the bias."""
    grad = grad_out
    if activation is not None:
        (outer, z) = upcast(working_dtype(x), grad_out, preactivation)
        grad = (outer * activation_slope(z, activation)).astype(x.dtype, copy=False)
    grad_w = _product(_rows(grad).T, _rows(x).T).astype(x.dtype, copy=False)
    grad_x = _product(grad, w.T).astype(x.dtype, copy=False)
    if not with_bias:
        return grad_x, grad_w
    sums = _rows(grad).astype(working_dtype(x), copy=False).sum(axis=0)
    return grad_x, grad_w, sums.astype(x.dtype, copy=False)


def gated_linear_backward(
    grad_out: Array,
    x: Array,
    w: Array,
    preactivation: Array,
    activation: str = "silu",
    *,
    down: Array | None = None,
) -> tuple[Array, Array]:
    """Gradients of `gated_linear` with respect to `x` and `w`, gate rows before up rows.

    down: weight of the linear layer that follows; grad_out is then the gradient of its result.
    """
    half = w.shape[0] // 2
    outer, z = upcast(working_dtype(x), grad_out, preactivation)
    if down is not None:
        outer = _product(grad_out, down.T)
    gate, up = z[..., :half], z[..., half:]
    grad_gate = outer * up * activation_slope(gate, activation)
    grad = array_namespace(x).concatenate([grad_gate, outer * activate(gate, activation)], axis=-1)
    grad_x, grad_w = linear_backward(grad.astype(x.dtype, copy=False), x, w)
    return grad_x, grad_w


def _product(x: Array, w: Array) -> Array:
    """x w^T in the working dtype."""
    left, right = upcast(working_dtype(x, w), x, w)
    return array_namespace(x).matmul(left, right.T)


def matmul_standard(
    xp: Any,
    a: Array,
    b: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out_dtype: Any = None,
) -> Array:
    """op(a) @ op(b) using the array API standard only; `xp` is the namespace."""
    left, right = (xp.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1])) for x in (a, b))
    left = xp.matrix_transpose(left) if transpose_a else left
    product = xp.matmul(left, xp.matrix_transpose(right) if transpose_b else right)
    if not transpose_a:
        product = xp.reshape(product, (*a.shape[:-1], product.shape[1]))
    return product if out_dtype is None else xp.astype(product, out_dtype)


def _rows(array: Array) -> Array:
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def tree_matmul(
    a: Array,
    b: Array,
    *,
    transpose_b: bool = False,
    leaf: int = 512,
    strassen: bool = False,
    out: Array | None = None,
    out_dtype: Any = None,
) -> Array:
    """a @ b with the sum over k halved recursively down to `leaf` terms, as ck.tree_matmul."""
    xp = array_namespace(a)
    left, right = upcast(working_dtype(a, b), _rows(a), b.T if transpose_b else b)
    product = _strassen(xp, left, right, leaf) if strassen else _halves(xp, left, right, leaf)
    product = product.reshape(*a.shape[:-1], product.shape[1])
    if out is None:
        return product.astype(a.dtype if out_dtype is None else out_dtype, copy=False)
    out[...] = product
    return out


def _halves(xp: Any, a: Array, b: Array, leaf: int) -> Array:
    k = a.shape[1]
    if k <= leaf:
        return xp.matmul(a, b)
    middle = half_of(k, leaf)
    return _halves(xp, a[:, :middle], b[:middle], leaf) + _halves(
        xp, a[:, middle:], b[middle:], leaf
    )


def half_of(k: int, leaf: int) -> int:
    """The split point of a sum of k > leaf terms: after half of its leaves."""
    leaves = -(-k // leaf)
    return (leaves + 1) // 2 * leaf


def _strassen(xp: Any, a: Array, b: Array, leaf: int) -> Array:
    """One level of Strassen's algorithm: seven products of blocks instead of eight."""
    m, k, n = a.shape[0] // 2, a.shape[1] // 2, b.shape[1] // 2
    a11, a12, a21, a22 = a[:m, :k], a[:m, k:], a[m:, :k], a[m:, k:]
    b11, b12, b21, b22 = b[:k, :n], b[:k, n:], b[k:, :n], b[k:, n:]
    p1 = _halves(xp, a11 + a22, b11 + b22, leaf)
    p2 = _halves(xp, a21 + a22, b11, leaf)
    p3 = _halves(xp, a11, b12 - b22, leaf)
    p4 = _halves(xp, a22, b21 - b11, leaf)
    p5 = _halves(xp, a11 + a12, b22, leaf)
    p6 = _halves(xp, a21 - a11, b11 + b12, leaf)
    p7 = _halves(xp, a12 - a22, b21 + b22, leaf)
    upper = xp.concatenate([p1 + p4 - p5 + p7, p3 + p5], axis=1)
    lower = xp.concatenate([p2 + p4, p1 - p2 + p3 + p6], axis=1)
    return xp.concatenate([upper, lower], axis=0)
