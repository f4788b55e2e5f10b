"""Divergences between teacher and student logits, with the gradient from the same launch."""

from __future__ import annotations

from typing import Any

from cukit.core.arrays import (
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    adopt,
    check_array,
    check_same_dtype,
    runs_kernel,
    write_out,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan
from cukit.core.scalars import check_flag
from cukit.distill.losses._divergence_rows import divergence_specs, plan_launch
from cukit.distill.losses._loss_options import (
    DIVERGENCES,
    LossOptions,
    RowOptions,
    common_vocabulary,
)
from cukit.distill.losses._row_loss import (
    REPRESENTATIVE_ROWS,
    count_spec,
    empty_gradient,
    evaluate_rows,
    total_spec,
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
    token_weights: Array | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    return_grad: bool = False,
    grad_loss: Any = None,
    inplace: bool = False,
) -> Array | tuple[Array, Array]:
    """`soft_weight * divergence(p, q) + hard_weight * cross_entropy(student_logits, targets)`.

    `p = softmax(teacher / T)`, `q = softmax(student / T)`, for each row of logits:

    ===================  ========================================================================
    forward_kl           KL(p, q): covers every token that is likely for the teacher
    reverse_kl           KL(q, p): avoids tokens that are unlikely for the teacher
    jsd                  beta KL(p, m) + (1 - beta) KL(q, m), m = beta p + (1 - beta) q; replaced
                         by the forward KL at beta = 0, by the reverse KL at beta = 1
    skewed_forward_kl    KL(p, m), m = beta p + (1 - beta) q
    skewed_reverse_kl    KL(q, m), m = (1 - beta) p + beta q
    total_variation      sum |p - q| / 2
    ===================  ========================================================================

    Each is a sum of non-negative terms, accurate to float32 even where student and teacher nearly
    agree. `forward_kl` reads the logits twice, the others three times, mostly from shared memory.

    Args:
        student_logits: float32|float16|bfloat16 [..., vocab_size], C-contiguous. float64 on the CPU
            only.
        teacher_logits: dtype and shape of `student_logits`; with `vocab_size` the last axes may
            differ.
        divergence: one of the names above.
        beta: 0..1 for "jsd"; at least 0 and below 1 for the skewed divergences; ignored by others.
        temperature: T of the divergence, above 0; the cross-entropy always uses 1.
        scale_by_temperature_squared: multiply the divergence and its gradient by T^2 (Hinton et
            al., arXiv:1503.02531).
        soft_weight, hard_weight: weights of divergence and cross-entropy; a loss with weight 0 is
            dropped, with its gradient, even if it is infinite.
        targets: int32|int64 [...], the rows' classes; needed if hard_weight != 0. Rows whose target
            is `ignore_index` have zero loss and gradient, as do rows in which all logits of either
            model are -inf.
        token_weights: float32 [...], 0 or more: the weight of each row's loss.
        ignore_index: target of the rows to ignore.
        vocab_size: number of leading columns in use; the others are padding: their values are
            ignored, their gradient is zero.
        logit_scale, softcap: for given student logits x, the loss uses `softcap * tanh(logit_scale
            * x / softcap)`, or `logit_scale * x` without a softcap; both above 0. The gradient is
            with respect to x.
        teacher_logit_scale, teacher_softcap: the same for the teacher's logits.
        reduction: "mean", the sum over rows divided by the sum of their weights (without weights,
            by the number of rows that are not ignored); "tokens", the sum divided by that number
            even with weights; "sum"; or "none".
        normalizer: replaces the divisor of "mean" and "tokens": a number or a float32 0-d array,
            such as the token count of all batches that a step accumulates, on all GPUs.
        return_grad: also return the gradient with respect to `student_logits`.
        grad_loss: gradient of the loss: a number or float32 0-d array ([rows] for "none").
        inplace: overwrite `student_logits` with the gradient.

    Returns:
        The loss, float32 0-d ([rows] for "none"); with `return_grad`, `(loss, grad_logits)`. The
        reverse KL of a row is infinite, and its gradient NaN, if the teacher masks a token (logit
        -inf) that the student does not mask.

    Raises:
        ArrayError: invalid dtype, shape, layout or device; vocabularies of different sizes.
        ConfigError: an option outside its range, or `hard_weight` without `targets`.

    Runs on CuPy's current stream without synchronising, accumulates in float32 and is
    deterministic.
    Papers: Agarwal et al., On-policy distillation (generalised JSD), arXiv:2306.13649; Ko et al.,
    DistiLLM (skewed KL), arXiv:2402.03898; Wen et al., f-divergences, arXiv:2307.15190.

    >>> import numpy as np, cukit as ck
    >>> student, teacher = np.zeros((1, 2), np.float32), np.log(np.array([[1, 3]], np.float32))
    >>> round(float(ck.distillation_loss(student, teacher, divergence="jsd")), 4)
    0.0338
    """
    options = LossOptions(
        divergence, beta, temperature, scale_by_temperature_squared, soft_weight, hard_weight,
        logit_scale, softcap, teacher_logit_scale, teacher_softcap,
    )  # fmt: skip
    rows = RowOptions(
        targets, token_weights, ignore_index, vocab_size, reduction, normalizer, grad_loss
    )
    loss, grad = evaluate(
        _OP, student_logits, teacher_logits, options, rows, return_grad=return_grad, inplace=inplace
    )
    return loss if grad is None else (loss, grad)


def evaluate(
    op: str,
    student_logits: Array,
    teacher_logits: Array,
    options: LossOptions,
    rows: RowOptions,
    *,
    return_grad: bool,
    inplace: bool,
    return_loss: bool = True,
) -> tuple[Array, Array | None]:
    """Loss and gradient of :func:`distillation_loss`; errors name `op`. Without `return_loss` the
    rows' losses are not reduced on the GPU."""
    student_logits, teacher_logits = adopt(op, student_logits, teacher_logits)
    check_flag(op, "return_grad", return_grad)
    check_flag(op, "inplace", inplace)
    rows = rows.adopt(op)
    options = options.check(op, rows.targets)
    inputs = (student_logits, teacher_logits)
    if not runs_kernel(op, *inputs, *rows.arrays):
        _check(op, *inputs, rows, options.hard)
        given = {**options._asdict(), **rows._asdict(), "return_grad": return_grad}
        result = reference.distillation_loss(student_logits, teacher_logits, **given)
        if not return_grad:
            return result, None
        loss, grad = result
        return loss, write_out(student_logits, grad) if inplace else grad
    grad = empty_gradient(op, "student_logits", student_logits, inplace) if return_grad else None
    _, grad_loss = rows.upstream()
    launch = _prepare(
        op, *inputs, rows.targets, rows.token_weights, grad, grad_loss, options.divergence,
        options.hard, options.transforms, rows.ignore_index, rows.vocab_size, rows.reduction,
    )  # fmt: skip
    losses = evaluate_rows(launch, inputs, options, rows, grad, return_loss=return_loss)
    return None if losses is None else losses.loss, grad


@launch_plan
def _prepare(
    op: str,
    student_logits: Array,
    teacher_logits: Array,
    targets: Array | None,
    token_weights: Array | None,
    grad: Array | None,
    grad_loss: Array | None,
    divergence: str,
    hard: bool,
    transform: bool,
    ignore_index: int,
    vocab_size: int | None,
    reduction: str,
) -> Launch:
    rows = RowOptions(
        targets, token_weights, ignore_index, vocab_size, reduction, grad_loss=grad_loss
    )
    columns = _check(op, student_logits, teacher_logits, rows, hard)
    check_array(op, "student_logits", student_logits, dtypes=KERNEL_DTYPES)
    arrays = (student_logits, teacher_logits, grad, grad_loss, rows)
    strides = (student_logits.shape[-1], teacher_logits.shape[-1])
    return plan_launch(*arrays, divergence, hard, transform, columns, strides)


def _check(
    op: str, student_logits: Array, teacher_logits: Array, rows: RowOptions, hard: bool
) -> int:
    """Checks the arrays; returns the number of columns in use."""
    check_array(op, "student_logits", student_logits, dtypes=FLOAT_DTYPES, min_ndim=1)
    row_shape = student_logits.shape[:-1]
    check_array(op, "teacher_logits", teacher_logits, shape=(*row_shape, None))
    check_same_dtype(op, student_logits=student_logits, teacher_logits=teacher_logits)
    sizes = {"student_logits": student_logits.shape[-1], "teacher_logits": teacher_logits.shape[-1]}
    columns = common_vocabulary(op, rows.vocab_size, **sizes)
    rows.check(op, row_shape, columns if hard else None)
    return columns


def _specs(device: Device) -> list[KernelSpec]:
    """The JSD for all representative rows, the others for one; kl_divergence has the forward KL."""
    rows = [
        spec
        for name in DIVERGENCES[1:]
        for spec in divergence_specs(
            device,
            name,
            ((False, False, False), (True, True, False), (True, True, True)),
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
