"""The divergence kernel over rows of student and teacher logits: configuration, plan, launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from cukit.core.arrays import Array
from cukit.core.compiler import MacroValue
from cukit.core.device import Device, current_device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.distill.losses._loss_options import DIVERGENCES, RowOptions, RowShard, pack_rows
from cukit.distill.losses._row_loss import (
    REPRESENTATIVE_ROWS,
    VocabularySplit,
    row_access_width,
    split_vocabulary,
)


@dataclass(frozen=True)
class DivergenceConfig:
    """A configuration of the divergence kernel for one vocabulary size."""

    dtype: str
    index_dtype: str
    divergence: str
    grad: bool
    hard: bool
    transform: bool
    split: VocabularySplit
    phase: int = 0
    """The phase over sharded rows, see distill/row_shard.cuh; 0: whole rows."""

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        defines: tuple[tuple[str, MacroValue], ...] = (
            ("DTYPE", self.dtype),
            ("ID", self.index_dtype),
            *self.split.defines(),
            ("GRAD", self.grad),
            ("HARD", self.hard),
            ("DIVERGENCE", DIVERGENCES.index(self.divergence)),
            ("TRANSFORM", self.transform),
            ("PHASE", self.phase),
        )
        return KernelSpec(
            "distill/divergence.cu",
            "divergence",
            defines,
            self.split.threads,
            self.split.shared_bytes,
        )


@cache
def plan_divergence(
    vocab_size: int,
    dtype: str,
    itemsize: int,
    index_dtype: str,
    vec: int,
    divergence: str,
    grad: bool,
    hard: bool,
    transform: bool,
    device: Device,
    phase: int = 0,
    **choice: Any,
) -> DivergenceConfig:
    """The configuration of a launch.

    The forward KL sweeps both rows twice: for their softmax statistics, then for loss and gradient.
    The gradient of the other divergences needs a sum that depends on the statistics: a third sweep.

    phase: 0 for whole rows, else a phase over sharded rows: a single sweep without caching.
    choice: overrides `cluster`, `cached`, `threads` of :func:`split_vocabulary`, for tuning.
    """
    sweeps = 2 if divergence == "forward_kl" else 3
    if phase:
        choice["cached"] = 0
    split = split_vocabulary(vocab_size, itemsize, vec, 2, sweeps, device, **choice)
    return DivergenceConfig(dtype, index_dtype, divergence, grad, hard, transform, split, phase)


def divergence_specs(
    device: Device,
    divergence: str,
    kinds: Sequence[tuple[bool, bool, bool]],
    rows: Sequence[tuple[Any, int]] = REPRESENTATIVE_ROWS,
    phase: int = 0,
) -> list[KernelSpec]:
    """Kernels for `rows` of (dtype, vocabulary size), of each kind: (with gradient, with
    cross-entropy, with a transform of the logits)."""
    return [
        plan_divergence(
            vocab_size, dtype.name, dtype.itemsize, "int32", 16 // dtype.itemsize, divergence,
            *kind, device, phase,
        ).spec()
        for dtype, vocab_size in rows
        for kind in kinds
    ]  # fmt: skip


@launch_plan
def prepare_rows(
    student_logits: Array,
    teacher_logits: Array,
    targets: Array | None,
    grad_loss: Array | None,
    divergence: str,
    hard: bool,
    transform: bool,
    ignore_index: int,
) -> Launch:
    """The launch for rows with any stride, the same in both arrays, which writes the gradient in
    place. Arguments are not checked."""
    rows = RowOptions(targets, ignore_index=ignore_index)
    stride = student_logits.strides[0] // student_logits.itemsize
    arrays = (student_logits, teacher_logits, student_logits, grad_loss, rows)
    kind = (divergence, hard, transform)
    return plan_launch(*arrays, *kind, student_logits.shape[-1], (stride, stride))


@launch_plan
def prepare_phase(
    phase: int,
    shard: RowShard,
    student_logits: Array,
    teacher_logits: Array,
    targets: Array | None,
    grad_loss: Array | None,
    divergence: str,
    hard: bool,
    transform: bool,
    ignore_index: int,
) -> Launch:
    """`prepare_rows` for one phase over this process's shard of each row; see row_shard.cuh."""
    rows = RowOptions(targets, ignore_index=ignore_index)
    stride = student_logits.strides[0] // student_logits.itemsize
    grad = student_logits if phase == 3 else None
    arrays = (student_logits, teacher_logits, grad, grad_loss, rows)
    kind = (divergence, hard, transform, student_logits.shape[-1], (stride, stride))
    return plan_launch(*arrays, *kind, phase, shard)


def plan_launch(
    student_logits: Array,
    teacher_logits: Array,
    grad: Array | None,
    grad_loss: Array | None,
    rows: RowOptions,
    divergence: str,
    hard: bool,
    transform: bool,
    columns: int,
    strides: tuple[int, int],
    phase: int = 0,
    shard: RowShard | None = None,
) -> Launch:
    """The launch. strides: of the student's and the teacher's rows, in elements."""
    config = plan_divergence(
        columns,
        student_logits.dtype.name,
        student_logits.itemsize,
        "int32" if rows.targets is None else rows.targets.dtype.name,
        row_access_width(student_logits, teacher_logits, grad, strides=strides),
        divergence,
        grad is not None,
        hard,
        transform,
        current_device(),
        phase,
    )
    grid = (math.prod(student_logits.shape[:-1]) * config.split.cluster,)
    packed = pack_rows(
        rows,
        columns,
        width=student_logits.shape[-1],
        row_stride=strides[0],
        teacher_stride=strides[1],
        grad_loss=grad_loss,
    )
    scalars = (packed,) if shard is None else (packed, shard.pack(student_logits.shape[0]))
    return Launch(load_kernel(config.spec()), grid, scalars)
