"""A divergence, mixed with cross-entropy, fused with the heads of teacher and student."""

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
from cukit.distill._divergence_rows import (
    LossOptions,
    divergence_specs,
    launch_rows,
    prepare_rows,
)
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
    adopt_scalars,
    arrays_among,
    check_options,
    check_targets,
    count_spec,
    normalizer_of,
    total_loss,
    total_spec,
)
from cukit.reference import losses as reference
from cukit.reference.losses import LinearKlResult
from cukit.registry import register

_OP = "linear_distillation_loss"


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
    """Distillation loss of two language-model heads, with its gradients, logits never stored.

    `loss = soft_weight * divergence(teacher, student) + hard_weight * cross_entropy(student,
    targets)` over the logits `hidden @ weight^T` and `teacher_hidden @ teacher_weight^T`, the mean
    over rows that are not ignored: :func:`distillation_loss` without its logits.

    Args:
        hidden: float32|float16|bfloat16 [..., hidden_size], C-contiguous; rows = all but the last.
        weight: dtype of `hidden`, [vocab_size, hidden_size].
        teacher_hidden: dtype of `hidden`, as many rows, [..., teacher_hidden_size].
        teacher_weight: dtype of `hidden`, [vocab_size, teacher_hidden_size].
        targets: int32|int64 [...], the rows' classes; needed for `hard_weight`. Rows equal to
            `ignore_index` have zero loss and gradient.
        divergence, beta: as in :func:`distillation_loss`.
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
    >>> result = ck.linear_distillation_loss(hidden, weight, hidden, 2 * weight)
    >>> round(float(result.loss), 4), result.grad_weight.shape
    (0.0671, (2, 2))
    """
    options = LossOptions(
        divergence, beta, temperature, scale_by_temperature_squared, soft_weight, hard_weight
    )
    return evaluate(
        _OP, hidden, weight, teacher_hidden, teacher_weight, options,
        targets=targets, ignore_index=ignore_index, normalizer=normalizer, grad_weight=grad_weight,
        chunk_tokens=chunk_tokens,
    )  # fmt: skip


def evaluate(
    op: str,
    hidden: Array,
    weight: Array,
    teacher_hidden: Array,
    teacher_weight: Array,
    options: LossOptions,
    *,
    targets: Array | None,
    ignore_index: int,
    normalizer: Any,
    grad_weight: Array | None,
    chunk_tokens: int | None,
) -> LinearKlResult:
    """:func:`linear_distillation_loss` in the name of `op`."""
    hidden, weight, teacher_hidden, teacher_weight, targets, grad_weight = adopt(
        op, hidden, weight, teacher_hidden, teacher_weight, targets, grad_weight
    )
    (normalizer,) = adopt_scalars(op, normalizer)
    check_options(
        op,
        "mean",
        normalizer,
        ignore_index,
        options.temperature,
        scale_by_temperature_squared=options.scale_by_temperature_squared,
    )
    options = options.check(op, targets)
    check_chunk_tokens(op, chunk_tokens)
    arrays = (hidden, weight, teacher_hidden, teacher_weight, targets, grad_weight)
    on_gpu = runs_kernel(op, *arrays, *arrays_among(normalizer))
    _check(op, *arrays, options.hard, ignore_index)
    if not on_gpu:
        return reference.linear_distillation_loss(
            hidden,
            weight,
            teacher_hidden,
            teacher_weight,
            targets=targets,
            **options._asdict(),
            ignore_index=ignore_index,
            normalizer=normalizer,
            grad_weight=grad_weight,
        )
    check_array(op, "hidden", hidden, dtypes=KERNEL_DTYPES)
    rows = hidden.reshape(-1, hidden.shape[-1])
    teacher_rows = teacher_hidden.reshape(-1, teacher_hidden.shape[-1])
    classes = None if targets is None else targets.reshape(-1)
    tokens, vocab_size = rows.shape[0], weight.shape[0]
    config = plan_linear_loss(tokens, rows.shape[1], chunk_tokens)
    divisor, count = normalizer_of(classes, tokens, ignore_index, "mean", normalizer)
    boost = exact_boost(rows.dtype, divisor, tokens, divisor_on_gpu=count is not None)

    gradients = HeadGradients(rows, weight, grad_weight, boost)
    logits = empty_logits(rows, config.chunk_tokens, vocab_size)
    teacher_logits = empty_logits(rows, config.chunk_tokens, vocab_size)
    soft_rows = empty(rows, (tokens,), np.float32)
    hard_rows = empty(rows, (tokens,), np.float32) if options.hard else None
    kind = (options.divergence, options.hard)
    for chunk in config.chunks():
        size = chunk.stop - chunk.start
        student_part, teacher_part = logits[:size], teacher_logits[:size]
        target_part = None if classes is None else classes[chunk]
        project(rows[chunk], weight, student_part)
        project(teacher_rows[chunk], teacher_weight, teacher_part)
        launch_rows(
            prepare_rows(student_part, teacher_part, target_part, *kind, ignore_index),
            student_part,
            teacher_part,
            target_part,
            soft_rows[chunk],
            None if hard_rows is None else hard_rows[chunk],
            student_part,
            None,
            count,
            options,
            boost / divisor,
        )
        gradients.add(chunk, student_part)
    weights = (options.soft_weight, options.hard_weight)
    totals = total_loss(soft_rows, hard_rows, divisor, count, *weights)
    return LinearKlResult(
        totals[0],
        totals[1],
        totals[2],
        gradients.grad_hidden.reshape(hidden.shape),
        gradients.grad_weight,
    )


def _check(
    op: str,
    hidden: Array,
    weight: Array,
    teacher_hidden: Array,
    teacher_weight: Array,
    targets: Array | None,
    grad_weight: Array | None,
    hard: bool,
    ignore_index: int,
) -> None:
    check_head(op, "", hidden, weight, None, None)
    vocab_size = weight.shape[0]
    rows = math.prod(hidden.shape[:-1])
    check_head(op, "teacher_", teacher_hidden, teacher_weight, rows, vocab_size)
    check_same_dtype(op, hidden=hidden, teacher_hidden=teacher_hidden)
    if targets is not None:
        check_targets(op, targets, hidden.shape[:-1], vocab_size if hard else None, ignore_index)
    check_grad_weight(op, weight, grad_weight)


def specs_of(device: Device, divergence: str) -> list[KernelSpec]:
    """Kernels for rows of every kind of split; the gradient is always written."""
    rows = divergence_specs(device, divergence, ((True, False), (True, True)))
    return [*rows, count_spec("int32"), total_spec()]


register(
    name=_OP,
    family="distill",
    function=linear_distillation_loss,
    reference=reference.linear_distillation_loss,
    specs=lambda device: specs_of(device, "jsd"),
)
