"""Cross-entropy and divergences on logits, and both fused with a language-model head.

Rows are the flattened leading axes. A row counts for nothing (zero loss, zero gradient) when its
target is `ignore_index` or when one of its distributions has no mass at all: every logit below
`NO_MASS`, -inf included. The mean divides by the number of rows that are not ignored.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cukit.reference._xp import array_namespace, working_dtype
from cukit.reference.divergences import divergence_rows, forward_kl, softmax
from cukit.reference.gemm import matmul

Array = Any


class LinearKlResult(NamedTuple):
    """What linear_distillation_loss returns: float32 0-d losses and the gradients of `loss`."""

    loss: Array
    """soft_weight * soft_loss + hard_weight * hard_loss."""
    soft_loss: Array
    """The divergence, with its temperature-squared factor where asked for."""
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


def distillation_loss(
    student_logits: Array,
    teacher_logits: Array,
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    targets: Array | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: Any = None,
    return_grad: bool = False,
    grad_loss: Any = None,
) -> Array | tuple[Array, Array]:
    """soft_weight * divergence(p, q) + hard_weight * cross-entropy, p = softmax(teacher / T) and
    q = softmax(student / T); the divergence optionally times T^2."""
    xp = array_namespace(student_logits)
    student, teacher = _rows(student_logits), _rows(teacher_logits)
    kept = _kept(xp, targets, ignore_index, student)
    rows, grad = divergence_rows(student, teacher, kept, temperature, divergence, beta)
    soft_factor = soft_weight * (temperature**2 if scale_by_temperature_squared else 1.0)
    if soft_factor != 1.0:
        rows, grad = rows * rows.dtype.type(soft_factor), grad * grad.dtype.type(soft_factor)
    if targets is not None and hard_weight != 0.0:
        hard_rows, hard_grad = _cross_entropy_rows(
            student, targets.reshape(-1), kept, want_grad=return_grad
        )
        rows = rows + hard_rows * rows.dtype.type(hard_weight)
        if return_grad:
            grad = grad + hard_grad * grad.dtype.type(hard_weight)
    factor = _factor(kept, reduction, normalizer, student.dtype)
    loss = _reduce(rows, factor, reduction)
    if not return_grad:
        return loss
    return loss, _scaled(grad, factor, grad_loss, student_logits)


def topk_distillation_loss(
    student_logits: Array,
    teacher_log_probs: Array,
    teacher_ids: Array,
    *,
    tail: str = "renormalise",
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    targets: Array | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: Any = None,
    return_grad: bool = False,
    grad_loss: Any = None,
) -> Array | tuple[Array, Array]:
    """KL(p || q) from a teacher of whom the probabilities of some tokens are known."""
    xp = array_namespace(student_logits)
    z = _rows(student_logits)
    log_p = teacher_log_probs.reshape(z.shape[0], -1).astype(z.dtype)
    ids = teacher_ids.reshape(log_p.shape).astype(np.int64)
    kept = _kept(xp, targets, ignore_index, z)
    inverse = z.dtype.type(1.0 / temperature)
    q, top, total = softmax(xp, z, inverse)
    known_p = xp.sum(xp.exp(log_p), axis=-1, keepdims=True)
    active = kept & (total[:, 0] != 0) & (known_p[:, 0] != 0)
    with np.errstate(divide="ignore", invalid="ignore"):  # of rows and branches not taken
        if tail == "renormalise":
            log_p = log_p - xp.log(known_p)
        p, known_q = xp.exp(log_p), xp.take_along_axis(q, ids, axis=1)
        log_q = (xp.take_along_axis(z, ids, axis=1) - top) * inverse - xp.log(total)
        terms, difference = forward_kl(xp, p, known_q, xp.where(p > 0, log_p - log_q, 0))
        rest_q = xp.maximum(1 - xp.sum(known_q, axis=-1, keepdims=True), 0)
        if tail == "bucket":
            rest_q = xp.maximum(rest_q, z.dtype.type(2.0**-24))
            rest_p = xp.maximum(1 - known_p, 0)
            rest, _ = forward_kl(xp, rest_p, rest_q, xp.log(rest_p / rest_q))
            gradient = q * (1 - rest_p / rest_q)
        else:
            rest, gradient = rest_q, q
    rows = xp.where(active, xp.sum(terms, axis=-1) + rest[:, 0], 0).astype(z.dtype)
    xp.put_along_axis(gradient, ids, difference, axis=1)
    gradient = xp.where(active[:, None], gradient, gradient.dtype.type(0)) * inverse
    factor = _factor(kept, reduction, normalizer, z.dtype)
    if scale_by_temperature_squared:
        factor = factor * temperature**2
    loss = _reduce(rows, factor, reduction)
    if not return_grad:
        return loss
    return loss, _scaled(gradient, factor, grad_loss, student_logits)


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
    """KL(p || q), p = softmax(teacher / T), q = softmax(student / T); optionally times T^2."""
    return distillation_loss(
        student_logits,
        teacher_logits,
        temperature=temperature,
        scale_by_temperature_squared=scale_by_temperature_squared,
        targets=targets,
        ignore_index=ignore_index,
        reduction=reduction,
        normalizer=normalizer,
        return_grad=return_grad,
        grad_loss=grad_loss,
    )


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


def linear_distillation_loss(
    hidden: Array,
    weight: Array,
    teacher_hidden: Array,
    teacher_weight: Array,
    *,
    targets: Array | None = None,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    normalizer: Any = None,
    grad_weight: Array | None = None,
    chunk_tokens: int | None = None,
) -> LinearKlResult:
    """soft_weight * divergence + hard_weight * cross-entropy of the logits hidden @ weight^T.

    Computed on the whole logits at once: `chunk_tokens` changes nothing here.
    """
    xp = array_namespace(hidden)
    work = working_dtype(hidden)
    logits = _logits(hidden, weight, work)
    teacher = _logits(teacher_hidden, teacher_weight, work)
    kept = _kept(xp, targets, ignore_index, logits)
    factor = _factor(kept, "mean", normalizer, work)
    rows, grad = divergence_rows(logits, teacher, kept, temperature, divergence, beta)
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


linear_kl_divergence = linear_distillation_loss
"""Its default divergence."""


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


def _cross_entropy_rows(
    z: Array, targets: Array, kept: Array, *, want_grad: bool
) -> tuple[Array, Array | None]:
    """Loss [rows] and gradient [rows, vocab] of each row on its own."""
    xp = array_namespace(z)
    grad, top, total = softmax(xp, z)
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
