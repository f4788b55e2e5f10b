"""KL divergence from a teacher of whom the likeliest tokens of each row are known."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    KERNEL_DTYPES,
    Array,
    adopt,
    check_array,
    empty,
    float32,
    float64,
    int32,
    namespace,
    runs_kernel,
    write_out,
)
from cukit.core.compiler import MacroValue
from cukit.core.device import Device, current_device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import check_choice, check_integer, check_number
from cukit.distill._divergence_rows import LossOptions, factors_of
from cukit.distill._row_loss import (
    REPRESENTATIVE_ROWS,
    VocabularySplit,
    adopt_scalars,
    arrays_among,
    check_grad_loss,
    check_options,
    check_targets,
    count_spec,
    normalizer_of,
    row_access_width,
    split_vocabulary,
    total_loss,
    total_spec,
    upstream,
)
from cukit.errors import ArrayError, ArrayShapeError
from cukit.reference import losses as reference
from cukit.registry import register

_OP = "topk_distillation_loss"
_TAILS = ("renormalise", "bucket")
_MOST_KNOWN = 1024
_ROWS_AT_ONCE = 1024


def topk_distillation_loss(
    student_logits: Array,
    teacher_log_probs: Array,
    teacher_ids: Array,
    *,
    tail: str = "renormalise",
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    targets: Array | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: Any = None,
    return_grad: bool = False,
    grad_loss: Any = None,
    inplace: bool = False,
) -> Array | tuple[Array, Array]:
    """KL divergence of a student from the k likeliest tokens of a teacher, e.g. read from disk.

    `tail` says what becomes of the teacher's other tokens: "renormalise" ignores them, the known
    probabilities are divided by their sum; "bucket" sums them up to one more token, and the
    student's other tokens likewise. Neither loss is ever negative.

    Args:
        student_logits: float32|float16|bfloat16 [..., vocab_size], C-contiguous. float64 on the CPU
            only.
        teacher_log_probs: float32 [..., k], C-contiguous, k up to 1024: of `softmax(teacher / T)`
            over the whole vocabulary, at the same T. See :func:`teacher_top_k`.
        teacher_ids: int32 [..., k]: the tokens they belong to, all different in a row.
        tail: "renormalise" or "bucket".
        temperature: T, above 0.
        The others: as in :func:`kl_divergence`.

    Returns:
        The loss, float32 0-d ([rows] for "none"); with `return_grad`, `(loss, grad_logits)`.

    Raises:
        ArrayError: dtype, shape, layout or device; on the CPU a token outside the vocabulary. On
            the GPU such a token makes its row's loss and gradient NaN.
        ConfigError: an option outside its range.

    Runs on CuPy's current stream without synchronising, accumulates in float32, is deterministic.

    >>> import numpy as np, cukit as ck
    >>> student = np.zeros((1, 4), np.float32)
    >>> log_probs, ids = np.log(np.array([[0.5, 0.25]], np.float32)), np.array([[2, 0]], np.int32)
    >>> round(float(ck.topk_distillation_loss(student, log_probs, ids, tail="bucket")), 4)
    0.1733
    """
    student_logits, teacher_log_probs, teacher_ids, targets = adopt(
        _OP, student_logits, teacher_log_probs, teacher_ids, targets
    )
    normalizer, grad_loss = adopt_scalars(_OP, normalizer, grad_loss)
    check_options(
        _OP,
        reduction,
        normalizer,
        ignore_index,
        temperature,
        scale_by_temperature_squared=scale_by_temperature_squared,
        return_grad=return_grad,
        inplace=inplace,
    )
    check_choice(_OP, "tail", tail, _TAILS)
    inputs = (student_logits, teacher_log_probs, teacher_ids, targets)
    if not runs_kernel(_OP, *inputs, *arrays_among(normalizer, grad_loss)):
        _check(*inputs, grad_loss, ignore_index, reduction)
        result = reference.topk_distillation_loss(
            *inputs[:3],
            tail=tail,
            temperature=temperature,
            scale_by_temperature_squared=scale_by_temperature_squared,
            targets=targets,
            ignore_index=ignore_index,
            reduction=reduction,
            normalizer=normalizer,
            return_grad=return_grad,
            grad_loss=grad_loss,
        )
        if inplace and return_grad:
            return result[0], write_out(student_logits, result[1])
        return result
    grad = None
    if return_grad:
        grad = student_logits if inplace else empty(student_logits, student_logits.shape)
    factor, grad_loss = upstream(grad_loss)
    launch = _prepare(*inputs, grad, grad_loss, tail, ignore_index, reduction)
    num_rows = math.prod(student_logits.shape[:-1])
    divisor, count = normalizer_of(targets, num_rows, ignore_index, reduction, normalizer)
    rows = empty(student_logits, (num_rows,), np.float32)
    options = LossOptions(
        temperature=temperature, scale_by_temperature_squared=scale_by_temperature_squared
    )
    then = (np.int32(teacher_ids.shape[-1]), factors_of(options, factor / divisor))
    launch(*inputs, rows, grad, grad_loss, count, then=then)
    loss = rows if reduction == "none" else total_loss(rows, None, divisor, count)[0]
    return loss if grad is None else (loss, grad)


def teacher_top_k(
    teacher_logits: Array, k: int, *, temperature: float = 1.0
) -> tuple[Array, Array]:
    """The `k` likeliest tokens of each row: what an offline teacher leaves on disk.

    Args:
        teacher_logits: float [..., vocab_size].
        k: 1 to vocab_size, at most 1024.
        temperature: T, above 0.

    Returns:
        `(log_probs, ids)`, float32 and int32 [..., k], likeliest first: of
        `softmax(teacher_logits / T)` over the whole vocabulary.

    Raises:
        ArrayError, ConfigError: dtype, shape, k or temperature.

    >>> import numpy as np, cukit as ck
    >>> log_probs, ids = ck.teacher_top_k(np.array([[0.0, 2.0, 1.0]], np.float32), 2)
    >>> ids.tolist(), log_probs.round(3).tolist()
    ([[1, 2]], [[-0.40799999237060547, -1.4079999923706055]])
    """
    op = "teacher_top_k"
    (teacher_logits,) = adopt(op, teacher_logits)
    check_array(op, "teacher_logits", teacher_logits, dtypes=FLOAT_DTYPES, least_ndim=1)
    check_integer(op, "k", k, least=1, most=min(_MOST_KNOWN, teacher_logits.shape[-1]))
    check_number(op, "temperature", temperature, above=0)
    xp = namespace(teacher_logits)
    rows = teacher_logits.reshape(-1, teacher_logits.shape[-1])
    log_probs = xp.empty((rows.shape[0], k), np.float32)
    ids = xp.empty((rows.shape[0], k), np.int32)
    for start in range(0, rows.shape[0], _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        z = rows[part].astype(np.float32) * np.float32(1.0 / temperature)
        found = xp.argpartition(-z, k - 1, axis=-1)[:, :k]
        values = xp.take_along_axis(z, found, axis=-1)
        order = xp.argsort(-values, axis=-1)
        top = xp.max(z, axis=-1, keepdims=True)
        mass = xp.log(xp.sum(xp.exp(z - top), axis=-1, keepdims=True))
        log_probs[part] = xp.take_along_axis(values, order, axis=-1) - top - mass
        ids[part] = xp.take_along_axis(found, order, axis=-1)
    shape = (*teacher_logits.shape[:-1], k)
    return log_probs.reshape(shape), ids.reshape(shape)


@dataclass(frozen=True)
class TopkConfig:
    """One way to run the kernel over rows of one vocabulary."""

    dtype: str
    index_dtype: str
    grad: bool
    bucket: bool
    split: VocabularySplit

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        defines: tuple[tuple[str, MacroValue], ...] = (
            ("DTYPE", self.dtype),
            ("ID", self.index_dtype),
            *self.split.defines(),
            ("MOST", _MOST_KNOWN),
            ("GRAD", self.grad),
            ("BUCKET", self.bucket),
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
    grad: bool,
    tail: str,
    device: Device,
) -> TopkConfig:
    """The loss alone takes one sweep over the row, the gradient a second one. The known tokens take
    shared memory of a cached access."""
    sweeps = 2 if grad else 1
    split = split_vocabulary(vocab_size, itemsize, vec, 1, sweeps, device, reserved=4 * _MOST_KNOWN)
    return TopkConfig(dtype, index_dtype, grad, tail == "bucket", split)


@launch_plan
def _prepare(
    student_logits: Array,
    teacher_log_probs: Array,
    teacher_ids: Array,
    targets: Array | None,
    grad: Array | None,
    grad_loss: Array | None,
    tail: str,
    ignore_index: int,
    reduction: str,
) -> Launch:
    inputs = (student_logits, teacher_log_probs, teacher_ids, targets)
    _check(*inputs, grad_loss, ignore_index, reduction)
    check_array(_OP, "student_logits", student_logits, dtypes=KERNEL_DTYPES)
    vocab_size = student_logits.shape[-1]
    config = plan_topk_divergence(
        vocab_size,
        student_logits.dtype.name,
        student_logits.itemsize,
        "int32" if targets is None else targets.dtype.name,
        row_access_width(student_logits, grad),
        grad is not None,
        tail,
        current_device(),
    )
    rows = parameter_structs("distill/parameters.cuh")["LogitRows"].pack(
        ignore_index=ignore_index,
        row_stride=vocab_size,
        columns=vocab_size,
        grad_loss_stride=1 if grad_loss is not None and grad_loss.ndim else 0,
    )
    grid = (math.prod(student_logits.shape[:-1]) * config.split.cluster,)
    return Launch(load_kernel(config.spec()), grid, (rows,))


def _check(
    student_logits: Array,
    teacher_log_probs: Array,
    teacher_ids: Array,
    targets: Array | None,
    grad_loss: Any,
    ignore_index: int,
    reduction: str,
) -> None:
    check_array(_OP, "student_logits", student_logits, dtypes=FLOAT_DTYPES, least_ndim=1)
    *row_shape, vocab_size = student_logits.shape
    shape = (*row_shape, None)
    wide = (float32, float64) if student_logits.dtype == float64 else (float32,)
    check_array(_OP, "teacher_log_probs", teacher_log_probs, dtypes=wide, shape=shape)
    num_known = teacher_log_probs.shape[-1]
    if not 1 <= num_known <= min(_MOST_KNOWN, vocab_size):
        raise ArrayShapeError(
            f"{_OP}: teacher_log_probs must have 1 to {min(_MOST_KNOWN, vocab_size)} tokens a row, "
            f"got {num_known}"
        )
    shape = teacher_log_probs.shape
    check_array(_OP, "teacher_ids", teacher_ids, dtypes=(int32,), shape=shape)
    if isinstance(teacher_ids, np.ndarray):
        wrong = (teacher_ids < 0) | (teacher_ids >= vocab_size)
        if wrong.any():
            raise ArrayError(
                f"{_OP}: teacher_ids must lie in 0..{vocab_size - 1}, got {teacher_ids[wrong][0]}"
            )
    if targets is not None:
        check_array(_OP, "targets", targets, dtypes=INDEX_DTYPES)
        check_targets(_OP, targets, tuple(row_shape), None, ignore_index)
    check_grad_loss(_OP, grad_loss, reduction, tuple(row_shape))


def _specs(device: Device) -> list[KernelSpec]:
    rows = [
        plan_topk_divergence(
            size, dtype.name, dtype.itemsize, "int32", 16 // dtype.itemsize, grad, tail, device
        ).spec()
        for dtype, size in REPRESENTATIVE_ROWS
        for grad, tail in ((False, "bucket"), (True, "bucket"), (True, "renormalise"))
    ]
    return [*rows, count_spec("int32"), total_spec()]


register(
    name=_OP,
    family="distill",
    function=topk_distillation_loss,
    reference=reference.topk_distillation_loss,
    specs=_specs,
)
