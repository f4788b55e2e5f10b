"""A divergence, mixed with cross-entropy, fused with the heads of teacher and student."""

from __future__ import annotations

import math
from typing import Any

from cukit.core.arrays import (
    KERNEL_DTYPES,
    Array,
    check_array,
    check_same_dtype,
    runs_kernel,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch
from cukit.distill.losses._divergence_rows import divergence_specs, prepare_rows
from cukit.distill.losses._linear_loss import (
    Head,
    HeadOptions,
    LinearLossConfig,
    RowLaunch,
    empty_logits,
    evaluate_head,
    linear_result,
)
from cukit.distill.losses._loss_options import LossOptions, RowOptions, common_vocabulary
from cukit.distill.losses._row_loss import SHARDED_ROWS, count_spec, total_spec
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
    bias: Array | None = None,
    teacher_bias: Array | None = None,
    targets: Array | None = None,
    token_weights: Array | None = None,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    grad_loss: Any = None,
    grad_weight: Array | None = None,
    grad_bias: Array | None = None,
    chunk_tokens: int | None = None,
    workspace_bytes: int | None = None,
) -> LinearKlResult:
    """Distillation loss of two language-model heads, with gradients, never storing the full logits.

    :func:`distillation_loss` of `hidden @ weight^T + bias` and `teacher_hidden @ teacher_weight^T +
    teacher_bias`, with all its options.

    Args:
        hidden: float32|float16|bfloat16 [..., hidden_size], C-contiguous; leading axes index rows.
        weight: dtype of `hidden`, [vocab_size, hidden_size].
        teacher_hidden: dtype and number of rows of `hidden`, [..., teacher_hidden_size].
        teacher_weight: dtype of `hidden`, [vocab_size, teacher_hidden_size].
        bias, teacher_bias: dtype of `hidden`, [vocab_size]. Each costs a pass over the logits, as
            does the gradient of `bias`.
        targets: int32|int64 [...], the rows' classes; needed if hard_weight != 0. Rows whose target
            is `ignore_index` have zero loss and gradient.
        vocab_size: number of leading rows of both weights in use; the others are padding and get
            zero gradient. Needed if the weights have different numbers of rows.
        grad_loss: upstream gradient: a number or float32 0-d array ([rows] for reduction "none").
        grad_weight: dtype of `weight` or float32, shape of `weight`: the gradient is added to it,
            in place. None: a new array.
        grad_bias: float32 [vocab_size], likewise.
        chunk_tokens: rows that go through the heads at once; None: the plan's choice.
        workspace_bytes: alternative to chunk_tokens: a limit on the memory for logits.
        Other arguments: as in :func:`distillation_loss`.

    Returns:
        :class:`LinearKlResult`: `loss`, `soft_loss`, `hard_loss` (float32, 0-d; [rows] for "none"),
        `grad_hidden` like `hidden`, `grad_weight`, and `grad_bias` (float32) where there is a bias.
        No gradient of the teacher is computed.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument; vocabularies of different sizes.
        ConfigError: an option outside its range, or `hard_weight` without `targets`.

    Memory besides the results: two chunks of logits, `2 * chunk_tokens * vocab_size` elements.
    Logits and their gradient are rounded to the dtype of `hidden`; grad_weight is rounded to its
    own dtype once per chunk, which in float32 is negligible. Runs on CuPy's current stream without
    synchronising and is deterministic. On the CPU all logits are computed at once.

    >>> import numpy as np, cukit as ck
    >>> hidden, weight = np.eye(2, dtype=np.float32), np.eye(2, dtype=np.float32)
    >>> result = ck.linear_distillation_loss(hidden, weight, hidden, 2 * weight)
    >>> round(float(result.loss), 4), result.grad_weight.shape
    (0.0671, (2, 2))
    """
    options = LossOptions(
        divergence, beta, temperature, scale_by_temperature_squared, soft_weight, hard_weight,
        logit_scale, softcap, teacher_logit_scale, teacher_softcap,
    )  # fmt: skip
    return evaluate(
        _OP,
        Head(hidden, weight, bias),
        Head(teacher_hidden, teacher_weight, teacher_bias),
        options,
        RowOptions(
            targets, token_weights, ignore_index, vocab_size, reduction, normalizer, grad_loss
        ),
        HeadOptions(grad_weight, grad_bias, chunk_tokens, workspace_bytes),
    )


def evaluate(
    op: str,
    student: Head,
    teacher: Head,
    options: LossOptions,
    rows: RowOptions,
    head_options: HeadOptions,
) -> LinearKlResult:
    """:func:`linear_distillation_loss`; errors name `op`."""
    student, teacher, head_options = student.adopt(op), teacher.adopt(op), head_options.adopt(op)
    rows = rows.adopt(op)
    options = options.check(op, rows.targets)
    on_gpu = runs_kernel(op, *student, *teacher, *head_options.arrays, *rows.arrays)
    columns = _check(op, student, teacher, rows, head_options, options.hard)
    if not on_gpu:
        given = {**options._asdict(), **rows._asdict(), **head_options._asdict()}
        given |= {"bias": student.bias, "teacher_bias": teacher.bias}
        return reference.linear_distillation_loss(
            student.hidden, student.weight, teacher.hidden, teacher.weight, **given
        )
    check_array(op, "hidden", student.hidden, dtypes=KERNEL_DTYPES)
    flat = teacher.flat(columns)

    def row_launch(config: LinearLossConfig) -> RowLaunch:
        buffer = empty_logits(flat.hidden, config.chunk_tokens, columns)

        def launch(chunk: slice, logits: Array) -> tuple[Launch, tuple[Array, Array]]:
            teacher_logits = flat.project(chunk, buffer)
            targets, grad_loss = rows.part(chunk)
            kind = (options.divergence, options.hard, options.transforms, rows.ignore_index)
            inputs = (logits, teacher_logits)
            return prepare_rows(*inputs, targets, grad_loss, *kind), inputs

        return launch

    losses, gradients = evaluate_head(
        op, student, columns, rows, options, head_options, row_launch, tensors=2
    )
    return linear_result(losses, gradients, student.hidden)


def _check(
    op: str, student: Head, teacher: Head, rows: RowOptions, head_options: HeadOptions, hard: bool
) -> int:
    """Checks the arrays; returns the number of vocabulary columns in use."""
    student.check(op, "", None)
    row_shape = student.hidden.shape[:-1]
    teacher.check(op, "teacher_", math.prod(row_shape))
    check_same_dtype(op, hidden=student.hidden, teacher_hidden=teacher.hidden)
    sizes = {"weight": student.weight.shape[0], "teacher_weight": teacher.weight.shape[0]}
    columns = common_vocabulary(op, rows.vocab_size, **sizes)
    rows.check(op, row_shape, columns if hard else None)
    head_options.check(op, student)
    return columns


def specs_of(device: Device, divergence: str) -> list[KernelSpec]:
    """Row kernels with gradient: soft loss only, with cross-entropy, and also with a transform of
    the logits."""
    kinds = ((True, False, False), (True, True, False), (True, True, True))
    rows = divergence_specs(device, divergence, kinds)
    return [*rows, count_spec("int32"), total_spec()]


def _specs(device: Device) -> list[KernelSpec]:
    """Row kernels of the JSD, and row kernels for vocabularies sharded over processes."""
    sharded = [
        spec
        for phase in (1, 2, 3)
        for divergence in {1: ("forward_kl",), 2: ("jsd",), 3: ("forward_kl", "jsd")}[phase]
        for transform in (False, True)
        for spec in divergence_specs(
            device, divergence, ((phase == 3, True, transform),), SHARDED_ROWS, phase
        )
    ]
    return [*specs_of(device, "jsd"), *sharded]


register(
    name=_OP,
    family="distill",
    function=linear_distillation_loss,
    reference=reference.linear_distillation_loss,
    specs=_specs,
)
