"""Shared by the losses on logits: the split of a row over threads and blocks, and reductions."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from cukit.core.arrays import (
    ACCESS_BYTES,
    Array,
    access_width,
    bfloat16,
    check_array,
    empty,
    float16,
    float32,
)
from cukit.core.device import KIB, Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.distill.losses._loss_options import LossOptions, RowOptions, factors_of

_TOTAL_THREADS = 1024


def row_access_width(*arrays: Array | None, strides: tuple[int, int] = (0, 0)) -> int:
    """Elements per vector access. Only base addresses must be aligned: in an unaligned row, kernels
    access the elements before the first and after the last aligned vector one by one.

    strides: of the student's and the teacher's rows; a row must have the same misalignment in both.
    """
    itemsize = next(array.itemsize for array in arrays if array is not None)
    return math.gcd(access_width(ACCESS_BYTES // itemsize, *arrays), strides[0] - strides[1])


@dataclass(frozen=True)
class VocabularySplit:
    """The split of one row of logits over threads and blocks.

    cluster: thread blocks that share a row.
    cached: vectors that a thread keeps in shared memory for the second sweep; the others are read
        again, from L2 if few rows are in flight.
    """

    threads: int
    vec: int
    cluster: int
    cached: int
    shared_bytes: int

    def defines(self) -> tuple[tuple[str, int], ...]:
        """The macros shared by the row kernels."""
        return (
            ("THREADS", self.threads),
            ("VEC", self.vec),
            ("CLUSTER", self.cluster),
            ("CACHED", self.cached),
        )


@cache
def split_vocabulary(
    vocab_size: int,
    itemsize: int,
    vec: int,
    num_tensors: int,
    sweeps: int,
    device: Device,
    cluster: int | None = None,
    cached: int | None = None,
    threads: int | None = None,
    reserved: int = 0,
) -> VocabularySplit:
    """The split for rows of `vocab_size` columns of `num_tensors` tensors.

    cluster, cached, threads: override the choice made here.
    reserved: bytes of shared memory that a block needs for other purposes.

    Three blocks per SM overlap one block's loads with another's arithmetic, so each may use a third
    of the shared memory. On compute capability 9.x and 10.x, a row is split over a cluster of the
    fewest blocks, up to eight, that can cache it. Blocks that cannot cache their part are larger,
    cache the vectors that fit and read the others again.
    """
    vecs = -(-vocab_size // vec)
    vec_bytes = vec * itemsize * num_tensors
    share = _share_of_shared_memory(device, 3) - reserved
    if cluster is None:
        cluster = 1
        if device.compute_capability[0] in (9, 10) and sweeps > 1:
            while cluster < 8 and -(-vecs // cluster) * vec_bytes > share:
                cluster *= 2
    per_block = -(-vecs // cluster)
    if threads is None:
        most = 384 if sweeps > 1 and per_block * vec_bytes > share else 256
        threads = min(most, max(32, 1 << (per_block // 2 - 1).bit_length()))
    if cached is None:
        room = share // (threads * vec_bytes)
        cached = min(room, -(-per_block // threads)) if sweeps > 1 else 0
    return VocabularySplit(threads, vec, cluster, cached, cached * threads * vec_bytes)


def _share_of_shared_memory(device: Device, blocks: int) -> int:
    """Bytes of dynamic shared memory of each of `blocks` blocks per SM, after 2 KiB of static
    shared memory and 1 KiB reserved by the system."""
    share = device.shared_bytes_per_sm // blocks - 3 * KIB
    return min(share, device.shared_bytes_per_block - 2 * KIB)


REPRESENTATIVE_ROWS = (
    (bfloat16, 256),
    (bfloat16, 32768),
    (bfloat16, 256000),
    (float16, 32768),
    (float32, 32768),
)
"""Dtypes and vocabulary sizes that cover every kind of split: one warp; a block or cluster that
caches the row; a row that is read twice."""

SHARDED_ROWS = ((bfloat16, 128000),)
"""The same for vocabularies that are sharded over processes."""


def normalizer_of(rows: RowOptions, num_rows: int) -> tuple[float, Array | None]:
    """The divisor of the sum over rows: a number, or 1.0 and a 0-d float32 array on the GPU."""
    if rows.reduction in ("sum", "none"):
        return 1.0, None
    if rows.normalizer is not None:
        if isinstance(rows.normalizer, numbers.Real):
            return float(rows.normalizer), None
        return 1.0, rows.normalizer
    weights = rows.token_weights if rows.reduction == "mean" else None
    like = rows.targets if weights is None else weights
    if like is None:
        return float(max(num_rows, 1)), None
    count = empty(like, (), np.float32)
    scalars = (np.int64(num_rows), np.int64(rows.ignore_index))
    launch = _prepare_count(rows.targets, weights)
    launch(rows.targets, weights, count, trailing_args=scalars)
    return 1.0, count


@launch_plan
def _prepare_count(targets: Array | None, token_weights: Array | None) -> Launch:
    name = "int32" if targets is None else targets.dtype.name
    return Launch(load_kernel(count_spec(name)), (1,), ())


def count_spec(index_dtype: str) -> KernelSpec:
    """The kernel of a mean's divisor: the number of kept rows, or the sum of their weights."""
    defines = (("ID", index_dtype), ("THREADS", _TOTAL_THREADS))
    return KernelSpec("distill/count_kept.cu", "count_kept", defines, _TOTAL_THREADS)


class Losses(NamedTuple):
    """Losses in float32: 0-d, or [rows] if the reduction is "none"."""

    loss: Array
    """soft_weight * soft + hard_weight * hard."""
    soft: Array | None
    """If not computed, None for reduction "none", else 0; the same for `hard`."""
    hard: Array | None


def evaluate_rows(
    launch: Launch,
    inputs: tuple[Array | None, ...],
    options: LossOptions,
    rows: RowOptions,
    grad: Array | None,
    *,
    soft: bool = True,
    return_loss: bool = True,
) -> Losses | None:
    """Launches a row kernel, whose first input is the logits, and reduces the rows' losses.

    soft: whether the kernel computes a divergence. Without `return_loss` nothing is reduced.
    """
    logits = inputs[0]
    assert logits is not None
    num_rows = math.prod(logits.shape[:-1])
    factor, grad_loss = rows.upstream()
    divisor, count = normalizer_of(rows, num_rows)
    outputs = empty_rows(logits, num_rows, options, soft)
    launch(
        *inputs, rows.targets, rows.token_weights, *outputs[0 if soft else 1 :], grad, grad_loss,
        count, trailing_args=(factors_of(options, factor / divisor),),
    )  # fmt: skip
    return reduce_rows(*outputs, rows, options, divisor, count) if return_loss else None


def empty_gradient(op: str, name: str, logits: Array, inplace: bool) -> Array:
    """The output array for the gradient of `logits`."""
    if inplace:
        return logits
    check_array(op, name, logits, contiguous=None)
    return empty(logits, logits.shape)


def empty_rows(
    like: Array, num_rows: int, options: LossOptions, soft: bool
) -> tuple[Array | None, Array | None]:
    """The output arrays for the rows' divergences and cross-entropies."""
    return (
        empty(like, (num_rows,), np.float32) if soft else None,
        empty(like, (num_rows,), np.float32) if options.hard else None,
    )


def reduce_rows(
    soft_rows: Array | None,
    hard_rows: Array | None,
    rows: RowOptions,
    options: LossOptions,
    divisor: float,
    normalizer: Array | None,
) -> Losses:
    """The losses reduced over rows, each divided by the divisor."""
    weights = (options.soft_weight, options.hard_weight)
    like = hard_rows if soft_rows is None else soft_rows
    if rows.reduction == "none":
        return Losses(_weighted_rows((soft_rows, hard_rows), weights), soft_rows, hard_rows)
    totals = empty(like, (3,), np.float32)
    _prepare_total(like)(
        soft_rows,
        hard_rows,
        normalizer,
        totals,
        trailing_args=(np.float32(1.0 / divisor), np.float32(weights[0]), np.float32(weights[1])),
    )
    return Losses(totals[0], totals[1], totals[2])


def _weighted_rows(parts: tuple[Array | None, Array | None], weights: tuple[float, float]) -> Array:
    used = [
        part if weight == 1.0 else part * np.float32(weight)
        for part, weight in zip(parts, weights, strict=True)
        if part is not None and weight != 0.0
    ]
    if not used:
        return next(part for part in parts if part is not None) * np.float32(0)
    return used[0] if len(used) == 1 else used[0] + used[1]


@launch_plan
def _prepare_total(rows: Array) -> Launch:
    return Launch(load_kernel(total_spec()), (1,), (np.int64(rows.size),))


def total_spec() -> KernelSpec:
    """The kernel that sums the losses of all rows in a fixed order."""
    defines = (("THREADS", _TOTAL_THREADS),)
    return KernelSpec("distill/total_loss.cu", "total_loss", defines, _TOTAL_THREADS)
