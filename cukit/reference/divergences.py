"""Divergences between the softmax of teacher and student logits, row by row, with gradients.

    p = softmax(teacher / T),  q = softmax(student / T),  d = log p - log q

Each divergence is a sum of non-negative terms. If p and q are close, a term is computed as a power
series in d or in x = min(p, q) / max(p, q) - 1, because cancellation would leave no correct digits
in the usual sum of p d. The gradient with respect to student / T is
q_v (slope_v - sum_w q_w slope_w), where slope_v is the derivative with respect to q_v, shifted by a
constant so that it is 0 at d = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cukit.reference._xp import array_namespace

Array = Any

NO_MASS = -1e30
"""Logits below this have probability 0: -inf, and mask values such as the lowest float32."""

_REMAINDER_RADIUS = 0.5
_REMAINDER = tuple((-1.0) ** k / math.factorial(k) for k in range(2, 19))
"""Taylor coefficients of expm1(-d) + d = d^2/2 - d^3/6 + ..., enough for float64."""

_EXCESS_RADIUS = 0.125
_LOG_EXCESS = tuple((-1.0) ** k / k for k in range(2, 20))
"""Taylor coefficients of w - log(1 + w) = w^2/2 - w^3/3 + ..."""
_ENTROPY_EXCESS = tuple((-1.0) ** k / (k * (k - 1)) for k in range(2, 20))
"""Taylor coefficients of (1 + x) log(1 + x) - x = x^2/2 - x^3/6 + ..."""


def softmax(xp: Any, z: Array, scale: float = 1.0) -> tuple[Array, Array, Array]:
    """Softmax of scale * z, maximum of z (at least NO_MASS) and sum of exp(scale * (z - maximum)),
    row by row.

    Softmax and sum are 0 for a row of logits below NO_MASS.
    """
    top = xp.maximum(xp.max(z, axis=-1, keepdims=True), z.dtype.type(NO_MASS))
    with np.errstate(invalid="ignore"):  # infinities, possibly in ignored rows
        exps = z - top
    if scale != 1:
        exps *= scale
    xp.exp(exps, out=exps)
    total = xp.sum(exps, axis=-1, keepdims=True)
    exps /= xp.where(total == 0, total.dtype.type(1), total)
    return exps, top, total


_LIMITS: dict[str, dict[float, str]] = {
    "jsd": {0: "forward_kl", 1: "reverse_kl"},
    "skewed_forward_kl": {0: "forward_kl"},
    "skewed_reverse_kl": {0: "reverse_kl"},
}


def divergence_at(divergence: str, beta: float) -> str:
    """The KL divergence that a skewed divergence with `beta` 0 equals, or that is the limit of
    jsd / beta or jsd / (1 - beta) for the JSD with `beta` 0 or 1, which would be 0; otherwise
    `divergence`."""
    return _LIMITS.get(divergence, {}).get(beta, divergence)


def divergence_rows(
    student: Array, teacher: Array, kept: Array, temperature: float, divergence: str, beta: float
) -> tuple[Array, Array]:
    """The divergence of each row [rows] and its gradient with respect to the student's logits
    [rows, vocab]; 0 where `kept` is False or all logits of a model are below NO_MASS."""
    xp, divergence = array_namespace(student), divergence_at(divergence, beta)
    inverse = student.dtype.type(1.0 / temperature)
    q, q_top, q_total = softmax(xp, student, inverse)
    p, p_top, p_total = softmax(xp, teacher, inverse)
    active = kept & (q_total[:, 0] != 0) & (p_total[:, 0] != 0)
    safe_q, safe_p = (xp.where(total == 0, 1, total) for total in (q_total, p_total))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # in branches not taken
        # log p - log q. The logarithm of the ratio of the two sums, which is near 1 for similar
        # models, is more precise than the difference of their logarithms.
        d = ((teacher - student) - (p_top - q_top)) * inverse - xp.log(safe_p / safe_q)
        d = xp.where((p == 0) & (q == 0), d.dtype.type(0), d)
        if divergence == "forward_kl":
            terms, gradient = forward_kl(xp, p, q, d)
        else:
            terms, slope = _CENTRED[divergence](xp, p, q, d, d.dtype.type(beta))
            slope = xp.where(q > 0, slope, slope.dtype.type(0))
            gradient = q * (slope - xp.sum(q * slope, axis=-1, keepdims=True))
    loss = xp.where(active, xp.sum(terms, axis=-1), 0).astype(student.dtype, copy=False)
    gradient = xp.where(active[:, None], gradient, gradient.dtype.type(0))
    gradient *= inverse
    return loss, gradient


def forward_kl(xp: Any, p: Array, q: Array, d: Array) -> tuple[Array, Array]:
    """Terms p (expm1(-d) + d) with d = log p - log q, and q - p, accurate for small d."""
    near = xp.abs(d) < _REMAINDER_RADIUS
    series = _remainder(xp, d)
    gradient = xp.where(near, p * (series - d), q - p)
    terms = xp.where(near, p * series, gradient + xp.where(p > 0, p * d, 0))
    return terms, gradient


def _reverse_kl(xp: Any, p: Array, q: Array, d: Array, beta: Any) -> tuple[Array, Array]:
    near = xp.abs(d) < _REMAINDER_RADIUS
    far = p - q - xp.where(q > 0, q * d, 0)
    return xp.where(near, q * _remainder(xp, -d), far), -d


def _jsd(xp: Any, p: Array, q: Array, d: Array, beta: Any) -> tuple[Array, Array]:
    gap, x, likelier, larger = _compare(xp, p, q, d)
    share = xp.where(likelier, 1 - beta, beta)  # weight of min(p, q) in m = beta p + (1 - beta) q
    log_m = xp.log1p(share * x)  # log(m / larger)
    own = xp.where(x > -1, -(1 + x) * gap, 0)
    of_x = _excess(xp, x, own - x, _ENTROPY_EXCESS)
    of_m = _excess(xp, share * x, (1 + share * x) * log_m - share * x, _ENTROPY_EXCESS)
    log_ratio = xp.where(likelier, -gap, 0) - log_m
    return larger * (share * of_x - of_m), (1 - beta) * log_ratio


def _skewed_forward_kl(xp: Any, p: Array, q: Array, d: Array, beta: Any) -> tuple[Array, Array]:
    terms, fraction, _ = _skewed(xp, p, q, d, beta)
    return terms, (1 - beta) * fraction


def _skewed_reverse_kl(xp: Any, p: Array, q: Array, d: Array, beta: Any) -> tuple[Array, Array]:
    terms, fraction, log_ratio = _skewed(xp, q, p, -d, beta)
    return terms, log_ratio + beta * fraction


def _skewed(xp: Any, a: Array, b: Array, d: Array, beta: Any) -> tuple[Array, Array, Array]:
    """Terms a log(a / m) - a + m with m = beta a + (1 - beta) b, 1 - a / m and log(a / m)."""
    gap, x, likelier, _ = _compare(xp, a, b, d)
    share = 1 - beta
    of_smaller = xp.where(likelier, share, beta)
    m = 1 + of_smaller * x  # m / max(a, b)
    log_m = xp.log1p(of_smaller * x)
    w = share * xp.where(likelier, x, -x / (1 + x))  # m / a - 1
    by_series = likelier | (w < _EXCESS_RADIUS)
    far = xp.where(x > -1, (1 + x) * (-gap - log_m) - share * x, share)
    terms = xp.where(by_series, a * _excess(xp, w, w - log_m, _LOG_EXCESS), b * far)
    log_ratio = xp.where(likelier, 0, -gap) - log_m
    return terms, xp.where(likelier, x, -x) * share / m, log_ratio


def _total_variation(xp: Any, p: Array, q: Array, d: Array, beta: Any) -> tuple[Array, Array]:
    _, x, _, larger = _compare(xp, p, q, d)
    return -larger * x / 2, -xp.sign(d) / 2


_CENTRED: dict[str, Callable[..., tuple[Array, Array]]] = {
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
    "skewed_forward_kl": _skewed_forward_kl,
    "skewed_reverse_kl": _skewed_reverse_kl,
    "total_variation": _total_variation,
}


def _compare(xp: Any, p: Array, q: Array, d: Array) -> tuple[Array, Array, Array, Array]:
    """|d|, x = min(p, q) / max(p, q) - 1, whether p >= q, and max(p, q)."""
    gap, likelier = xp.abs(d), d >= 0
    return gap, xp.expm1(-gap), likelier, xp.where(likelier, p, q)


def _remainder(xp: Any, d: Array) -> Array:
    """expm1(-d) + d without cancellation, for |d| < _REMAINDER_RADIUS."""
    near = xp.where(xp.abs(d) < _REMAINDER_RADIUS, d, d.dtype.type(0))
    return _series(near, _REMAINDER)


def _excess(xp: Any, x: Array, far: Array, coefficients: tuple[float, ...]) -> Array:
    """The series for |x| < _EXCESS_RADIUS, else `far`."""
    near = xp.abs(x) < _EXCESS_RADIUS
    return xp.where(near, _series(xp.where(near, x, x.dtype.type(0)), coefficients), far)


def _series(x: Array, coefficients: tuple[float, ...]) -> Array:
    """x^2 (c_0 + c_1 x + ...): all coefficients for float64, the first eight for float32."""
    count = len(coefficients) if x.dtype.itemsize == 8 else 8
    value = x * x.dtype.type(coefficients[count - 1])
    for coefficient in reversed(coefficients[1 : count - 1]):
        value = (value + coefficient) * x
    return (value + coefficients[0]) * x * x
