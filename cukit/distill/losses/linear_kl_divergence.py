"""Forward KL divergence fused with the heads of teacher and student."""

from __future__ import annotations

from typing import Any

from cukit.core.arrays import Array
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec
from cukit.distill.losses._linear_loss import Head, HeadOptions
from cukit.distill.losses._loss_options import LossOptions, RowOptions
from cukit.distill.losses.linear_distillation_loss import evaluate, specs_of
from cukit.reference import losses as reference
from cukit.reference.losses import LinearKlResult
from cukit.registry import register

_OP = "linear_kl_divergence"


def linear_kl_divergence(
    hidden: Array,
    weight: Array,
    teacher_hidden: Array,
    teacher_weight: Array,
    *,
    bias: Array | None = None,
    teacher_bias: Array | None = None,
    targets: Array | None = None,
    token_weights: Array | None = None,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    grad_loss: Any = None,
    grad_weight: Array | None = None,
    grad_bias: Array | None = None,
    chunk_tokens: int | None = None,
    workspace_bytes: int | None = None,
) -> LinearKlResult:
    """:func:`linear_distillation_loss` with the forward KL divergence, KL(teacher || student).

    Args:
        hidden, weight, teacher_hidden, teacher_weight: the student's and the teacher's last hidden
            states and heads.
        Other arguments: as in :func:`linear_distillation_loss`.

    Returns:
        :class:`LinearKlResult`, as :func:`linear_distillation_loss`.

    Raises:
        ArrayError, ConfigError: as :func:`linear_distillation_loss`.

    >>> import numpy as np, cukit as ck
    >>> hidden, weight = np.eye(2, dtype=np.float32), np.eye(2, dtype=np.float32)
    >>> result = ck.linear_kl_divergence(hidden, weight, hidden, 2 * weight)
    >>> round(float(result.loss), 4), result.grad_weight.shape
    (0.0671, (2, 2))
    """
    options = LossOptions(
        "forward_kl", 0.0, temperature, scale_by_temperature_squared, soft_weight, hard_weight,
        logit_scale, softcap, teacher_logit_scale, teacher_softcap,
    )  # fmt: skip
    return evaluate(
        _OP,
        Head(hidden, weight, bias),
        Head(teacher_hidden, teacher_weight, teacher_bias),
        options,
        RowOptions(
            targets, token_weights, ignore_index, vocab_size, reduction, normalizer, grad_loss
        ),
        HeadOptions(grad_weight, grad_bias, chunk_tokens, workspace_bytes),
    )


def _specs(device: Device) -> list[KernelSpec]:
    return specs_of(device, "forward_kl")


register(
    name=_OP,
    family="distill",
    function=linear_kl_divergence,
    reference=reference.linear_kl_divergence,
    specs=_specs,
)
