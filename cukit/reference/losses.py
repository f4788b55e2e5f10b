"""Cross-entropy and divergences on logits, and both fused with a language-model head.

Rows are the flattened leading axes. A row is ignored (loss 0, gradient 0) if its target is
`ignore_index`, its weight is 0, or one of its distributions has no mass: all logits below
`NO_MASS`, including -inf. Logits are `softcap * tanh(logit_scale * x / softcap)` of the first
`vocab_size` columns of the argument x; gradients are with respect to x.
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
    """Result of the distillation losses fused with a head: the losses, float32 (float64 for float64
    arguments), [rows] with reduction "none", and the gradients of `loss`."""

    loss: Array
    """soft_weight * soft_loss + hard_weight * hard_loss."""
    soft_loss: Array
    """The divergence, with the factor T^2 if requested."""
    hard_loss: Array
    """The cross-entropy of the targets; 0 if `hard_weight` is 0."""
    grad_hidden: Array
    grad_weight: Array
    grad_bias: Array | None = None
    """None if the head has no bias."""


class LinearCrossEntropyResult(NamedTuple):
    """Result of linear_cross_entropy: the loss, float32 (float64 for float64 arguments), and its
    gradients."""

    loss: Array
    grad_hidden: Array
    grad_weight: Array
    grad_bias: Array | None = None


class _Parts(NamedTuple):
    """Losses [rows] and gradients [rows, vocab] of the individual rows."""

    soft: Array | None
    soft_grad: Array | None
    hard: Array | None
    hard_grad: Array | None


class _Rows:
    """The weights of the rows, and the factor of the reduction."""

    def __init__(
        self,
        like: Array,
        targets: Array | None,
        token_weights: Array | None,
        ignore_index: int,
        reduction: str,
        normalizer: Any,
    ) -> None:
        """like: the logits, [rows, vocab]."""
        xp, self.reduction = array_namespace(like), reduction
        self.targets = None if targets is None else targets.reshape(-1)
        kept = xp.ones(like.shape[0], bool)
        if targets is not None:
            kept = self.targets != ignore_index
        weights = kept.astype(like.dtype)
        if token_weights is not None:
            weights = xp.where(kept, token_weights.reshape(-1), 0).astype(like.dtype)
        self.kept, self.weights = kept & (weights != 0), weights
        self.factor = xp.ones((), like.dtype)
        if reduction in ("mean", "tokens"):
            if normalizer is None:
                total = xp.sum(weights if reduction == "mean" else kept.astype(like.dtype))
                normalizer = xp.where(total == 0, like.dtype.type(1), total)
            self.factor = (1.0 / xp.asarray(normalizer, like.dtype)).astype(like.dtype)

    def reduce(self, rows: Array) -> Array:
        """The reduced loss, float32 (float64 for float64 logits); [rows] for reduction "none"."""
        xp = array_namespace(rows)
        rows = xp.where(self.kept, rows, rows.dtype.type(0)) * self.weights
        return rows if self.reduction == "none" else xp.asarray(xp.sum(rows) * self.factor)

    def scale(self, grad: Array, grad_loss: Any) -> Array:
        """The gradient of the reduced loss, times `grad_loss`."""
        xp = array_namespace(grad)
        factor = self.weights * self.factor
        if grad_loss is not None:
            factor = factor * xp.asarray(grad_loss, grad.dtype).reshape(-1)
        counted = self.kept & (factor != 0)  # a gradient of 0 times infinity would be NaN
        return xp.where(counted[:, None], grad * factor[:, None], grad.dtype.type(0))


class _Logits(NamedTuple):
    """Logits [rows, vocab] computed from an array, and the gradient with respect to the array."""

    values: Array
    slope: Array | None
    """Derivative of the logits with respect to the array's elements; None: 1."""
    width: int
    """Number of columns of the array."""

    @classmethod
    def of(
        cls, array: Array, vocab_size: int | None, scale: float = 1.0, softcap: float | None = None
    ) -> _Logits:
        z = array.reshape(-1, array.shape[-1]).astype(working_dtype(array), copy=False)
        z = z[:, :vocab_size]
        if scale == 1.0 and softcap is None:
            return cls(z, None, array.shape[-1])
        xp, number = array_namespace(z), z.dtype.type
        z = z * number(scale)
        if softcap is None:
            return cls(z, xp.full((1, 1), scale, z.dtype), array.shape[-1])
        share = xp.tanh(z * number(1.0 / softcap))
        return cls(number(softcap) * share, number(scale) * (1 - share * share), array.shape[-1])

    def gradient(self, grad: Array, like: Array | None = None) -> Array:
        """The gradient with respect to the array, with shape and dtype of `like`, from the gradient
        of the logits; without `like`, of the columns in use only."""
        grad = grad if self.slope is None else grad * self.slope
        if like is None:
            return grad
        xp = array_namespace(grad)
        whole = xp.zeros((grad.shape[0], self.width), like.dtype)
        whole[:, : grad.shape[1]] = grad
        return whole.reshape(like.shape)


def cross_entropy(
    logits: Array,
    targets: Array,
    *,
    token_weights: Array | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    return_grad: bool = False,
    grad_loss: Any = None,
) -> Array | tuple[Array, Array]:
    """loss = log sum_v exp z_v - z_target; with `return_grad`, also softmax - onehot."""
    z = _Logits.of(logits, vocab_size, logit_scale, softcap)
    rows = _Rows(z.values, targets, token_weights, ignore_index, reduction, normalizer)
    losses, grad = _cross_entropy_rows(z.values, rows, want_grad=return_grad)
    loss = rows.reduce(losses)
    if not return_grad:
        return loss
    return loss, z.gradient(rows.scale(grad, grad_loss), logits)


def cross_entropy_backward(
    grad_loss: Any, logits: Array, targets: Array, *, inplace: bool = False, **options: Any
) -> Array:
    """Gradient of cross_entropy, with its options, with respect to the logits."""
    _, grad = cross_entropy(logits, targets, return_grad=True, grad_loss=grad_loss, **options)
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
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    targets: Array | None = None,
    token_weights: Array | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    return_grad: bool = False,
    grad_loss: Any = None,
) -> Array | tuple[Array, Array]:
    """soft_weight * divergence(p, q) + hard_weight * cross-entropy, p = softmax(teacher / T) and
    q = softmax(student / T); the divergence optionally times T^2."""
    student = _Logits.of(student_logits, vocab_size, logit_scale, softcap)
    teacher = _Logits.of(teacher_logits, vocab_size, teacher_logit_scale, teacher_softcap)
    rows = _Rows(student.values, targets, token_weights, ignore_index, reduction, normalizer)
    soft = divergence_rows(student.values, teacher.values, rows.kept, temperature, divergence, beta)
    square = temperature**2 if scale_by_temperature_squared else 1.0
    parts = _parts(soft, square, student.values, rows, hard_weight, return_grad)
    return _mix(parts, rows, student, student_logits, soft_weight, hard_weight, return_grad,
                grad_loss)  # fmt: skip


def kl_divergence(
    student_logits: Array, teacher_logits: Array, **options: Any
) -> Array | tuple[Array, Array]:
    """distillation_loss with the forward KL divergence only, KL(p || q)."""
    return distillation_loss(student_logits, teacher_logits, **options)


def kl_divergence_backward(
    grad_loss: Any,
    student_logits: Array,
    teacher_logits: Array,
    *,
    inplace: bool = False,
    **options: Any,
) -> Array:
    """Gradient of kl_divergence, with its options, with respect to the student's logits."""
    _, grad = kl_divergence(
        student_logits, teacher_logits, return_grad=True, grad_loss=grad_loss, **options
    )
    return _into(student_logits, grad) if inplace else grad


def topk_distillation_loss(
    student_logits: Array,
    teacher_log_probs: Array,
    teacher_ids: Array,
    *,
    tail: str = "renormalise",
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    targets: Array | None = None,
    token_weights: Array | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    return_grad: bool = False,
    grad_loss: Any = None,
) -> Array | tuple[Array, Array]:
    """KL(p || q) for a teacher whose probabilities are known for some tokens only."""
    student = _Logits.of(student_logits, vocab_size, logit_scale, softcap)
    rows = _Rows(student.values, targets, token_weights, ignore_index, reduction, normalizer)
    soft = _topk_rows(student.values, teacher_log_probs, teacher_ids, rows.kept, tail, temperature)
    square = temperature**2 if scale_by_temperature_squared else 1.0
    parts = _parts(soft, square, student.values, rows, hard_weight, return_grad)
    return _mix(parts, rows, student, student_logits, soft_weight, hard_weight, return_grad,
                grad_loss)  # fmt: skip


def sampled_distillation_loss(
    student_logits: Array,
    sample_ids: Array,
    sample_weights: Array | None = None,
    *,
    teacher_log_probs: Array | None = None,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    targets: Array | None = None,
    token_weights: Array | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    return_grad: bool = False,
    grad_loss: Any = None,
) -> Array | tuple[Array, Array]:
    """sum_k w_k (log p_k - log q_k) over tokens sampled from a teacher; log p_k is 0 without
    `teacher_log_probs`."""
    student = _Logits.of(student_logits, vocab_size, logit_scale, softcap)
    rows = _Rows(student.values, targets, token_weights, ignore_index, reduction, normalizer)
    soft = _sampled_rows(
        student.values, sample_ids, sample_weights, teacher_log_probs, rows.kept, temperature
    )
    square = temperature**2 if scale_by_temperature_squared else 1.0
    parts = _parts(soft, square, student.values, rows, hard_weight, return_grad)
    return _mix(parts, rows, student, student_logits, soft_weight, hard_weight, return_grad,
                grad_loss)  # fmt: skip


def linear_distillation_loss(
    hidden: Array,
    weight: Array,
    teacher_hidden: Array,
    teacher_weight: Array,
    *,
    bias: Array | None = None,
    teacher_bias: Array | None = None,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    **options: Any,
) -> LinearKlResult:
    """distillation_loss of the logits hidden @ weight^T + bias, with gradients for hidden, weight
    and bias.

    The full logits are computed at once: `chunk_tokens` and `workspace_bytes` have no effect.
    """

    def soft(student: Array, kept: Array, temperature: float) -> tuple[Array, Array]:
        logits = _head_logits(teacher_hidden, teacher_weight, teacher_bias)
        vocab_size = student.shape[1]
        teacher = _Logits.of(logits, vocab_size, teacher_logit_scale, teacher_softcap).values
        return divergence_rows(student, teacher, kept, temperature, divergence, beta)

    return _linear_loss(hidden, weight, bias, soft, **options)


def linear_kl_divergence(*head: Array, **options: Any) -> LinearKlResult:
    """linear_distillation_loss with the forward KL divergence only."""
    return linear_distillation_loss(*head, **options)


def linear_topk_distillation_loss(
    hidden: Array,
    weight: Array,
    teacher_log_probs: Array,
    teacher_ids: Array,
    *,
    bias: Array | None = None,
    tail: str = "renormalise",
    **options: Any,
) -> LinearKlResult:
    """topk_distillation_loss of the logits hidden @ weight^T + bias."""

    def soft(student: Array, kept: Array, temperature: float) -> tuple[Array, Array]:
        return _topk_rows(student, teacher_log_probs, teacher_ids, kept, tail, temperature)

    return _linear_loss(hidden, weight, bias, soft, **options)


def linear_sampled_distillation_loss(
    hidden: Array,
    weight: Array,
    sample_ids: Array,
    sample_weights: Array | None = None,
    *,
    teacher_log_probs: Array | None = None,
    bias: Array | None = None,
    **options: Any,
) -> LinearKlResult:
    """sampled_distillation_loss of the logits hidden @ weight^T + bias."""

    def soft(student: Array, kept: Array, temperature: float) -> tuple[Array, Array]:
        return _sampled_rows(
            student, sample_ids, sample_weights, teacher_log_probs, kept, temperature
        )

    return _linear_loss(hidden, weight, bias, soft, **options)


def linear_cross_entropy(
    hidden: Array, weight: Array, targets: Array, *, bias: Array | None = None, **options: Any
) -> LinearCrossEntropyResult:
    """Cross-entropy of the logits hidden @ weight^T + bias, with gradients for hidden, weight and
    bias."""
    options |= {"targets": targets, "soft_weight": 0.0, "hard_weight": 1.0}
    result = _linear_loss(hidden, weight, bias, None, **options)
    return LinearCrossEntropyResult(result.hard_loss, *result[3:])


def _linear_loss(
    hidden: Array,
    weight: Array,
    bias: Array | None,
    soft: Any,
    *,
    targets: Array | None = None,
    token_weights: Array | None = None,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    grad_loss: Any = None,
    grad_weight: Array | None = None,
    grad_bias: Array | None = None,
    chunk_tokens: int | None = None,
    workspace_bytes: int | None = None,
) -> LinearKlResult:
    """soft(student logits, mask of kept rows, temperature) returns losses and gradients of the
    rows."""
    logits = _head_logits(hidden, weight, bias)
    student = _Logits.of(logits, vocab_size, logit_scale, softcap)
    rows = _Rows(student.values, targets, token_weights, ignore_index, reduction, normalizer)
    found = None if soft is None else soft(student.values, rows.kept, temperature)
    square = temperature**2 if scale_by_temperature_squared else 1.0
    parts = _parts(found, square, student.values, rows, hard_weight, True)
    soft_loss, hard_loss, loss = _losses(parts, rows, soft_weight, hard_weight)
    grad = rows.scale(_weighted(parts, soft_weight, hard_weight), grad_loss)
    grad = student.gradient(grad, logits)
    grads = _head_gradients(grad, hidden, weight, bias, grad_weight, grad_bias)
    return LinearKlResult(loss, soft_loss, hard_loss, *grads)


def _head_logits(hidden: Array, weight: Array, bias: Array | None) -> Array:
    work = working_dtype(hidden)
    rows = hidden.reshape(-1, hidden.shape[-1]).astype(work, copy=False)
    logits = matmul(rows, weight.astype(work, copy=False), transpose_b=True)
    return logits if bias is None else logits + bias.astype(work, copy=False)


def _parts(
    soft: tuple[Array, Array] | None,
    square: float,
    student: Array,
    rows: _Rows,
    hard_weight: float,
    want_grad: bool,
) -> _Parts:
    hard: tuple[Array | None, Array | None] = (None, None)
    if rows.targets is not None and hard_weight != 0.0:
        hard = _cross_entropy_rows(student, rows, want_grad=want_grad)
    if soft is None:
        return _Parts(None, None, *hard)
    number = student.dtype.type
    if square == 1.0:
        return _Parts(*soft, *hard)
    return _Parts(soft[0] * number(square), soft[1] * number(square), *hard)


def _losses(
    parts: _Parts, rows: _Rows, soft_weight: float, hard_weight: float
) -> tuple[Array, Array, Array]:
    """The soft loss, the hard loss, and their weighted sum."""
    found = [None if part is None else rows.reduce(part) for part in (parts.soft, parts.hard)]
    like = next(part for part in found if part is not None)
    xp, number = array_namespace(like), like.dtype.type
    zero = xp.zeros_like(like)
    soft, hard = (zero if part is None else part for part in found)
    # A loss with weight 0 is dropped, even if it is infinite.
    mix = zero
    for part, weight in ((soft, soft_weight), (hard, hard_weight)):
        mix = mix if weight == 0.0 else mix + part * number(weight)
    return tuple(xp.asarray(value, zero.dtype) for value in (soft, hard, mix))


def _weighted(parts: _Parts, soft_weight: float, hard_weight: float) -> Array:
    """The weighted sum of the gradients; a gradient with weight 0 is dropped, even if it is NaN."""
    given = ((parts.soft_grad, soft_weight), (parts.hard_grad, hard_weight))
    grads = [(part, weight) for part, weight in given if part is not None]
    used = [
        part if weight == 1.0 else part * part.dtype.type(weight)
        for part, weight in grads
        if weight != 0.0
    ]
    return sum(used[1:], used[0]) if used else array_namespace(grads[0][0]).zeros_like(grads[0][0])


def _mix(
    parts: _Parts,
    rows: _Rows,
    student: _Logits,
    like: Array,
    soft_weight: float,
    hard_weight: float,
    return_grad: bool,
    grad_loss: Any,
) -> Array | tuple[Array, Array]:
    loss = _losses(parts, rows, soft_weight, hard_weight)[2]
    if not return_grad:
        return loss
    grad = rows.scale(_weighted(parts, soft_weight, hard_weight), grad_loss)
    return loss, student.gradient(grad, like)


def _topk_rows(
    z: Array, log_probs: Array, ids: Array, kept: Array, tail: str, temperature: float
) -> tuple[Array, Array]:
    xp = array_namespace(z)
    log_p = log_probs.reshape(z.shape[0], -1).astype(z.dtype)
    ids = ids.reshape(log_p.shape).astype(np.int64)
    inverse = z.dtype.type(1.0 / temperature)
    q, top, total = softmax(xp, z, inverse)
    known_p = xp.sum(xp.exp(log_p), axis=-1, keepdims=True)
    active = kept & (total[:, 0] != 0) & (known_p[:, 0] != 0)
    with np.errstate(divide="ignore", invalid="ignore"):  # in rows and branches not taken
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
    return rows, xp.where(active[:, None], gradient, gradient.dtype.type(0)) * inverse


def _sampled_rows(
    z: Array,
    ids: Array,
    weights: Array | None,
    log_probs: Array | None,
    kept: Array,
    temperature: float,
) -> tuple[Array, Array]:
    xp = array_namespace(z)
    ids = ids.reshape(z.shape[0], -1).astype(np.int64)
    w = xp.full(ids.shape, 1.0 / ids.shape[1], z.dtype)
    if weights is not None:
        w = weights.reshape(ids.shape).astype(z.dtype)
    ids = xp.where(w == 0, 0, ids)
    inverse = z.dtype.type(1.0 / temperature)
    q, top, total = softmax(xp, z, inverse)
    mass = xp.sum(w, axis=-1, keepdims=True)
    active = kept & (total[:, 0] != 0) & (mass[:, 0] != 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = xp.log(total) - (xp.take_along_axis(z, ids, axis=1) - top) * inverse
        if log_probs is not None:
            terms = terms + log_probs.reshape(ids.shape).astype(z.dtype)
        terms = xp.where(w == 0, 0, w * terms)
    gradient = q * mass
    row_numbers = xp.broadcast_to(xp.arange(z.shape[0])[:, None], ids.shape)
    # add.at sums repeated indices; CuPy's subtract.at supports only integers.
    xp.add.at(gradient, (row_numbers, ids), -w)
    losses = xp.where(active, xp.sum(terms, axis=-1), 0).astype(z.dtype)
    return losses, xp.where(active[:, None], gradient, gradient.dtype.type(0)) * inverse


def _cross_entropy_rows(z: Array, rows: _Rows, *, want_grad: bool) -> tuple[Array, Array | None]:
    """Losses [rows] and gradients [rows, vocab] of the individual rows."""
    xp, targets = array_namespace(z), rows.targets
    assert targets is not None
    grad, top, total = softmax(xp, z)
    active = rows.kept & (total[:, 0] != 0)
    in_range = (targets >= 0) & (targets < z.shape[1])
    index = xp.where(in_range, targets, 0)[:, None]
    at_target = xp.take_along_axis(z, index, axis=1)
    with np.errstate(invalid="ignore"):
        loss = xp.log(xp.where(active[:, None], total, 1)) - (at_target - top)
    # A target outside the vocabulary makes its row NaN, as in the kernels, which cannot raise.
    loss = xp.where(in_range, loss[:, 0], loss.dtype.type(math.nan))
    loss = xp.where(active, loss, loss.dtype.type(0)).astype(z.dtype, copy=False)
    if not want_grad:
        return loss, None
    xp.put_along_axis(grad, index, xp.take_along_axis(grad, index, axis=1) - 1, axis=1)
    grad[~in_range] = math.nan
    grad[~active] = 0
    return loss, grad


def _head_gradients(
    grad: Array,
    hidden: Array,
    weight: Array,
    bias: Array | None,
    grad_weight: Array | None,
    grad_bias: Array | None,
) -> tuple[Array, Array, Array | None]:
    """Gradients of hidden, weight and bias, given `grad`, the gradient of the logits
    hidden @ weight^T + bias. Given grad_weight and grad_bias are added to, in place."""
    xp = array_namespace(grad)
    rows = hidden.reshape(-1, hidden.shape[-1]).astype(grad.dtype, copy=False)
    grad_hidden = matmul(grad, weight.astype(grad.dtype, copy=False))
    grad_hidden = grad_hidden.reshape(hidden.shape).astype(hidden.dtype, copy=False)
    if grad_weight is None:
        grad_weight = matmul(grad, rows, transpose_a=True).astype(weight.dtype, copy=False)
    else:
        matmul(grad, rows, transpose_a=True, out=grad_weight, accumulate=True)
    if bias is None:
        return grad_hidden, grad_weight, None
    sums = xp.sum(grad, axis=0)
    if grad_bias is None:
        wide = np.promote_types(np.float32, grad.dtype)
        return grad_hidden, grad_weight, sums.astype(wide, copy=False)
    grad_bias += sums.astype(grad_bias.dtype)
    return grad_hidden, grad_weight, grad_bias


def _into(out: Array, value: Array) -> Array:
    out[...] = value
    return out
