"""The kernel over rows of student and teacher logits: options, configuration, plan, launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from cukit.core.arrays import Array
from cukit.core.compiler import MacroValue
from cukit.core.device import Device, current_device
from cukit.core.kernel import KernelSpec, Launch, by_value, launch_plan, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import check_choice, check_number
from cukit.distill._row_loss import (
    REPRESENTATIVE_ROWS,
    VocabularySplit,
    row_access_width,
    split_vocabulary,
)
from cukit.errors import ConfigError

DIVERGENCES = (
    "forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl", "total_variation",
)  # fmt: skip
"""By their number in the kernel."""

_STRUCTS = parameter_structs("distill/parameters.cuh")


class LossOptions(NamedTuple):
    """soft_weight * divergence at a temperature + hard_weight * cross-entropy."""

    divergence: str = "forward_kl"
    beta: float = 0.5
    temperature: float = 1.0
    scale_by_temperature_squared: bool = False
    soft_weight: float = 1.0
    hard_weight: float = 0.0

    @property
    def square(self) -> float:
        """What the divergence and its gradient are multiplied by."""
        return self.temperature**2 if self.scale_by_temperature_squared else 1.0

    @property
    def hard(self) -> bool:
        return self.hard_weight != 0.0

    def check(self, op: str, targets: Array | None) -> LossOptions:
        """Raises ConfigError for a value outside its range; returns the options with limits of
        `beta` written as the KL divergence that they stand for."""
        check_choice(op, "divergence", self.divergence, DIVERGENCES)
        for name in ("soft_weight", "hard_weight"):
            check_number(op, name, getattr(self, name))
        if self.hard and targets is None:
            raise ConfigError(f"{op}: hard_weight={self.hard_weight} needs targets")
        check_number(op, "beta", self.beta, least=0, most=1)
        limits = _LIMITS.get(self.divergence, {})
        if self.divergence.startswith("skewed") and self.beta == 1:
            raise ConfigError(f"{op}: beta must be below 1 for {self.divergence}, got {self.beta}")
        return self._replace(divergence=limits.get(self.beta, self.divergence))


_LIMITS: dict[str, dict[float, str]] = {
    "jsd": {0: "forward_kl", 1: "reverse_kl"},
    "skewed_forward_kl": {0: "forward_kl"},
    "skewed_reverse_kl": {0: "reverse_kl"},
}


@dataclass(frozen=True)
class DivergenceConfig:
    """One way to run the kernel over rows of one vocabulary."""

    dtype: str
    index_dtype: str
    divergence: str
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
            ("DIVERGENCE", DIVERGENCES.index(self.divergence)),
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
    device: Device,
    **choice: Any,
) -> DivergenceConfig:
    """Both rows are swept twice: their masses first, then loss and gradient; three times where the
    gradient needs a sum that needs the masses.

    choice: `cluster`, `cached`, `threads` of :func:`split_vocabulary`, to try others.
    """
    sweeps = 2 if divergence == "forward_kl" else 3
    split = split_vocabulary(vocab_size, itemsize, vec, 2, sweeps, device, **choice)
    return DivergenceConfig(dtype, index_dtype, divergence, grad, hard, split)


def divergence_specs(
    device: Device,
    divergence: str,
    kinds: Sequence[tuple[bool, bool]],
    rows: Sequence[tuple[Any, int]] = REPRESENTATIVE_ROWS,
) -> list[KernelSpec]:
    """Kernels for `rows` of a dtype and a vocabulary, of each kind: (with gradient, with
    cross-entropy)."""
    return [
        plan_divergence(
            vocab_size, dtype.name, dtype.itemsize, "int32", 16 // dtype.itemsize, divergence,
            grad, hard, device,
        ).spec()
        for dtype, vocab_size in rows
        for grad, hard in kinds
    ]  # fmt: skip


@launch_plan
def prepare_rows(
    student_logits: Array,
    teacher_logits: Array,
    targets: Array | None,
    divergence: str,
    hard: bool,
    ignore_index: int,
) -> Launch:
    """The launch over rows that may have gaps between them, the same in both arrays; the gradient
    in place. Not checked."""
    row_stride = student_logits.strides[0] // student_logits.itemsize
    arrays = (student_logits, teacher_logits, targets, student_logits, None)
    return plan_launch(*arrays, divergence, hard, ignore_index, row_stride)


def plan_launch(
    student_logits: Array,
    teacher_logits: Array,
    targets: Array | None,
    grad: Array | None,
    grad_loss: Array | None,
    divergence: str,
    hard: bool,
    ignore_index: int,
    row_stride: int,
) -> Launch:
    vocab_size = student_logits.shape[-1]
    config = plan_divergence(
        vocab_size,
        student_logits.dtype.name,
        student_logits.itemsize,
        "int32" if targets is None else targets.dtype.name,
        row_access_width(student_logits, teacher_logits, grad),
        divergence,
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
    options: LossOptions,
    factor: float,
) -> None:
    """Writes the rows' divergences times `options.square`, to `hard_rows` their cross-entropies,
    and to `grad` the gradient of both, weighted and times `factor * grad_loss / normalizer`."""
    launch(
        *(student_logits, teacher_logits, targets, soft_rows, hard_rows, grad),
        *(grad_loss, normalizer),
        then=(factors_of(options, factor),),
    )


@launch_plan
def factors_of(options: LossOptions, factor: float) -> Any:
    """What a kernel multiplies losses and gradients by, as its parameter."""
    soft_factor = options.soft_weight * options.square * factor
    return by_value(
        _STRUCTS["DivergenceFactors"].pack(
            inverse_temperature=1.0 / options.temperature,
            soft_loss=options.square,
            soft_gradient=soft_factor / options.temperature,
            hard_gradient=options.hard_weight * factor,
            beta=options.beta,
        )
    )
