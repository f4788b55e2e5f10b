"""KL divergence from a teacher's top-k tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    adopt,
    check_array,
    namespace,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec
from cukit.core.scalars import check_choice, check_integer, check_number
from cukit.distill.losses._loss_options import LossOptions, RowOptions
from cukit.distill.losses._row_loss import count_spec, total_spec
from cukit.distill.losses._topk_rows import (
    MAX_TEACHER_TOKENS,
    TAILS,
    TeacherTokens,
    evaluate_teacher_tokens,
    topk_specs,
)
from cukit.reference import losses as reference
from cukit.registry import register

_OP = "topk_distillation_loss"
_ROWS_AT_ONCE = 1024


def topk_distillation_loss(
    student_logits: Array,
    teacher_log_probs: Array,
    teacher_ids: Array,
    *,
    tail: str = "renormalise",
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    targets: Array | None = None,
    token_weights: Array | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    return_grad: bool = False,
    grad_loss: Any = None,
    inplace: bool = False,
) -> Array | tuple[Array, Array]:
    """KL divergence of a student from the k likeliest tokens of a teacher, e.g. read from disk.

    `tail` is the treatment of the teacher's other tokens: "renormalise" ignores them and divides
    the given probabilities by their sum; "bucket" merges them into one more token, and the
    student's other tokens likewise. Both losses are non-negative.

    Args:
        student_logits: float32|float16|bfloat16 [..., vocab_size], C-contiguous. float64 on the CPU
            only.
        teacher_log_probs: float32 [..., k], C-contiguous, k up to 1024: logarithms of
            `softmax(teacher / T)` over the whole vocabulary, at the same T. See
            :func:`teacher_top_k`.
        teacher_ids: int32 [..., k]: the ids of these tokens, distinct within a row.
        tail: "renormalise" or "bucket".
        temperature: T, above 0.
        Other arguments: as in :func:`distillation_loss`.

    Returns:
        The loss, float32 0-d ([rows] for "none"); with `return_grad`, `(loss, grad_logits)`.

    Raises:
        ArrayError: dtype, shape, layout or device; on the CPU a token outside the vocabulary. On
            the GPU such a token makes its row's loss and gradient NaN.
        ConfigError: an option outside its range.

    Runs on CuPy's current stream without synchronising, accumulates in float32 and is
    deterministic.

    >>> import numpy as np, cukit as ck
    >>> student = np.zeros((1, 4), np.float32)
    >>> log_probs, ids = np.log(np.array([[0.5, 0.25]], np.float32)), np.array([[2, 0]], np.int32)
    >>> round(float(ck.topk_distillation_loss(student, log_probs, ids, tail="bucket")), 4)
    0.1733
    """
    options = LossOptions(
        temperature=temperature, scale_by_temperature_squared=scale_by_temperature_squared,
        soft_weight=soft_weight, hard_weight=hard_weight, logit_scale=logit_scale, softcap=softcap,
    )  # fmt: skip
    rows = RowOptions(
        targets, token_weights, ignore_index, vocab_size, reduction, normalizer, grad_loss
    )
    check_choice(_OP, "tail", tail, TAILS)
    return evaluate_teacher_tokens(
        _OP, partial(reference.topk_distillation_loss, tail=tail), student_logits,
        TeacherTokens(teacher_ids, None, teacher_log_probs), tail, options, rows,
        return_grad, inplace,
    )  # fmt: skip


def teacher_top_k(
    teacher_logits: Array, k: int, *, temperature: float = 1.0
) -> tuple[Array, Array]:
    """The `k` likeliest tokens of each row, in the form that `topk_distillation_loss` takes.

    Args:
        teacher_logits: float [..., vocab_size].
        k: 1 to vocab_size, at most 1024.
        temperature: T, above 0.

    Returns:
        `(log_probs, ids)`, float32 and int32 [..., k], likeliest first. The log-probabilities are
        those of `softmax(teacher_logits / T)` over the whole vocabulary.

    Raises:
        ArrayError, ConfigError: dtype, shape, k or temperature.

    >>> import numpy as np, cukit as ck
    >>> log_probs, ids = ck.teacher_top_k(np.array([[0.0, 2.0, 1.0]], np.float32), 2)
    >>> ids.tolist(), log_probs.round(3).tolist()
    ([[1, 2]], [[-0.40799999237060547, -1.4079999923706055]])
    """
    op = "teacher_top_k"
    (teacher_logits,) = adopt(op, teacher_logits)
    check_array(op, "teacher_logits", teacher_logits, dtypes=FLOAT_DTYPES, min_ndim=1)
    check_integer(op, "k", k, least=1, most=min(MAX_TEACHER_TOKENS, teacher_logits.shape[-1]))
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


def _specs(device: Device) -> list[KernelSpec]:
    kinds = (
        ("bucket", False, False, False),
        ("bucket", True, False, False),
        ("renormalise", True, False, False),
        ("bucket", True, True, True),
    )
    return [*topk_specs(device, kinds), count_spec("int32"), total_spec()]


register(
    name=_OP,
    family="distill",
    function=topk_distillation_loss,
    reference=reference.topk_distillation_loss,
    specs=_specs,
)
