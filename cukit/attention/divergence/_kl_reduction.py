"""Reduction of per-row divergences to a loss, shared by the ops in this folder."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import numpy as np

from cukit.attention.divergence.kl_pairs import KlOptions, RowArrays
from cukit.attention.flash._problem import ceil_div
from cukit.core.arrays import Array, empty
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel

_TOTAL_THREADS = 512
_ROWS_PER_BLOCK = 4096
_MAX_BLOCKS = 1024


def total_blocks(rows: int) -> int:
    """Grid size of the kernel that sums `rows` rows of a loss."""
    return min(_MAX_BLOCKS, max(1, ceil_div(rows, _ROWS_PER_BLOCK)))


def sum_spec() -> KernelSpec:
    """The kernel that computes partial sums of the rows."""
    return _spec("attention_kl_sum", False)


def total_spec(weighted: bool) -> KernelSpec:
    """The kernel that adds the partial sums and, if `weighted`, divides by the total weight."""
    return _spec("attention_kl_total", weighted)


def _spec(entry: str, weighted: bool) -> KernelSpec:
    defines = (("THREADS", _TOTAL_THREADS), ("WEIGHED", weighted))
    return KernelSpec("attention/attention_kl_total.cu", entry, defines, _TOTAL_THREADS)


class ReductionFactor(NamedTuple):
    """The factor of the sum of the rows: a number on the host, divided on the device by
    `normalizer` or, if `weighted`, by the sum of the weights."""

    value: float
    normalizer: Array | None
    weighted: bool

    @property
    def on_host(self) -> bool:
        """Whether `value` is complete, with no division on the device."""
        return self.normalizer is None and not self.weighted


def reduction_factor_of(
    shape: tuple[int, ...], options: KlOptions, weights: Array | None, normalizer: Any
) -> ReductionFactor:
    """The factor of a reduction. shape: the rows' shape, [batch, heads, seq] or [heads, total]."""
    factor = options.loss_factor
    if options.reduction != "mean":
        return ReductionFactor(factor, None, False)
    factor /= max(1, shape[-2])
    if normalizer is None:
        if weights is not None:
            return ReductionFactor(factor, None, True)
        normalizer = max(1, math.prod(shape) // max(1, shape[-2]))
    if isinstance(normalizer, numbers.Real):
        return ReductionFactor(factor / float(normalizer), None, False)
    return ReductionFactor(factor, normalizer, False)


def totals(
    like: Array,
    rows: Array | None,
    shape: tuple[int, ...],
    weights: Array | None,
    reduction_factor: ReductionFactor,
    grad: Array | None = None,
) -> Array:
    """float32 [2] on the GPU: the sum of the weighted rows (0 if `rows` is None) times
    `reduction_factor`, and the gradient of a row of weight 1, which is `grad` (0-d; None: 1) times
    `reduction_factor`."""
    count, heads = math.prod(shape), shape[-2]
    blocks = total_blocks(count)
    partials = empty(like, (2, blocks), np.float32)
    add, end = _total_launches(blocks, reduction_factor.weighted)
    sizes = (np.int64(count), np.int32(heads), np.int64(shape[-1]))
    add(rows, weights, partials, trailing_args=sizes)
    both = empty(like, (2,), np.float32)
    scalars = (np.int32(blocks), np.float32(reduction_factor.value), np.int32(heads))
    end(partials, reduction_factor.normalizer, grad, both, trailing_args=scalars)
    return both


@launch_plan
def _total_launches(blocks: int, weighted: bool) -> tuple[Launch, Launch]:
    return Launch(load_kernel(sum_spec()), (blocks,)), Launch(
        load_kernel(total_spec(weighted)), (1,)
    )


def reduced(rows: Array, options: KlOptions, arrays: RowArrays, normalizer: Any) -> Array:
    """The loss from the divergences of the rows, on the GPU. With reduction "none" it is `rows`,
    scaled in place."""
    weights = arrays.row_weights
    if options.reduction != "none":
        reduction_factor = reduction_factor_of(rows.shape, options, weights, normalizer)
        return totals(rows, rows, rows.shape, weights, reduction_factor)[0]
    if weights is not None:
        by_rows = weights[None] if arrays.varlen else weights[:, None]
        rows *= by_rows
    if options.loss_factor != 1.0:
        rows *= np.float32(options.loss_factor)
    return rows
