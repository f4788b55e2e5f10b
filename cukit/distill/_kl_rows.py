"""The kernel over rows of student and teacher logits: configuration, plan, launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from cukit.core.arrays import Array
from cukit.core.compiler import MacroValue
from cukit.core.device import Device, current_device
from cukit.core.kernel import KernelSpec, Launch, by_value, launch_plan, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.distill._row_loss import VocabularySplit, row_access_width, split_vocabulary

_STRUCTS = parameter_structs("distill/parameters.cuh")


@dataclass(frozen=True)
class KlDivergenceConfig:
    """One way to run the kernel over rows of one vocabulary."""

    dtype: str
    index_dtype: str
    grad: bool
    hard: bool
    split: VocabularySplit

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        defines: tuple[tuple[str, MacroValue], ...] = (
            ("DTYPE", self.dtype),
            ("ID", self.index_dtype),
            *self.split.defines(),
            ("GRAD", self.grad),
            ("HARD", self.hard),
        )
        return KernelSpec(
            "distill/kl_divergence.cu",
            "kl_divergence",
            defines,
            self.split.threads,
            self.split.shared_bytes,
        )


@cache
def plan_kl_divergence(
    vocab_size: int,
    dtype: str,
    itemsize: int,
    index_dtype: str,
    vec: int,
    grad: bool,
    hard: bool,
    device: Device,
    **choice: Any,
) -> KlDivergenceConfig:
    """Both rows are swept twice: their masses first, then loss and gradient.

    choice: `cluster`, `cached`, `threads` of :func:`split_vocabulary`, to try others.
    """
    split = split_vocabulary(vocab_size, itemsize, vec, 2, 2, device, **choice)
    return KlDivergenceConfig(dtype, index_dtype, grad, hard, split)


@launch_plan
def prepare_rows(
    student_logits: Array,
    teacher_logits: Array,
    targets: Array | None,
    hard: bool,
    ignore_index: int,
) -> Launch:
    """The launch over rows that may have gaps between them, the same in both arrays; the gradient
    in place. Not checked."""
    row_stride = student_logits.strides[0] // student_logits.itemsize
    arrays = (student_logits, teacher_logits, targets, student_logits, None)
    return plan_launch(*arrays, hard, ignore_index, row_stride)


def plan_launch(
    student_logits: Array,
    teacher_logits: Array,
    targets: Array | None,
    grad: Array | None,
    grad_loss: Array | None,
    hard: bool,
    ignore_index: int,
    row_stride: int,
) -> Launch:
    vocab_size = student_logits.shape[-1]
    config = plan_kl_divergence(
        vocab_size,
        student_logits.dtype.name,
        student_logits.itemsize,
        "int32" if targets is None else targets.dtype.name,
        row_access_width(student_logits, teacher_logits, grad),
        grad is not None,
        hard,
        current_device(),
    )
    stride = 1 if grad_loss is not None and grad_loss.ndim else 0
    grid = (math.prod(student_logits.shape[:-1]) * config.split.cluster,)
    rows = _STRUCTS["LogitRows"].pack(
        ignore_index=ignore_index,
        row_stride=row_stride,
        columns=vocab_size,
        grad_loss_stride=stride,
    )
    return Launch(load_kernel(config.spec()), grid, (rows,))


def launch_rows(
    launch: Launch,
    student_logits: Array,
    teacher_logits: Array,
    targets: Array | None,
    soft_rows: Array,
    hard_rows: Array | None,
    grad: Array | None,
    grad_loss: Array | None,
    normalizer: Array | None,
    *,
    temperature: float,
    soft_loss_factor: float,
    soft_factor: float,
    hard_factor: float,
) -> None:
    """Writes the rows' divergences times `soft_loss_factor`, to `hard_rows` their cross-entropies,
    and to `grad` the gradient of both, weighted and times `grad_loss / normalizer`."""
    launch(
        student_logits,
        teacher_logits,
        targets,
        soft_rows,
        hard_rows,
        grad,
        grad_loss,
        normalizer,
        then=(_factors(temperature, soft_loss_factor, soft_factor, hard_factor),),
    )


@launch_plan
def _factors(
    temperature: float, soft_loss_factor: float, soft_factor: float, hard_factor: float
) -> Any:
    return by_value(
        _STRUCTS["DivergenceFactors"].pack(
            inverse_temperature=1.0 / temperature,
            soft_loss=soft_loss_factor,
            soft_gradient=soft_factor / temperature,
            hard_gradient=hard_factor,
        )
    )
