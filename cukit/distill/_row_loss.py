"""What the losses on logits share: checks, the split of a row over a cluster, and the totals."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from cukit.core.arrays import (
    ACCESS_BYTES,
    INDEX_DTYPES,
    Array,
    access_width,
    adopt,
    bfloat16,
    check_array,
    empty,
    float16,
    float32,
    float64,
    is_gpu_array,
)
from cukit.core.device import KIB, Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.scalars import check_choice, check_flag, check_integer, check_number
from cukit.errors import ArrayError, ConfigError

REDUCTIONS = ("mean", "sum", "none")

_TOTAL_THREADS = 1024


def check_options(
    op: str,
    reduction: str,
    normalizer: Any,
    ignore_index: int,
    temperature: float = 1.0,
    **flags: bool,
) -> None:
    """Raises ConfigError for an option outside its legal values."""
    for name, flag in flags.items():
        check_flag(op, name, flag)
    check_choice(op, "reduction", reduction, REDUCTIONS)
    check_integer(op, "ignore_index", ignore_index, least=-(1 << 31), most=(1 << 31) - 1)
    if normalizer is not None:
        if reduction != "mean":
            raise ConfigError(f"{op}: normalizer goes with reduction='mean', got {reduction!r}")
        check_scalar(op, "normalizer", normalizer)
        if isinstance(normalizer, numbers.Real) and not float(normalizer) > 0:
            raise ConfigError(f"{op}: normalizer must be above 0, got {normalizer}")
    check_number(op, "temperature", temperature, above=0)


def check_scalar(op: str, name: str, value: Any) -> None:
    """`value` is a Python or NumPy number, or a 0-d float32 array."""
    if not isinstance(value, numbers.Real):
        check_array(op, name, value, dtypes=_scalar_dtypes(value), shape=())


def _scalar_dtypes(value: Array) -> tuple[np.dtype[Any], ...]:
    return (float32,) if is_gpu_array(value) else (float32, float64)


def check_grad_loss(op: str, grad_loss: Any, reduction: str, row_shape: tuple[int, ...]) -> None:
    """An upstream gradient is a number, or float32 shaped like the loss."""
    if _is_number(grad_loss):
        return
    shape = (math.prod(row_shape),) if reduction == "none" else ()
    check_array(op, "grad_loss", grad_loss, dtypes=_scalar_dtypes(grad_loss), shape=shape)


def check_targets(
    op: str,
    targets: Array | None,
    row_shape: tuple[int, ...],
    vocab_size: int | None,
    ignore_index: int,
) -> None:
    """Index array of `row_shape`; its values too where it names classes (`vocab_size`) and lies on
    the CPU. A kernel cannot raise and makes a bad row NaN."""
    check_array(op, "targets", targets, dtypes=INDEX_DTYPES, shape=row_shape)
    if vocab_size is not None and isinstance(targets, np.ndarray):
        bad = (targets != ignore_index) & ((targets < 0) | (targets >= vocab_size))
        if bad.any():
            raise ArrayError(
                f"{op}: targets must lie in 0..{vocab_size - 1} or be ignore_index "
                f"({ignore_index}), got {targets[bad].flat[0]}"
            )


def adopt_scalars(op: str, *values: Any) -> tuple[Any, ...]:
    """Like `adopt`, for arguments that may be plain numbers."""
    return tuple(v if _is_number(v) else adopt(op, v)[0] for v in values)


def arrays_among(*values: Any) -> tuple[Array, ...]:
    """The arguments that are not plain numbers or None."""
    return tuple(v for v in values if not _is_number(v))


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, numbers.Real)


def row_access_width(*arrays: Array | None) -> int:
    """Elements of an access. Rows may begin anywhere: kernels align down, only bases count here."""
    itemsize = next(array.itemsize for array in arrays if array is not None)
    return access_width(ACCESS_BYTES // itemsize, *arrays)


@dataclass(frozen=True)
class VocabularySplit:
    """How the kernels go over one row of logits.

    cluster: thread blocks that share a row.
    cached: as many of its accesses a thread keeps in shared memory for the second sweep; the others
        are read again, out of L2 as long as few rows are in flight.
    """

    threads: int
    vec: int
    cluster: int
    cached: int
    shared_bytes: int

    def defines(self) -> tuple[tuple[str, int], ...]:
        """The macros that the row kernels share."""
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
    """The split for rows of `vocab_size` of `num_tensors` tensors; None lets it choose.

    reserved: bytes of shared memory that a block needs for something else.

    Three blocks on a multiprocessor overlap one's loads with another's arithmetic: a row goes over
    as many blocks as bring its share below a third of the shared memory. Where eight do not, three
    larger ones keep what they can and read the rest again.
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
    """Dynamic shared memory of each of `blocks` blocks; 2 KiB static, 1 KiB the system's."""
    share = device.shared_bytes_per_sm // blocks - 3 * KIB
    return min(share, device.shared_bytes_per_block - 2 * KIB)


REPRESENTATIVE_ROWS = (
    (bfloat16, 256),
    (bfloat16, 32768),
    (bfloat16, 256000),
    (float16, 32768),
    (float32, 32768),
)
"""Dtypes, and sizes that reach every kind of split: one warp; a block or cluster that caches; two
readings."""


def normalizer_of(
    targets: Array | None,
    rows: int,
    ignore_index: int,
    reduction: str,
    normalizer: Any,
) -> tuple[float, Array | None]:
    """What the sum of rows is divided by: a number, or 1.0 and a 0-d float32 array on the GPU."""
    if reduction != "mean":
        return 1.0, None
    if normalizer is None:
        if targets is None:
            return float(max(rows, 1)), None
        return 1.0, _count_kept(targets, ignore_index)
    if isinstance(normalizer, numbers.Real):
        return float(normalizer), None
    return 1.0, normalizer


def _count_kept(targets: Array, ignore_index: int) -> Array:
    """max(1, number of targets that are not `ignore_index`), without leaving the GPU."""
    count = empty(targets, (), np.float32)
    _prepare_count(targets)(targets, count, then=(np.int64(ignore_index),))
    return count


@launch_plan
def _prepare_count(targets: Array) -> Launch:
    return Launch(load_kernel(count_spec(targets.dtype.name)), (1,), (np.int64(targets.size),))


def count_spec(index_dtype: str) -> KernelSpec:
    """The kernel that counts the rows of a mean."""
    defines = (("ID", index_dtype), ("THREADS", _TOTAL_THREADS))
    return KernelSpec("distill/count_kept.cu", "count_kept", defines, _TOTAL_THREADS)


def total_loss(
    soft_rows: Array | None,
    hard_rows: Array | None,
    divisor: float,
    normalizer: Array | None,
    soft_weight: float = 1.0,
    hard_weight: float = 1.0,
) -> Array:
    """float32 [3]: the weighted total, the soft and the hard loss, each divided by the count."""
    rows = hard_rows if soft_rows is None else soft_rows
    totals = empty(rows, (3,), np.float32)
    _prepare_total(rows)(
        soft_rows,
        hard_rows,
        normalizer,
        totals,
        then=(np.float32(1.0 / divisor), np.float32(soft_weight), np.float32(hard_weight)),
    )
    return totals


@launch_plan
def _prepare_total(rows: Array) -> Launch:
    return Launch(load_kernel(total_spec()), (1,), (np.int64(rows.size),))


def total_spec() -> KernelSpec:
    """The kernel that sums the losses of all rows in a fixed order."""
    defines = (("THREADS", _TOTAL_THREADS),)
    return KernelSpec("distill/total_loss.cu", "total_loss", defines, _TOTAL_THREADS)


def upstream(grad_loss: Any) -> tuple[float, Array | None]:
    """An upstream gradient as a number, and an array where it is one."""
    if grad_loss is None:
        return 1.0, None
    if isinstance(grad_loss, numbers.Real):
        return float(grad_loss), None
    return 1.0, grad_loss
