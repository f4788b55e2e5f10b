"""The loss kernel for rows of logits and a few teacher tokens per row: checks, plan, launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    adopt,
    check_array,
    float32,
    float64,
    int32,
    runs_kernel,
    write_out,
)
from cukit.core.compiler import MacroValue
from cukit.core.device import Device, current_device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.scalars import check_flag
from cukit.distill.losses._loss_options import LossOptions, RowOptions, common_vocabulary, pack_rows
from cukit.distill.losses._row_loss import (
    REPRESENTATIVE_ROWS,
    VocabularySplit,
    empty_gradient,
    evaluate_rows,
    row_access_width,
    split_vocabulary,
)
from cukit.errors import ArrayError, ArrayShapeError

TAILS = ("renormalise", "bucket")
SAMPLED = "sampled"
_BY_NUMBER = (*TAILS, SAMPLED)
MAX_TEACHER_TOKENS = 1024
"""Maximum number of teacher tokens per row."""


class TeacherTokens(NamedTuple):
    """A teacher's tokens for each row, with log-probabilities or weights: arrays [..., tokens].

    Top-k tokens have log_probs and no weights; samples may have either, both or neither.
    """

    ids: Array
    weights: Array | None
    log_probs: Array | None

    def named(self, tail: str) -> dict[str, Array | None]:
        """The arrays by argument name."""
        if tail == SAMPLED:
            return {
                "sample_ids": self.ids,
                "sample_weights": self.weights,
                "teacher_log_probs": self.log_probs,
            }
        return {"teacher_ids": self.ids, "teacher_log_probs": self.log_probs}

    def check(
        self, op: str, row_shape: tuple[int, ...], vocab_size: int, tail: str, *, wide: bool
    ) -> None:
        """Raises ArrayError unless the arrays fit. wide: whether values may be float64.

        Samples may repeat, so there may be more of them than classes; a sample of weight 0 may have
        any id.
        """
        sampled = tail == SAMPLED
        named, ids = self.named(tail), self.ids
        name, *values = named
        check_array(op, name, ids, dtypes=(int32,), shape=(*row_shape, None))
        most = MAX_TEACHER_TOKENS if sampled else min(MAX_TEACHER_TOKENS, vocab_size)
        if not 1 <= ids.shape[-1] <= most:
            raise ArrayShapeError(
                f"{op}: {name} must have 1 to {most} tokens per row, got {ids.shape[-1]}"
            )
        dtypes = (float32, float64) if wide else (float32,)
        for each in values:
            if named[each] is not None or not sampled:
                check_array(op, each, named[each], dtypes=dtypes, shape=ids.shape)
        if isinstance(ids, np.ndarray):
            wrong = (ids < 0) | (ids >= vocab_size)
            if self.weights is not None:
                wrong &= self.weights != 0
            if wrong.any():
                raise ArrayError(
                    f"{op}: {name} must be in 0..{vocab_size - 1}, got {ids[wrong][0]}"
                )


@dataclass(frozen=True)
class TopkConfig:
    """A configuration of the top-k kernel for one vocabulary size."""

    dtype: str
    index_dtype: str
    grad: bool
    hard: bool
    transform: bool
    tail: str
    split: VocabularySplit

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        defines: tuple[tuple[str, MacroValue], ...] = (
            ("DTYPE", self.dtype),
            ("ID", self.index_dtype),
            *self.split.defines(),
            ("MAX_KNOWN", MAX_TEACHER_TOKENS),
            ("GRAD", self.grad),
            ("TAIL", _BY_NUMBER.index(self.tail)),
            ("HARD", self.hard),
            ("TRANSFORM", self.transform),
        )
        split = self.split
        return KernelSpec(
            "distill/topk_divergence.cu", "topk_divergence", defines, split.threads,
            split.shared_bytes,
        )  # fmt: skip


@cache
def plan_topk_divergence(
    vocab_size: int,
    dtype: str,
    itemsize: int,
    index_dtype: str,
    vec: int,
    tail: str,
    grad: bool,
    hard: bool,
    transform: bool,
    device: Device,
    **choice: Any,
) -> TopkConfig:
    """The configuration of a launch. The loss takes one sweep over the row, the gradient a second.
    The teacher's tokens leave less shared memory for caching the row."""
    sweeps = 2 if grad else 1
    split = split_vocabulary(
        vocab_size, itemsize, vec, 1, sweeps, device, reserved=4 * MAX_TEACHER_TOKENS, **choice
    )
    return TopkConfig(dtype, index_dtype, grad, hard, transform, tail, split)


def topk_specs(device: Device, kinds: Sequence[tuple[str, bool, bool, bool]]) -> list[KernelSpec]:
    """The kernels of each kind (tail, with gradient, with cross-entropy, with a transform of the
    logits) for every kind of vocabulary split."""
    return [
        plan_topk_divergence(
            size, dtype.name, dtype.itemsize, "int32", 16 // dtype.itemsize, *kind, device
        ).spec()
        for dtype, size in REPRESENTATIVE_ROWS
        for kind in kinds
    ]


@launch_plan
def prepare_rows(
    student_logits: Array,
    teacher_ids: Array,
    targets: Array | None,
    grad_loss: Array | None,
    tail: str,
    hard: bool,
    transform: bool,
    ignore_index: int,
) -> Launch:
    """The launch for rows with any stride, which writes the gradient in place. Arguments are not
    checked."""
    rows = RowOptions(targets, ignore_index=ignore_index)
    sizes = (student_logits.shape[-1], student_logits.strides[0] // student_logits.itemsize)
    arrays = (student_logits, teacher_ids, student_logits, grad_loss, rows)
    return plan_launch(*arrays, tail, hard, transform, *sizes)


def plan_launch(
    student_logits: Array,
    teacher_ids: Array,
    grad: Array | None,
    grad_loss: Array | None,
    rows: RowOptions,
    tail: str,
    hard: bool,
    transform: bool,
    columns: int,
    row_stride: int,
) -> Launch:
    """The launch for logits whose first `columns` columns are in use. Arguments are not checked.

    grad: the array that the gradient is written to; None for the loss alone.
    """
    config = plan_topk_divergence(
        columns,
        student_logits.dtype.name,
        student_logits.itemsize,
        "int32" if rows.targets is None else rows.targets.dtype.name,
        row_access_width(student_logits, grad),
        tail,
        grad is not None,
        hard,
        transform,
        current_device(),
    )
    width = student_logits.shape[-1]
    packed = pack_rows(rows, columns, width=width, row_stride=row_stride, grad_loss=grad_loss)
    grid = (math.prod(student_logits.shape[:-1]) * config.split.cluster,)
    scalars = (packed, np.int32(teacher_ids.shape[-1]))
    return Launch(load_kernel(config.spec()), grid, scalars)


def evaluate_teacher_tokens(
    op: str,
    reference: Callable[..., Any],
    student_logits: Array,
    tokens: TeacherTokens,
    tail: str,
    options: LossOptions,
    rows: RowOptions,
    return_grad: bool,
    inplace: bool,
) -> Any:
    """The loss, or `(loss, grad)`. reference: the CPU implementation of `op`."""
    student_logits, *arrays = adopt(op, student_logits, *tokens)
    tokens = TeacherTokens(*arrays)
    check_flag(op, "return_grad", return_grad)
    check_flag(op, "inplace", inplace)
    rows = rows.adopt(op)
    options = options.check(op, rows.targets)
    if not runs_kernel(op, student_logits, *tokens, *rows.arrays):
        _check(op, student_logits, tokens, tail, rows, options.hard)
        given = {**options.of_student(), **rows._asdict(), "return_grad": return_grad}
        result = reference(student_logits, **tokens.named(tail), **given)
        if inplace and return_grad:
            return result[0], write_out(student_logits, result[1])
        return result
    grad = empty_gradient(op, "student_logits", student_logits, inplace) if return_grad else None
    _, grad_loss = rows.upstream()
    launch = _prepare(
        op, student_logits, *tokens, tail, rows.targets, rows.token_weights, grad, grad_loss,
        options.hard, options.transforms, rows.ignore_index, rows.vocab_size, rows.reduction,
    )  # fmt: skip
    operands = (student_logits, tokens.log_probs, tokens.weights, tokens.ids)
    losses = evaluate_rows(launch, operands, options, rows, grad)
    assert losses is not None
    return losses.loss if grad is None else (losses.loss, grad)


@launch_plan
def _prepare(
    op: str,
    student_logits: Array,
    ids: Array,
    weights: Array | None,
    log_probs: Array | None,
    tail: str,
    targets: Array | None,
    token_weights: Array | None,
    grad: Array | None,
    grad_loss: Array | None,
    hard: bool,
    transform: bool,
    ignore_index: int,
    vocab_size: int | None,
    reduction: str,
) -> Launch:
    rows = RowOptions(
        targets, token_weights, ignore_index, vocab_size, reduction, grad_loss=grad_loss
    )
    tokens = TeacherTokens(ids, weights, log_probs)
    columns = _check(op, student_logits, tokens, tail, rows, hard)
    check_array(op, "student_logits", student_logits, dtypes=KERNEL_DTYPES)
    arrays = (student_logits, ids, grad, grad_loss, rows)
    return plan_launch(*arrays, tail, hard, transform, columns, student_logits.shape[-1])


def _check(
    op: str,
    student_logits: Array,
    tokens: TeacherTokens,
    tail: str,
    rows: RowOptions,
    hard: bool,
) -> int:
    """Checks the arrays; returns the number of columns in use."""
    check_array(op, "student_logits", student_logits, dtypes=FLOAT_DTYPES, min_ndim=1)
    *row_shape, width = student_logits.shape
    columns = common_vocabulary(op, rows.vocab_size, student_logits=width)
    tokens.check(op, tuple(row_shape), columns, tail, wide=student_logits.dtype == float64)
    rows.check(op, tuple(row_shape), columns if hard else None)
    return columns
