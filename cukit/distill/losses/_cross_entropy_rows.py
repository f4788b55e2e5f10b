"""The cross-entropy kernel over rows of logits: configuration, plan, launch."""

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
from cukit.distill.losses._loss_options import LossOptions, RowOptions, RowShard, pack_rows
from cukit.distill.losses._row_loss import (
    REPRESENTATIVE_ROWS,
    VocabularySplit,
    row_access_width,
    split_vocabulary,
)


@dataclass(frozen=True)
class CrossEntropyConfig:
    """A configuration of the cross-entropy kernel for one vocabulary size."""

    dtype: str
    index_dtype: str
    grad: bool
    transform: bool
    split: VocabularySplit
    phase: int = 0
    """PHASE of distill/row_shard.cuh: 1 to 3 over sharded rows, 0 over whole rows."""

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        defines: tuple[tuple[str, MacroValue], ...] = (
            ("DTYPE", self.dtype),
            ("ID", self.index_dtype),
            *self.split.defines(),
            ("GRAD", self.grad),
            ("TRANSFORM", self.transform),
            ("PHASE", self.phase),
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
    transform: bool,
    device: Device,
    phase: int = 0,
    **choice: Any,
) -> CrossEntropyConfig:
    """The configuration of a launch. The loss takes one sweep over the row, the gradient a second.

    phase: 0 for whole rows, else a phase over sharded rows: a single sweep without caching, but
        with the blocks per row that two sweeps would have.
    choice: overrides `cluster`, `cached`, `threads` of :func:`split_vocabulary`, for tuning.
    """
    sweeps = 2 if grad or phase else 1
    if phase:
        choice["cached"] = 0
    split = split_vocabulary(vocab_size, itemsize, vec, 1, sweeps, device, **choice)
    return CrossEntropyConfig(dtype, index_dtype, grad, transform, split, phase)


def cross_entropy_specs(
    device: Device,
    kinds: Sequence[tuple[bool, bool]],
    rows: Sequence[tuple[Any, int]] = REPRESENTATIVE_ROWS,
    phase: int = 0,
) -> list[KernelSpec]:
    """Kernels for `rows` of (dtype, vocabulary size), of each kind: (with gradient, with a
    transform of the logits)."""
    return [
        plan_cross_entropy(
            size, dtype.name, dtype.itemsize, "int32", 16 // dtype.itemsize, *kind, device, phase
        ).spec()
        for dtype, size in rows
        for kind in kinds
    ]


@launch_plan
def prepare_rows(
    logits: Array, targets: Array, grad_loss: Array | None, transform: bool, ignore_index: int
) -> Launch:
    """The launch over rows with any row stride; the gradient overwrites the logits. Arguments are
    not checked."""
    rows = RowOptions(targets, ignore_index=ignore_index)
    options = (logits.shape[-1], logits.strides[0] // logits.itemsize)
    return plan_launch(logits, logits, grad_loss, rows, transform, *options)


@launch_plan
def prepare_phase(
    phase: int,
    shard: RowShard,
    logits: Array,
    targets: Array,
    grad_loss: Array | None,
    transform: bool,
    ignore_index: int,
) -> Launch:
    """`prepare_rows` for one phase over this process's shard of each row; see row_shard.cuh."""
    rows = RowOptions(targets, ignore_index=ignore_index)
    sizes = (logits.shape[-1], logits.strides[0] // logits.itemsize)
    grad = logits if phase == 3 else None
    return plan_launch(logits, grad, grad_loss, rows, transform, *sizes, phase, shard)


def plan_launch(
    logits: Array,
    grad: Array | None,
    grad_loss: Array | None,
    rows: RowOptions,
    transform: bool,
    columns: int,
    row_stride: int,
    phase: int = 0,
    shard: RowShard | None = None,
) -> Launch:
    """The launch over rows of `columns` columns, with a gradient if `grad` is an array.

    row_stride: of `logits`, in elements. phase, shard: for sharded rows.
    """
    assert rows.targets is not None
    config = plan_cross_entropy(
        columns,
        logits.dtype.name,
        logits.itemsize,
        rows.targets.dtype.name,
        row_access_width(logits, grad),
        grad is not None,
        transform,
        current_device(),
        phase,
    )
    grid = (math.prod(logits.shape[:-1]) * config.split.cluster,)
    width = logits.shape[-1]
    packed = pack_rows(rows, columns, width=width, row_stride=row_stride, grad_loss=grad_loss)
    scalars = (packed,) if shard is None else (packed, shard.pack(logits.shape[0]))
    return Launch(load_kernel(config.spec()), grid, scalars)


OPTIONS = LossOptions(soft_weight=0.0, hard_weight=1.0)
"""The options of a cross-entropy without a divergence."""
