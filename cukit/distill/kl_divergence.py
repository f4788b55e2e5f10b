"""Forward KL divergence on teacher and student logits, with its gradient from the same launch."""

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
from cukit.distill._kl_rows import launch_rows, plan_kl_divergence, plan_launch
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
    inplace: bool = False,
) -> Array | tuple[Array, Array]:
    """KL divergence of rows of logits: `loss = sum_v p_v (log p_v - log q_v)`.

    `p = softmax(teacher / T)`, `q = softmax(student / T)`. Summed as `p (expm1(-d) + d)` with
    `d = log p - log q`, whose terms are never negative: accurate to float32 however close the
    student comes, where the usual form has lost every digit at a divergence of 1e-6.

    Args:
        student_logits: float32|float16|bfloat16 [..., vocab_size], C-contiguous. float64 on the CPU
            only.
        teacher_logits: dtype and shape of `student_logits`.
        temperature: T, above 0.
        scale_by_temperature_squared: multiply loss and gradient by T^2, which keeps the size of the
            gradient independent of T (Hinton et al., arXiv:1503.02531).
        targets: int32|int64 [...]; only says which rows to ignore: those equal to `ignore_index`,
            whose loss and gradient are zero. So are those of rows without any mass (every logit of
            either model -inf).
        ignore_index: the target that says so.
        reduction: "mean" over the rows that are not ignored, "sum", or "none".
        normalizer: what "mean" divides by instead: a number or a float32 0-d array, such as the
            number of tokens in all batches that a step accumulates.
        return_grad: also return the gradient for the student's logits.
        grad_loss: upstream gradient for that: a number or float32 0-d array ([rows] for "none").
        inplace: let the gradient overwrite the student's logits.

    Returns:
        The loss, float32 0-d ([rows] for "none"); with `return_grad`, `(loss, grad_logits)`.

    Raises:
        ArrayError: dtype, shape, layout or device.
        ConfigError: temperature, reduction or normalizer.

    Runs on CuPy's current stream without synchronising, accumulates in float32, is deterministic.

    >>> import numpy as np, cukit as ck
    >>> student, teacher = np.zeros((1, 2), np.float32), np.log(np.array([[1, 3]], np.float32))
    >>> round(float(ck.kl_divergence(student, teacher)), 4)
    0.1308
    """
    student_logits, teacher_logits, targets = adopt(
        "kl_divergence", student_logits, teacher_logits, targets
    )
    normalizer, grad_loss = adopt_scalars("kl_divergence", normalizer, grad_loss)
    check_options(
        "kl_divergence",
        reduction,
        normalizer,
        ignore_index,
        temperature,
        scale_by_temperature_squared=scale_by_temperature_squared,
        return_grad=return_grad,
        inplace=inplace,
    )
    inputs = (student_logits, teacher_logits, targets)
    if not runs_kernel("kl_divergence", *inputs, *arrays_among(normalizer, grad_loss)):
        _check("kl_divergence", *inputs, grad_loss, ignore_index, reduction)
        result = reference.kl_divergence(
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
        if inplace and return_grad:
            return result[0], write_out(student_logits, result[1])
        return result
    grad = None
    if return_grad:
        grad = student_logits if inplace else empty(student_logits, student_logits.shape)
    square = temperature**2 if scale_by_temperature_squared else 1.0
    rows, divisor, count = _launch(
        "kl_divergence",
        inputs,
        grad,
        grad_loss,
        temperature,
        square,
        ignore_index,
        reduction,
        normalizer,
    )
    loss = rows if reduction == "none" else total_loss(rows, None, divisor, count)[0]
    return loss if grad is None else (loss, grad)


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
    """Gradient of :func:`kl_divergence`: `(q - p) / T * grad_loss / normalizer` (times T^2 if on).

    Args:
        grad_loss: gradient of the loss: a number or float32 0-d array ([rows] for "none").
        inplace: overwrite the student's logits.
        The others: as in the forward.

    Returns:
        `grad_student_logits`, shape and dtype of `student_logits`.

    Raises:
        ArrayError, ConfigError: as :func:`kl_divergence`.

    `kl_divergence(..., return_grad=True)` gives loss and gradient for the price of this.
    """
    op = "kl_divergence_backward"
    student_logits, teacher_logits, targets = adopt(op, student_logits, teacher_logits, targets)
    normalizer, grad_loss = adopt_scalars(op, normalizer, grad_loss)
    check_options(
        op,
        reduction,
        normalizer,
        ignore_index,
        temperature,
        scale_by_temperature_squared=scale_by_temperature_squared,
        inplace=inplace,
    )
    inputs = (student_logits, teacher_logits, targets)
    if not runs_kernel(op, *inputs, *arrays_among(normalizer, grad_loss)):
        _check(op, *inputs, grad_loss, ignore_index, reduction)
        return reference.kl_divergence_backward(
            grad_loss,
            student_logits,
            teacher_logits,
            temperature=temperature,
            scale_by_temperature_squared=scale_by_temperature_squared,
            targets=targets,
            ignore_index=ignore_index,
            reduction=reduction,
            normalizer=normalizer,
            inplace=inplace,
        )
    grad = student_logits if inplace else empty(student_logits, student_logits.shape)
    square = temperature**2 if scale_by_temperature_squared else 1.0
    _launch(op, inputs, grad, grad_loss, temperature, square, ignore_index, reduction, normalizer)
    return grad


@launch_plan
def _prepare(
    op: str,
    student_logits: Array,
    teacher_logits: Array,
    targets: Array | None,
    grad: Array | None,
    grad_loss: Array | None,
    ignore_index: int,
    reduction: str,
) -> Launch:
    _check(op, student_logits, teacher_logits, targets, grad_loss, ignore_index, reduction)
    check_array(op, "student_logits", student_logits, dtypes=KERNEL_DTYPES)
    vocab_size = student_logits.shape[-1]
    arrays = (student_logits, teacher_logits, targets, grad, grad_loss)
    return plan_launch(*arrays, False, ignore_index, vocab_size)


def _launch(
    op: str,
    inputs: tuple[Array, Array, Array | None],
    grad: Array | None,
    grad_loss: Any,
    temperature: float,
    square: float,
    ignore_index: int,
    reduction: str,
    normalizer: Any,
) -> tuple[Array, float, Array | None]:
    """Losses of the rows, and what their sum is divided by."""
    student_logits, _, targets = inputs
    factor, grad_loss = upstream(grad_loss)
    launch = _prepare(op, *inputs, grad, grad_loss, ignore_index, reduction)
    num_rows = math.prod(student_logits.shape[:-1])
    divisor, count = normalizer_of(targets, num_rows, ignore_index, reduction, normalizer)
    rows = empty(student_logits, (num_rows,), np.float32)
    launch_rows(
        launch,
        *inputs,
        rows,
        None,
        grad,
        grad_loss,
        count,
        temperature=temperature,
        soft_loss_factor=square,
        soft_factor=factor * square / divisor,
        hard_factor=0.0,
    )
    return rows, divisor, count


def _check(
    op: str,
    student_logits: Array,
    teacher_logits: Array,
    targets: Array | None,
    grad_loss: Any,
    ignore_index: int,
    reduction: str,
) -> None:
    check_array(op, "student_logits", student_logits, dtypes=FLOAT_DTYPES)
    check_array(op, "teacher_logits", teacher_logits, shape=student_logits.shape)
    check_same_dtype(op, student_logits=student_logits, teacher_logits=teacher_logits)
    row_shape = student_logits.shape[:-1]
    if targets is not None:
        check_targets(op, targets, row_shape, None, ignore_index)
    check_grad_loss(op, grad_loss, reduction, row_shape)


def _specs(device: Device) -> list[KernelSpec]:
    rows = [
        plan_kl_divergence(
            vocab_size,
            dtype.name,
            dtype.itemsize,
            "int32",
            16 // dtype.itemsize,
            grad,
            False,
            device,
        ).spec()
        for dtype, vocab_size in REPRESENTATIVE_ROWS
        for grad in (False, True)
    ]
    return [*rows, count_spec("int32"), total_spec()]


register(
    name="kl_divergence",
    family="distill",
    function=kl_divergence,
    reference=reference.kl_divergence,
    specs=_specs,
)
register(
    name="kl_divergence_backward",
    family="distill",
    function=kl_divergence_backward,
    reference=reference.kl_divergence_backward,
    specs=_specs,
)
