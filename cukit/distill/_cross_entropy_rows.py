"""The kernel over rows of logits: configuration, plan, launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from cukit.core.arrays import Array
from cukit.core.compiler import MacroValue
from cukit.core.device import Device, current_device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.distill._row_loss import VocabularySplit, row_access_width, split_vocabulary


@dataclass(frozen=True)
class CrossEntropyConfig:
    """One way to run the kernel over rows of one vocabulary."""

    dtype: str
    index_dtype: str
    grad: bool
    split: VocabularySplit

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        defines: tuple[tuple[str, MacroValue], ...] = (
            ("DTYPE", self.dtype),
            ("ID", self.index_dtype),
            *self.split.defines(),
            ("GRAD", self.grad),
        )
        return KernelSpec(
            "distill/cross_entropy.cu",
            "cross_entropy",
            defines,
            self.split.threads,
            self.split.shared_bytes,
        )


@cache
def plan_cross_entropy(
    vocab_size: int,
    dtype: str,
    itemsize: int,
    index_dtype: str,
    vec: int,
    grad: bool,
    device: Device,
    **choice: Any,
) -> CrossEntropyConfig:
    """The loss alone takes one sweep over the row, the gradient a second one.

    choice: `cluster`, `cached`, `threads` of :func:`split_vocabulary`, to try others.
    """
    sweeps = 2 if grad else 1
    split = split_vocabulary(vocab_size, itemsize, vec, 1, sweeps, device, **choice)
    return CrossEntropyConfig(dtype, index_dtype, grad, split)


@launch_plan
def prepare_rows(logits: Array, targets: Array, ignore_index: int) -> Launch:
    """The launch over rows that may have gaps between them, the gradient in place; not checked."""
    row_stride = logits.strides[0] // logits.itemsize
    return plan_launch(logits, targets, logits, None, ignore_index, row_stride)


def plan_launch(
    logits: Array,
    targets: Array,
    grad: Array | None,
    grad_loss: Array | None,
    ignore_index: int,
    row_stride: int,
) -> Launch:
    vocab_size = logits.shape[-1]
    config = plan_cross_entropy(
        vocab_size,
        logits.dtype.name,
        logits.itemsize,
        targets.dtype.name,
        row_access_width(logits, grad),
        grad is not None,
        current_device(),
    )
    stride = 1 if grad_loss is not None and grad_loss.ndim else 0
    grid = (math.prod(logits.shape[:-1]) * config.split.cluster,)
    scalars = (
        np.int64(ignore_index),
        np.int64(row_stride),
        np.int32(vocab_size),
        np.int32(stride),
    )
    return Launch(load_kernel(config.spec()), grid, scalars)


def launch_rows(
    launch: Launch,
    logits: Array,
    targets: Array,
    row_losses: Array,
    grad: Array | None,
    grad_loss: Array | None,
    normalizer: Array | None,
    factor: float,
) -> None:
    """Writes `row_losses` [rows], and to `grad` the rows' gradients times
    `factor * grad_loss / normalizer`."""
    launch(
        logits,
        targets,
        row_losses,
        grad,
        grad_loss,
        normalizer,
        then=(np.float32(factor),),
    )
