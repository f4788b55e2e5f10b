"""Distillation from tokens that were sampled from a teacher."""

from __future__ import annotations

from typing import Any

from cukit.core.arrays import Array
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec
from cukit.distill.losses._loss_options import LossOptions, RowOptions
from cukit.distill.losses._row_loss import count_spec, total_spec
from cukit.distill.losses._topk_rows import (
    SAMPLED,
    TeacherTokens,
    evaluate_teacher_tokens,
    topk_specs,
)
from cukit.reference import losses as reference
from cukit.registry import register

_OP = "sampled_distillation_loss"


def sampled_distillation_loss(
    student_logits: Array,
    sample_ids: Array,
    sample_weights: Array | None = None,
    *,
    teacher_log_probs: Array | None = None,
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
    """`sum_k w_k (log p_k - log q_k)` over k tokens per row that were sampled from a teacher.

    `q = softmax(student / T)`. For tokens sampled from the teacher `p` with weights 1 / k, or from
    another distribution `r` with weights `p_k / (k r_k)`, loss and gradient are unbiased estimates
    of those of KL(p, q); a top-k loss is biased. Without `teacher_log_probs` the teacher's entropy,
    which has no gradient, is omitted. Unlike KL(p, q), an estimate can be negative.

    Args:
        student_logits: float32|float16|bfloat16 [..., vocab_size], C-contiguous. float64 on the CPU
            only.
        sample_ids: int32 [..., k], k up to 1024: tokens; a row may contain duplicates.
        sample_weights: float32 [..., k]; None: 1 / k. Tokens of weight 0 are ignored: use them to
            pad rows with fewer samples.
        teacher_log_probs: float32 [..., k]: of `softmax(teacher / T)` at these tokens.
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
    Each sample is compared with all others of its row, so k should be tens to hundreds. Paper:
    Anshumann et al., Sparse logit sampling, arXiv:2503.16870.

    >>> import numpy as np, cukit as ck
    >>> student, ids = np.zeros((1, 4), np.float32), np.array([[2, 0, 2]], np.int32)
    >>> loss, grad = ck.sampled_distillation_loss(student, ids, return_grad=True)
    >>> print(round(float(loss), 4), grad.round(4))
    1.3863 [[-0.0833  0.25   -0.4167  0.25  ]]
    """
    options = LossOptions(
        temperature=temperature, scale_by_temperature_squared=scale_by_temperature_squared,
        soft_weight=soft_weight, hard_weight=hard_weight, logit_scale=logit_scale, softcap=softcap,
    )  # fmt: skip
    rows = RowOptions(
        targets, token_weights, ignore_index, vocab_size, reduction, normalizer, grad_loss
    )
    return evaluate_teacher_tokens(
        _OP, reference.sampled_distillation_loss, student_logits,
        TeacherTokens(sample_ids, sample_weights, teacher_log_probs), SAMPLED, options, rows,
        return_grad, inplace,
    )  # fmt: skip


def _specs(device: Device) -> list[KernelSpec]:
    kinds = ((SAMPLED, False, False, False), (SAMPLED, True, False, False))
    return [*topk_specs(device, kinds), count_spec("int32"), total_spec()]


register(
    name=_OP,
    family="distill",
    function=sampled_distillation_loss,
    reference=reference.sampled_distillation_loss,
    specs=_specs,
)
