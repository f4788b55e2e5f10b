"""Divergences between teacher and student logits, with the gradient from the same launch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    adopt,
    check_array,
    check_same_dtype,
    empty,
    runs_kernel,
    write_out,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan
from cukit.distill._divergence_rows import (
    DIVERGENCES,
    LossOptions,
    divergence_specs,
    launch_rows,
    plan_launch,
)
from cukit.distill._row_loss import (
    REPRESENTATIVE_ROWS,
    adopt_scalars,
    arrays_among,
    check_grad_loss,
    check_options,
    check_targets,
    count_spec,
    normalizer_of,
    total_loss,
    total_spec,
    upstream,
)
from cukit.reference import losses as reference
from cukit.registry import register

_OP = "distillation_loss"


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
    inplace: bool = False,
) -> Array | tuple[Array, Array]:
    """`soft_weight * divergence(p, q) + hard_weight * cross_entropy(student_logits, targets)`.

    `p = softmax(teacher / T)`, `q = softmax(student / T)`, for each row of logits:

    ===================  ========================================================================
    forward_kl           KL(p, q): covers all that the teacher finds likely
    reverse_kl           KL(q, p): avoids what the teacher finds unlikely
    jsd                  beta KL(p, m) + (1 - beta) KL(q, m), m = beta p + (1 - beta) q; the forward
                         KL at beta = 0, the reverse KL at 1
    skewed_forward_kl    KL(p, m), m = beta p + (1 - beta) q
    skewed_reverse_kl    KL(q, m), m = (1 - beta) p + beta q
    total_variation      sum |p - q| / 2
    ===================  ========================================================================

    Each is a sum of terms that are never negative, accurate to float32 however close the student
    comes. `forward_kl` reads the logits twice, the others three times, mostly from shared memory.

    Args:
        student_logits: float32|float16|bfloat16 [..., vocab_size], C-contiguous. float64 on the CPU
            only.
        teacher_logits: dtype and shape of `student_logits`.
        divergence: one of the names above.
        beta: 0..1, of "jsd" and, below 1, of the skewed divergences; ignored by the others.
        temperature: T of the divergence, above 0; the cross-entropy always has 1.
        scale_by_temperature_squared: multiply the divergence and its gradient by T^2 (Hinton et
            al., arXiv:1503.02531).
        soft_weight, hard_weight: of divergence and cross-entropy.
        targets: int32|int64 [...], the rows' classes; needed for `hard_weight`. Rows equal to
            `ignore_index`, and rows without any mass (every logit of either model -inf), have zero
            loss and gradient.
        ignore_index: the target that says so.
        reduction: "mean" over the rows that are not ignored, "sum", or "none".
        normalizer: what "mean" divides by instead: a number or a float32 0-d array, such as the
            number of tokens in all batches that a step accumulates.
        return_grad: also return the gradient for the student's logits.
        grad_loss: upstream gradient for that: a number or float32 0-d array ([rows] for "none").
        inplace: let the gradient overwrite the student's logits.

    Returns:
        The loss, float32 0-d ([rows] for "none"); with `return_grad`, `(loss, grad_logits)`. The
        reverse KL of a row is infinite, its gradient NaN, where the teacher alone masks a token.

    Raises:
        ArrayError: dtype, shape, layout or device.
        ConfigError: an option outside its range, or `hard_weight` without `targets`.

    Runs on CuPy's current stream without synchronising, accumulates in float32, is deterministic.
    Papers: Agarwal et al., On-policy distillation (generalised JSD), arXiv:2306.13649; Ko et al.,
    DistiLLM (skewed KL), arXiv:2402.03898; Wen et al., f-divergences, arXiv:2307.15190.

    >>> import numpy as np, cukit as ck
    >>> student, teacher = np.zeros((1, 2), np.float32), np.log(np.array([[1, 3]], np.float32))
    >>> round(float(ck.distillation_loss(student, teacher, divergence="jsd")), 4)
    0.0338
    """
    options = LossOptions(
        divergence, beta, temperature, scale_by_temperature_squared, soft_weight, hard_weight
    )
    loss, grad = evaluate(
        _OP, student_logits, teacher_logits, options,
        targets=targets, ignore_index=ignore_index, reduction=reduction, normalizer=normalizer,
        return_grad=return_grad, grad_loss=grad_loss, inplace=inplace,
    )  # fmt: skip
    return loss if grad is None else (loss, grad)


def evaluate(
    op: str,
    student_logits: Array,
    teacher_logits: Array,
    options: LossOptions,
    *,
    targets: Array | None,
    ignore_index: int,
    reduction: str,
    normalizer: Any,
    return_grad: bool,
    grad_loss: Any,
    inplace: bool,
    return_loss: bool = True,
) -> tuple[Array, Array | None]:
    """Loss and gradient of :func:`distillation_loss`, in the name of `op`. Without `return_loss`
    the losses of the rows are not added up on the GPU."""
    student_logits, teacher_logits, targets = adopt(op, student_logits, teacher_logits, targets)
    normalizer, grad_loss = adopt_scalars(op, normalizer, grad_loss)
    check_options(
        op,
        reduction,
        normalizer,
        ignore_index,
        options.temperature,
        scale_by_temperature_squared=options.scale_by_temperature_squared,
        return_grad=return_grad,
        inplace=inplace,
    )
    options = options.check(op, targets)
    inputs = (student_logits, teacher_logits, targets)
    if not runs_kernel(op, *inputs, *arrays_among(normalizer, grad_loss)):
        _check(op, *inputs, grad_loss, options.hard, ignore_index, reduction)
        result = reference.distillation_loss(
            student_logits,
            teacher_logits,
            **options._asdict(),
            targets=targets,
            ignore_index=ignore_index,
            reduction=reduction,
            normalizer=normalizer,
            return_grad=return_grad,
            grad_loss=grad_loss,
        )
        if not return_grad:
            return result, None
        loss, grad = result
        return loss, write_out(student_logits, grad) if inplace else grad
    grad = None
    if return_grad:
        grad = student_logits if inplace else empty(student_logits, student_logits.shape)
    factor, grad_loss = upstream(grad_loss)
    kind = (options.divergence, options.hard)
    launch = _prepare(op, *inputs, grad, grad_loss, *kind, ignore_index, reduction)
    num_rows = math.prod(student_logits.shape[:-1])
    divisor, count = normalizer_of(targets, num_rows, ignore_index, reduction, normalizer)
    soft_rows = empty(student_logits, (num_rows,), np.float32)
    hard_rows = empty(student_logits, (num_rows,), np.float32) if options.hard else None
    rows = (soft_rows, hard_rows)
    launch_rows(launch, *inputs, *rows, grad, grad_loss, count, options, factor / divisor)
    weights = (options.soft_weight, options.hard_weight)
    loss = soft_rows
    if reduction != "none":
        loss = total_loss(*rows, divisor, count, *weights)[0] if return_loss else None
    elif hard_rows is not None or weights[0] != 1.0:
        loss = sum(
            weight * part for weight, part in zip(weights, rows, strict=True) if part is not None
        )
    return loss, grad


@launch_plan
def _prepare(
    op: str,
    student_logits: Array,
    teacher_logits: Array,
    targets: Array | None,
    grad: Array | None,
    grad_loss: Array | None,
    divergence: str,
    hard: bool,
    ignore_index: int,
    reduction: str,
) -> Launch:
    _check(op, student_logits, teacher_logits, targets, grad_loss, hard, ignore_index, reduction)
    check_array(op, "student_logits", student_logits, dtypes=KERNEL_DTYPES)
    vocab_size = student_logits.shape[-1]
    arrays = (student_logits, teacher_logits, targets, grad, grad_loss)
    return plan_launch(*arrays, divergence, hard, ignore_index, vocab_size)


def _check(
    op: str,
    student_logits: Array,
    teacher_logits: Array,
    targets: Array | None,
    grad_loss: Any,
    hard: bool,
    ignore_index: int,
    reduction: str,
) -> None:
    check_array(op, "student_logits", student_logits, dtypes=FLOAT_DTYPES)
    check_array(op, "teacher_logits", teacher_logits, shape=student_logits.shape)
    check_same_dtype(op, student_logits=student_logits, teacher_logits=teacher_logits)
    row_shape = student_logits.shape[:-1]
    if targets is not None:
        classes = student_logits.shape[-1] if hard else None
        check_targets(op, targets, row_shape, classes, ignore_index)
    check_grad_loss(op, grad_loss, reduction, row_shape)


def _specs(device: Device) -> list[KernelSpec]:
    """One of them for every kind of split, the others for one."""
    rows = [
        spec
        for name in DIVERGENCES[1:]
        for spec in divergence_specs(
            device,
            name,
            ((False, False), (True, True)),
            REPRESENTATIVE_ROWS if name == "jsd" else REPRESENTATIVE_ROWS[1:2],
        )
    ]
    return [*rows, count_spec("int32"), total_spec()]


register(
    name=_OP,
    family="distill",
    function=distillation_loss,
    reference=reference.distillation_loss,
    specs=_specs,
)
