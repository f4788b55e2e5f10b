"""Forward KL divergence on teacher and student logits, with its gradient from the same launch."""

from __future__ import annotations

from typing import Any

from cukit.core.arrays import Array
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec
from cukit.distill.losses._divergence_rows import divergence_specs
from cukit.distill.losses._loss_options import LossOptions, RowOptions
from cukit.distill.losses._row_loss import count_spec, total_spec
from cukit.distill.losses.distillation_loss import evaluate
from cukit.reference import losses as reference
from cukit.registry import register


def kl_divergence(
    student_logits: Array,
    teacher_logits: Array,
    *,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    targets: Array | None = None,
    token_weights: Array | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    return_grad: bool = False,
    grad_loss: Any = None,
    inplace: bool = False,
) -> Array | tuple[Array, Array]:
    """KL divergence of rows of logits: `loss = sum_v p_v (log p_v - log q_v)`.

    `p = softmax(teacher / T)`, `q = softmax(student / T)`. Summed as `p (expm1(-d) + d)` with
    `d = log p - log q`, whose terms are non-negative: accurate to float32 even where student and
    teacher nearly agree. The usual form loses every digit at a divergence of 1e-6.

    Args:
        student_logits: float32|float16|bfloat16 [..., vocab_size], C-contiguous. float64 on the CPU
            only.
        teacher_logits: dtype and shape of `student_logits`; with `vocab_size` the last axes may
            differ.
        temperature: T, above 0.
        scale_by_temperature_squared: multiply loss and gradient by T^2, which keeps the size of the
            gradient independent of T (Hinton et al., arXiv:1503.02531).
        targets: int32|int64 [...]; only marks rows to ignore: rows whose target is `ignore_index`
            have zero loss and gradient, as do rows in which all logits of either model are -inf.
        Other arguments: as in :func:`distillation_loss`.

    Returns:
        The loss, float32 0-d ([rows] for "none"); with `return_grad`, `(loss, grad_logits)`.

    Raises:
        ArrayError, ConfigError: as :func:`distillation_loss`.

    Runs on CuPy's current stream without synchronising, accumulates in float32 and is
    deterministic.

    >>> import numpy as np, cukit as ck
    >>> student, teacher = np.zeros((1, 2), np.float32), np.log(np.array([[1, 3]], np.float32))
    >>> round(float(ck.kl_divergence(student, teacher)), 4)
    0.1308
    """
    options = LossOptions(
        "forward_kl", 0.0, temperature, scale_by_temperature_squared, 1.0, 0.0,
        logit_scale, softcap, teacher_logit_scale, teacher_softcap,
    )  # fmt: skip
    rows = RowOptions(
        targets, token_weights, ignore_index, vocab_size, reduction, normalizer, grad_loss
    )
    loss, grad = evaluate(
        "kl_divergence", student_logits, teacher_logits, options, rows, return_grad=return_grad,
        inplace=inplace,
    )  # fmt: skip
    return loss if grad is None else (loss, grad)


def kl_divergence_backward(
    grad_loss: Any,
    student_logits: Array,
    teacher_logits: Array,
    *,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    targets: Array | None = None,
    token_weights: Array | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    inplace: bool = False,
) -> Array:
    """Gradient of :func:`kl_divergence`: `(q - p) / T * grad_loss / normalizer`, times T^2 with
    `scale_by_temperature_squared`.

    Args:
        grad_loss: gradient of the loss: a number or float32 0-d array ([rows] for "none").
        inplace: overwrite the student's logits.
        Other arguments: as in the forward.

    Returns:
        `grad_student_logits`, shape and dtype of `student_logits`.

    Raises:
        ArrayError, ConfigError: as :func:`kl_divergence`.

    `kl_divergence(..., return_grad=True)` gives loss and gradient at the cost of this call.
    """
    options = LossOptions(
        "forward_kl", 0.0, temperature, scale_by_temperature_squared, 1.0, 0.0,
        logit_scale, softcap, teacher_logit_scale, teacher_softcap,
    )  # fmt: skip
    rows = RowOptions(
        targets, token_weights, ignore_index, vocab_size, reduction, normalizer, grad_loss
    )
    return evaluate(
        "kl_divergence_backward", student_logits, teacher_logits, options, rows, return_grad=True,
        inplace=inplace, return_loss=False,
    )[1]  # fmt: skip


def _specs(device: Device) -> list[KernelSpec]:
    kinds = ((False, False, False), (True, False, False), (True, False, True))
    rows = divergence_specs(device, "forward_kl", kinds)
    return [*rows, count_spec("int32"), total_spec()]


register(
    name="kl_divergence",
    family="distill",
    function=kl_divergence,
    reference=reference.kl_divergence,
    specs=_specs,
)
register(
    name="kl_divergence_backward",
    family="distill",
    function=kl_divergence_backward,
    reference=reference.kl_divergence_backward,
    specs=_specs,
)
