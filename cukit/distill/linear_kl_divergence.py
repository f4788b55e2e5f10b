"""KL divergence, mixed with cross-entropy, fused with the heads of teacher and student."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cukit.core.arrays import (
    KERNEL_DTYPES,
    Array,
    adopt,
    check_array,
    check_same_dtype,
    empty,
    runs_kernel,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec
from cukit.core.scalars import check_number
from cukit.distill._kl_rows import launch_rows, plan_kl_divergence, prepare_rows
from cukit.distill._linear_loss import (
    HeadGradients,
    check_chunk_tokens,
    check_grad_weight,
    check_head,
    empty_logits,
    exact_boost,
    plan_linear_loss,
    project,
)
from cukit.distill._row_loss import (
    REPRESENTATIVE_ROWS,
    adopt_scalars,
    arrays_among,
    check_options,
    check_targets,
    count_spec,
    normalizer_of,
    total_loss,
    total_spec,
)
from cukit.errors import ConfigError
from cukit.reference import losses as reference
from cukit.reference.losses import LinearKlResult
from cukit.registry import register

__all__ = ["LinearKlResult", "linear_kl_divergence"]

_OP = "linear_kl_divergence"


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
    """Distillation loss of two language-model heads, with its gradients, logits never stored.

    `loss = soft_weight * KL(teacher || student) + hard_weight * cross_entropy(student, targets)`
    over the logits `hidden @ weight^T` and `teacher_hidden @ teacher_weight^T`, the mean over rows
    that are not ignored. See :func:`kl_divergence` and :func:`cross_entropy` for the two parts.

    Args:
        hidden: float32|float16|bfloat16 [..., hidden_size], C-contiguous; rows = all but the last.
        weight: dtype of `hidden`, [vocab_size, hidden_size].
        teacher_hidden: dtype of `hidden`, as many rows, [..., teacher_hidden_size].
        teacher_weight: dtype of `hidden`, [vocab_size, teacher_hidden_size].
        targets: int32|int64 [...], the rows' classes; needed for `hard_weight`. Rows equal to
            `ignore_index` have zero loss and gradient.
        temperature: T of the soft part; the hard part always has 1.
        scale_by_temperature_squared: multiply the soft part by T^2.
        soft_weight, hard_weight: of the two parts.
        ignore_index: the target that says so.
        normalizer: what the sum over rows is divided by instead: a number or a float32 0-d array.
        grad_weight: dtype of `weight` or float32, shape of `weight`: added to, in place. Without it
            a new one is written.
        chunk_tokens: rows that go through the heads at once; None lets the plan choose.

    Returns:
        :class:`LinearKlResult`: `loss`, `soft_loss`, `hard_loss` (float32, 0-d), `grad_hidden` like
        `hidden` and `grad_weight`. The teacher gets no gradient.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.
        ConfigError: an option outside its range, or `hard_weight` without `targets`.

    Memory beside results: two chunks of logits, `2 * chunk_tokens * vocab_size` elements. Logits
    and their gradient are rounded to the dtype of `hidden`; grad_weight is rounded to its own dtype
    once a chunk (a float32 one is as good as exact). Runs on CuPy's current stream without
    synchronising, is deterministic. On the CPU all logits are computed at once.

    >>> import numpy as np, cukit as ck
    >>> hidden, weight = np.eye(2, dtype=np.float32), np.eye(2, dtype=np.float32)
    >>> result = ck.linear_kl_divergence(hidden, weight, hidden, 2 * weight)
    >>> round(float(result.loss), 4), result.grad_weight.shape
    (0.0671, (2, 2))
    """
    hidden, weight, teacher_hidden, teacher_weight, targets, grad_weight = adopt(
        _OP, hidden, weight, teacher_hidden, teacher_weight, targets, grad_weight
    )
    (normalizer,) = adopt_scalars(_OP, normalizer)
    check_options(
        _OP,
        "mean",
        normalizer,
        ignore_index,
        temperature,
        scale_by_temperature_squared=scale_by_temperature_squared,
    )
    for name, value in (("soft_weight", soft_weight), ("hard_weight", hard_weight)):
        check_number(_OP, name, value)
    check_chunk_tokens(_OP, chunk_tokens)
    hard = hard_weight != 0.0
    if hard and targets is None:
        raise ConfigError(f"{_OP}: hard_weight={hard_weight} needs targets")
    arrays = (hidden, weight, teacher_hidden, teacher_weight, targets, grad_weight)
    on_gpu = runs_kernel(_OP, *arrays, *arrays_among(normalizer))
    _check(*arrays, hard, ignore_index)
    if not on_gpu:
        return reference.linear_kl_divergence(
            hidden,
            weight,
            teacher_hidden,
            teacher_weight,
            targets=targets,
            temperature=temperature,
            scale_by_temperature_squared=scale_by_temperature_squared,
            soft_weight=soft_weight,
            hard_weight=hard_weight,
            ignore_index=ignore_index,
            normalizer=normalizer,
            grad_weight=grad_weight,
        )
    check_array(_OP, "hidden", hidden, dtypes=KERNEL_DTYPES)
    rows = hidden.reshape(-1, hidden.shape[-1])
    teacher_rows = teacher_hidden.reshape(-1, teacher_hidden.shape[-1])
    classes = None if targets is None else targets.reshape(-1)
    tokens, vocab_size = rows.shape[0], weight.shape[0]
    config = plan_linear_loss(tokens, rows.shape[1], chunk_tokens)
    divisor, count = normalizer_of(classes, tokens, ignore_index, "mean", normalizer)
    boost = exact_boost(rows.dtype, divisor, tokens, divisor_on_gpu=count is not None)
    square = temperature**2 if scale_by_temperature_squared else 1.0
    factor = boost / divisor

    gradients = HeadGradients(rows, weight, grad_weight, boost)
    logits = empty_logits(rows, config.chunk_tokens, vocab_size)
    teacher_logits = empty_logits(rows, config.chunk_tokens, vocab_size)
    soft_rows = empty(rows, (tokens,), np.float32)
    hard_rows = empty(rows, (tokens,), np.float32) if hard else None
    for chunk in config.chunks():
        size = chunk.stop - chunk.start
        student_part, teacher_part = logits[:size], teacher_logits[:size]
        target_part = None if classes is None else classes[chunk]
        project(rows[chunk], weight, student_part)
        project(teacher_rows[chunk], teacher_weight, teacher_part)
        launch_rows(
            prepare_rows(student_part, teacher_part, target_part, hard, ignore_index),
            student_part,
            teacher_part,
            target_part,
            soft_rows[chunk],
            None if hard_rows is None else hard_rows[chunk],
            student_part,
            None,
            count,
            temperature=temperature,
            soft_loss_factor=square,
            soft_factor=soft_weight * square * factor,
            hard_factor=hard_weight * factor,
        )
        gradients.add(chunk, student_part)
    totals = total_loss(soft_rows, hard_rows, divisor, count, soft_weight, hard_weight)
    return LinearKlResult(
        totals[0],
        totals[1],
        totals[2],
        gradients.grad_hidden.reshape(hidden.shape),
        gradients.grad_weight,
    )


def _check(
    hidden: Array,
    weight: Array,
    teacher_hidden: Array,
    teacher_weight: Array,
    targets: Array | None,
    grad_weight: Array | None,
    hard: bool,
    ignore_index: int,
) -> None:
    check_head(_OP, "", hidden, weight, None, None)
    vocab_size = weight.shape[0]
    rows = math.prod(hidden.shape[:-1])
    check_head(_OP, "teacher_", teacher_hidden, teacher_weight, rows, vocab_size)
    check_same_dtype(_OP, hidden=hidden, teacher_hidden=teacher_hidden)
    if targets is not None:
        check_targets(_OP, targets, hidden.shape[:-1], vocab_size if hard else None, ignore_index)
    check_grad_weight(_OP, weight, grad_weight)


def _specs(device: Device) -> list[KernelSpec]:
    rows = [
        plan_kl_divergence(
            size, dtype.name, dtype.itemsize, "int32", 16 // dtype.itemsize, True, hard, device
        ).spec()
        for dtype, size in REPRESENTATIVE_ROWS
        for hard in (False, True)
    ]
    return [*rows, count_spec("int32"), total_spec()]


register(
    name=_OP,
    family="distill",
    function=linear_kl_divergence,
    reference=reference.linear_kl_divergence,
    specs=_specs,
)
