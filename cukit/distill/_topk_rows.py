"""The kernel over rows of logits with some tokens of a teacher: configuration, plan, launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from cukit.core.arrays import Array, check_array, float32, float64, int32
from cukit.core.compiler import MacroValue
from cukit.core.device import Device, current_device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.distill._loss_options import RowOptions, pack_rows
from cukit.distill._row_loss import (
    REPRESENTATIVE_ROWS,
    VocabularySplit,
    row_access_width,
    split_vocabulary,
)
from cukit.errors import ArrayError, ArrayShapeError

TAILS = ("renormalise", "bucket")
SAMPLED = "sampled"
_BY_NUMBER = (*TAILS, SAMPLED)
MOST_KNOWN = 1024
"""Tokens of a row."""


@dataclass(frozen=True)
class TopkConfig:
    """One way to run the kernel over rows of one vocabulary."""

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
            ("MOST", MOST_KNOWN),
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
    """The loss alone takes one sweep over the row, the gradient a second one. The known tokens take
    shared memory of a cached access."""
    sweeps = 2 if grad else 1
    split = split_vocabulary(
        vocab_size, itemsize, vec, 1, sweeps, device, reserved=4 * MOST_KNOWN, **choice
    )
    return TopkConfig(dtype, index_dtype, grad, hard, transform, tail, split)


def topk_specs(device: Device, kinds: Sequence[tuple[str, bool, bool, bool]]) -> list[KernelSpec]:
    """Kernels for every kind of split, of each kind: (tail, with gradient, with cross-entropy, with
    a transform)."""
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
    """The launch over rows that may have gaps between them, the gradient in place; not checked."""
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


def check_known_tokens(
    op: str,
    row_shape: tuple[int, ...],
    vocab_size: int,
    wide: bool,
    ids: tuple[str, Array],
    *values: tuple[str, Array | None],
    weights: Array | None = None,
    repeated: bool = False,
) -> None:
    """Raises ArrayError unless ids [..., k] and values of their shape, each with its name, fit.

    wide: whether values may be float64. weights: tokens whose weight is 0 may be any number.
    repeated: tokens may occur several times in a row, so that there may be more than there are
    classes.
    """
    name, tokens = ids
    check_array(op, name, tokens, dtypes=(int32,), shape=(*row_shape, None))
    most = MOST_KNOWN if repeated else min(MOST_KNOWN, vocab_size)
    if not 1 <= tokens.shape[-1] <= most:
        raise ArrayShapeError(
            f"{op}: {name} must have 1 to {most} tokens a row, got {tokens.shape[-1]}"
        )
    dtypes = (float32, float64) if wide else (float32,)
    for value_name, value in values:
        if value is not None or not repeated:  # samples have what they need with their tokens
            check_array(op, value_name, value, dtypes=dtypes, shape=tokens.shape)
    if isinstance(tokens, np.ndarray):
        wrong = (tokens < 0) | (tokens >= vocab_size)
        if weights is not None:
            wrong &= weights != 0
        if wrong.any():
            raise ArrayError(
                f"{op}: {name} must lie in 0..{vocab_size - 1}, got {tokens[wrong][0]}"
            )
