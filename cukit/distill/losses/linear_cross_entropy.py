"""Cross-entropy fused with the language-model head."""

from __future__ import annotations

from typing import Any

from cukit.core.arrays import KERNEL_DTYPES, Array, check_array, runs_kernel
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch
from cukit.distill.losses._cross_entropy_rows import OPTIONS, cross_entropy_specs, prepare_rows
from cukit.distill.losses._linear_loss import (
    Head,
    HeadOptions,
    LinearLossConfig,
    RowLaunch,
    evaluate_head,
)
from cukit.distill.losses._loss_options import RowOptions, common_vocabulary
from cukit.distill.losses._row_loss import SHARDED_ROWS, count_spec, total_spec
from cukit.reference import losses as reference
from cukit.reference.losses import LinearCrossEntropyResult
from cukit.registry import register

__all__ = ["LinearCrossEntropyResult", "linear_cross_entropy"]

_OP = "linear_cross_entropy"


def linear_cross_entropy(
    hidden: Array,
    weight: Array,
    targets: Array,
    *,
    bias: Array | None = None,
    token_weights: Array | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    grad_loss: Any = None,
    grad_weight: Array | None = None,
    grad_bias: Array | None = None,
    chunk_tokens: int | None = None,
    workspace_bytes: int | None = None,
) -> LinearCrossEntropyResult:
    """Cross-entropy of the logits `hidden @ weight^T + bias`, with gradients; the full
    logits are never stored.

    Args:
        hidden: float32|float16|bfloat16 [..., hidden_size], C-contiguous; leading axes index rows.
        weight: dtype of `hidden`, [vocab_size, hidden_size].
        targets: int32|int64 [...]. Rows whose target is `ignore_index` have zero loss and gradient.
        token_weights, logit_scale, softcap, reduction, normalizer: as in :func:`cross_entropy`.
        Other arguments: as in :func:`linear_distillation_loss`.

    Returns:
        :class:`LinearCrossEntropyResult`: `loss` (float32, 0-d; [rows] for "none"), `grad_hidden`
        like `hidden`, `grad_weight`, and `grad_bias` (float32) where there is a bias.

    Raises:
        ArrayError, ConfigError: as :func:`linear_distillation_loss`.

    Memory besides the results: one chunk of logits. Rounding, streams and determinism as
    :func:`linear_distillation_loss`.

    >>> import numpy as np, cukit as ck
    >>> eye = np.eye(2, dtype=np.float32)
    >>> round(float(ck.linear_cross_entropy(eye, eye, np.array([0, 1])).loss), 4)
    0.3133
    """
    head = Head(hidden, weight, bias).adopt(_OP)
    head_options = HeadOptions(grad_weight, grad_bias, chunk_tokens, workspace_bytes).adopt(_OP)
    rows = RowOptions(
        targets, token_weights, ignore_index, vocab_size, reduction, normalizer, grad_loss
    ).adopt(_OP)
    options = OPTIONS._replace(logit_scale=logit_scale, softcap=softcap)
    options = options.check(_OP, rows.targets)
    on_gpu = runs_kernel(_OP, *head, *head_options.arrays, *rows.arrays)
    head.check(_OP, "", None)
    columns = common_vocabulary(_OP, vocab_size, weight=head.weight.shape[0])
    rows.check(_OP, head.hidden.shape[:-1], columns, required=True)
    head_options.check(_OP, head)
    if not on_gpu:
        given = {**rows._asdict(), **head_options._asdict(), "bias": head.bias}
        given |= {"logit_scale": logit_scale, "softcap": softcap}
        return reference.linear_cross_entropy(head.hidden, head.weight, **given)
    check_array(_OP, "hidden", head.hidden, dtypes=KERNEL_DTYPES)

    def row_launch(config: LinearLossConfig) -> RowLaunch:
        def launch(chunk: slice, logits: Array) -> tuple[Launch, tuple[Array]]:
            of_rows = rows.part(chunk)
            return prepare_rows(logits, *of_rows, options.transforms, ignore_index), (logits,)

        return launch

    losses, gradients = evaluate_head(
        _OP, head, columns, rows, options, head_options, row_launch, soft=False
    )
    return LinearCrossEntropyResult(
        losses.loss,
        gradients.grad_hidden.reshape(head.hidden.shape),
        gradients.grad_weight,
        gradients.grad_bias,
    )


def _specs(device: Device) -> list[KernelSpec]:
    rows = cross_entropy_specs(device, ((True, False), (True, True)))
    for phase in (1, 3):  # vocabularies that are sharded over processes
        rows += cross_entropy_specs(device, ((phase == 3, False),), SHARDED_ROWS, phase)
    return [*rows, count_spec("int32"), total_spec()]


register(
    name=_OP,
    family="distill",
    function=linear_cross_entropy,
    reference=reference.linear_cross_entropy,
    specs=_specs,
)
