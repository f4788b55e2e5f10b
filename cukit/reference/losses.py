"""Cross-entropy and forward KL divergence on logits, and both fused with a language-model head.

Rows are the flattened leading axes. A row counts for nothing (zero loss, zero gradient) when its
target is `ignore_index` or when one of its distributions has no mass at all: every logit below
`NO_MASS`, -inf included. The mean divides by the number of rows that are not ignored.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cukit.reference._xp import array_namespace, working_dtype
from cukit.reference.gemm import matmul

Array = Any

NO_MASS = -1e30
"""Logits below this carry no probability: -inf, and masks such as float32's smallest number."""

_SERIES_RADIUS = 0.5
_SERIES = tuple((-1.0) ** k / math.factorial(k) for k in range(2, 19))
"""Taylor coefficients of expm1(-d) + d = d^2/2 - d^3/6 + ..., enough for float64."""


class LinearKlResult(NamedTuple):
    """What linear_kl_divergence returns: float32 0-d losses and the gradients of `loss`."""

    loss: Array
    """soft_weight * soft_loss + hard_weight * hard_loss."""
    soft_loss: Array
    """The KL divergence, with its temperature-squared factor where asked for."""
    hard_loss: Array
    """The cross-entropy on the targets; 0 where `hard_weight` is 0."""
    grad_hidden: Array
    grad_weight: Array


class LinearCrossEntropyResult(NamedTuple):
    """What linear_cross_entropy returns: the float32 0-d loss and its gradients."""

    loss: Array
    grad_hidden: Array
    grad_weight: Array


def cross_entropy(
    logits: Array,
    targets: Array,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: Any = None,
    return_grad: bool = False,
    grad_loss: Any = None,
) -> Array | tuple[Array, Array]:
    """loss = log sum_v exp z_v - z_target; with `return_grad`, also softmax - onehot."""
    z, ids = _rows(logits), targets.reshape(-1)
    kept = ids != ignore_index
    rows, grad = _cross_entropy_rows(z, ids, kept, want_grad=return_grad)
    factor = _factor(kept, reduction, normalizer, z.dtype)
    loss = _reduce(rows, factor, reduction)
    if not return_grad:
        return loss
    return loss, _scaled(grad, factor, grad_loss, logits)


def cross_entropy_backward(
    grad_loss: Any,
    logits: Array,
    targets: Array,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: Any = None,
    inplace: bool = False,
) -> Array:
    """Gradient of cross_entropy for the logits."""
    _, grad = cross_entropy(
        logits,
        targets,
        ignore_index=ignore_index,
        reduction=reduction,
        normalizer=normalizer,
        return_grad=True,
        grad_loss=grad_loss,
    )
    return _into(logits, grad) if inplace else grad


def kl_divergence(
    student_logits: Array,
    teacher_logits: Array,
    *,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    targets: Array | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: Any = None,
    return_grad: bool = False,
    grad_loss: Any = None,
) -> Array | tuple[Array, Array]:
    """KL(p || q), p = softmax(teacher / T), q = softmax(student / T); optionally times T^2.

    Summed as p (expm1(-d) + d), d = log p - log q: every term is >= 0 and nothing cancels, where
    the usual sum of p d loses all digits near convergence.
    """
    xp = array_namespace(student_logits)
    student, teacher = _rows(student_logits), _rows(teacher_logits)
    kept = _kept(xp, targets, ignore_index, student)
    rows, grad = _kl_rows(student, teacher, kept, temperature)
    factor = _factor(kept, reduction, normalizer, student.dtype)
    if scale_by_temperature_squared:
        factor = factor * temperature**2
    loss = _reduce(rows, factor, reduction)
    if not return_grad:
        return loss
    return loss, _scaled(grad, factor, grad_loss, student_logits)


def kl_divergence_backward(
    grad_loss: Any,
    student_logits: Array,
    teacher_logits: Array,
    *,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    targets: Array | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: Any = None,
    inplace: bool = False,
) -> Array:
    """Gradient of kl_divergence for the student's logits."""
    _, grad = kl_divergence(
        student_logits,
        teacher_logits,
        temperature=temperature,
        scale_by_temperature_squared=scale_by_temperature_squared,
        targets=targets,
        ignore_index=ignore_index,
        reduction=reduction,
        normalizer=normalizer,
        return_grad=True,
        grad_loss=grad_loss,
    )
    return _into(student_logits, grad) if inplace else grad


def linear_kl_divergence(
    hidden: Array,
    weight: Array,
    teacher_hidden: Array,
    teacher_weight: Array,
    *,
    targets: Array | None = None,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    normalizer: Any = None,
    grad_weight: Array | None = None,
    chunk_tokens: int | None = None,
) -> LinearKlResult:
    """soft_weight * KL + hard_weight * cross-entropy of the logits hidden @ weight^T.

    Computed on the whole logits at once: `chunk_tokens` changes nothing here.
    """
    xp = array_namespace(hidden)
    work = working_dtype(hidden)
    logits = _logits(hidden, weight, work)
    teacher = _logits(teacher_hidden, teacher_weight, work)
    kept = _kept(xp, targets, ignore_index, logits)
    factor = _factor(kept, "mean", normalizer, work)
    rows, grad = _kl_rows(logits, teacher, kept, temperature)
    soft_factor = factor * temperature**2 if scale_by_temperature_squared else factor
    soft = _reduce(rows, soft_factor, "mean")
    grad *= soft_factor * soft_weight
    hard = xp.zeros((), soft.dtype)
    if targets is not None and hard_weight != 0.0:
        rows, hard_grad = _cross_entropy_rows(logits, targets.reshape(-1), kept, want_grad=True)
        hard = _reduce(rows, factor, "mean")
        hard_grad *= factor * hard_weight
        grad += hard_grad
    loss = xp.asarray(soft * soft_weight + hard * hard_weight, soft.dtype)
    return LinearKlResult(loss, soft, hard, *_head_gradients(grad, hidden, weight, grad_weight))


def linear_cross_entropy(
    hidden: Array,
    weight: Array,
    targets: Array,
    *,
    ignore_index: int = -100,
    normalizer: Any = None,
    grad_weight: Array | None = None,
    chunk_tokens: int | None = None,
) -> LinearCrossEntropyResult:
    """Cross-entropy of the logits hidden @ weight^T, with the gradients of both factors."""
    work = working_dtype(hidden)
    logits = _logits(hidden, weight, work)
    ids = targets.reshape(-1)
    kept = ids != ignore_index
    rows, grad = _cross_entropy_rows(logits, ids, kept, want_grad=True)
    factor = _factor(kept, "mean", normalizer, work)
    loss = _reduce(rows, factor, "mean")
    grad *= factor
    return LinearCrossEntropyResult(loss, *_head_gradients(grad, hidden, weight, grad_weight))


def _logits(hidden: Array, weight: Array, work: Any) -> Array:
    return matmul(_rows(hidden), weight.astype(work, copy=False), transpose_b=True)


def _rows(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1]).astype(working_dtype(array), copy=False)


def _kept(xp: Any, targets: Array | None, ignore_index: int, rows: Array) -> Array:
    if targets is None:
        return xp.ones(rows.shape[0], bool)
    return targets.reshape(-1) != ignore_index


def _softmax(xp: Any, z: Array, scale: float = 1.0) -> tuple[Array, Array, Array]:
    """Softmax of scale * z, z's maximum and the sum of exp(scale * (z - maximum)), row by row.

    A row without mass has softmax zero.
    """
    top = xp.maximum(xp.max(z, axis=-1, keepdims=True), z.dtype.type(NO_MASS))
    with np.errstate(invalid="ignore"):  # infinities, in rows that may well be ignored
        exps = z - top
    if scale != 1:
        exps *= scale
    xp.exp(exps, out=exps)
    total = xp.sum(exps, axis=-1, keepdims=True)
    exps /= xp.where(total == 0, total.dtype.type(1), total)
    return exps, top, total


def _cross_entropy_rows(
    z: Array, targets: Array, kept: Array, *, want_grad: bool
) -> tuple[Array, Array | None]:
    """Loss [rows] and gradient [rows, vocab] of each row on its own."""
    xp = array_namespace(z)
    grad, top, total = _softmax(xp, z)
    active = kept & (total[:, 0] != 0)
    in_range = (targets >= 0) & (targets < z.shape[1])
    index = xp.where(in_range, targets, 0)[:, None]
    at_target = xp.take_along_axis(z, index, axis=1)
    with np.errstate(invalid="ignore"):
        loss = xp.log(xp.where(active[:, None], total, 1)) - (at_target - top)
    # A target outside the vocabulary poisons its row: a kernel cannot raise.
    loss = xp.where(in_range, loss[:, 0], loss.dtype.type(math.nan))
    loss = xp.where(active, loss, loss.dtype.type(0)).astype(z.dtype, copy=False)
    if not want_grad:
        return loss, None
    xp.put_along_axis(grad, index, xp.take_along_axis(grad, index, axis=1) - 1, axis=1)
    grad[~in_range] = math.nan
    grad[~active] = 0
    return loss, grad


def _kl_rows(
    student: Array, teacher: Array, kept: Array, temperature: float
) -> tuple[Array, Array]:
    """KL [rows] and its gradient for the student's logits [rows, vocab], each row on its own."""
    xp = array_namespace(student)
    inverse = student.dtype.type(1.0 / temperature)
    q, q_top, q_total = _softmax(xp, student, inverse)
    p, p_top, p_total = _softmax(xp, teacher, inverse)
    active = kept & (q_total[:, 0] != 0) & (p_total[:, 0] != 0)
    safe_q, safe_p = (xp.where(total == 0, 1, total) for total in (q_total, p_total))
    with np.errstate(invalid="ignore", over="ignore"):  # of branches that are not taken
        # log p - log q, with the sums' logarithms taken of their ratio, which is near one.
        d = ((teacher - student) - (p_top - q_top)) * inverse - xp.log(safe_p / safe_q)
        near = xp.abs(d) < _SERIES_RADIUS
        series = _exponential_remainder(xp.where(near, d, 0))
        difference = xp.where(near, p * (series - xp.where(near, d, 0)), q - p)
        terms = xp.where(near, p * series, difference + xp.where(p > 0, p * d, 0))
    loss = xp.where(active, xp.sum(terms, axis=-1), 0).astype(student.dtype, copy=False)
    difference[~active] = 0
    difference *= inverse
    return loss, difference


def _exponential_remainder(d: Array) -> Array:
    """expm1(-d) + d for |d| < _SERIES_RADIUS, without cancellation."""
    count = 17 if d.dtype.itemsize == 8 else 8
    value = d * _SERIES[count - 1]
    for coefficient in reversed(_SERIES[1 : count - 1]):
        value = (value + coefficient) * d
    return (value + _SERIES[0]) * d * d


def _factor(kept: Array, reduction: str, normalizer: Any, dtype: Any) -> Any:
    """What a row's loss and gradient are multiplied by, as a 0-d array."""
    xp = array_namespace(kept)
    if reduction != "mean":
        return xp.ones((), dtype)
    if normalizer is None:
        normalizer = xp.maximum(xp.sum(kept), 1)
    return (1.0 / xp.asarray(normalizer, dtype)).astype(dtype)


def _reduce(rows: Array, factor: Array, reduction: str) -> Array:
    """float32 (float64 for float64 logits), 0-d; [rows] where reduction is "none"."""
    xp = array_namespace(rows)
    return rows * factor if reduction == "none" else xp.asarray(xp.sum(rows) * factor)


def _scaled(grad: Array, factor: Array, grad_loss: Any, like: Array) -> Array:
    xp = array_namespace(grad)
    grad *= factor
    if grad_loss is not None:
        grad *= xp.asarray(grad_loss, grad.dtype).reshape(-1, 1)
    return grad.reshape(like.shape).astype(like.dtype, copy=False)


def _head_gradients(
    grad: Array, hidden: Array, weight: Array, grad_weight: Array | None
) -> tuple[Array, Array]:
    """Gradients of logits = hidden @ weight^T, the second added to `grad_weight` where given."""
    grad_hidden = matmul(grad, weight.astype(grad.dtype, copy=False))
    grad_hidden = grad_hidden.reshape(hidden.shape).astype(hidden.dtype, copy=False)
    if grad_weight is None:
        grad_weight = matmul(grad, _rows(hidden), transpose_a=True).astype(weight.dtype, copy=False)
    else:
        matmul(grad, _rows(hidden), transpose_a=True, out=grad_weight, accumulate=True)
    return grad_hidden, grad_weight


def _into(out: Array, value: Array) -> Array:
    out[...] = value
    return out
