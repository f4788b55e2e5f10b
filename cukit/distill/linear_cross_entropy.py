"""Cross-entropy fused with the language-model head."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukit.core.arrays import KERNEL_DTYPES, Array, adopt, check_array, empty, runs_kernel
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec
from cukit.distill._cross_entropy_rows import launch_rows, plan_cross_entropy, prepare_rows
from cukit.distill._linear_loss import (
    HeadGradients,
    check_chunk_tokens,
    check_grad_weight,
    check_head,
    empty_logits,
    exact_boost,
    plan_linear_loss,
    project,
)
from cukit.distill._row_loss import (
    REPRESENTATIVE_ROWS,
    adopt_scalars,
    arrays_among,
    check_options,
    check_targets,
    count_spec,
    normalizer_of,
    total_loss,
    total_spec,
)
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
    ignore_index: int = -100,
    normalizer: Any = None,
    grad_weight: Array | None = None,
    chunk_tokens: int | None = None,
) -> LinearCrossEntropyResult:
    """Cross-entropy of the logits `hidden @ weight^T`, with its gradients, logits never stored.

    Args:
        hidden: float32|float16|bfloat16 [..., hidden_size], C-contiguous; rows = all but the last.
        weight: dtype of `hidden`, [vocab_size, hidden_size].
        targets: int32|int64 [...]. Rows equal to `ignore_index` have zero loss and gradient.
        ignore_index: the target that says so.
        normalizer: what the sum over rows is divided by, instead of the number of rows that are not
            ignored: a number or a float32 0-d array.
        grad_weight: dtype of `weight` or float32, shape of `weight`: added to, in place. Without it
            a new one is written.
        chunk_tokens: rows that go through the head at once; None lets the plan choose.

    Returns:
        :class:`LinearCrossEntropyResult`: `loss` (float32, 0-d), `grad_hidden` like `hidden`, and
        `grad_weight`.

    Raises:
        ArrayError, ConfigError: as :func:`linear_kl_divergence`.

    Memory beside results: one chunk of logits. Rounding, streams and determinism as
    :func:`linear_kl_divergence`.

    >>> import numpy as np, cukit as ck
    >>> eye = np.eye(2, dtype=np.float32)
    >>> round(float(ck.linear_cross_entropy(eye, eye, np.array([0, 1])).loss), 4)
    0.3133
    """
    hidden, weight, targets, grad_weight = adopt(_OP, hidden, weight, targets, grad_weight)
    (normalizer,) = adopt_scalars(_OP, normalizer)
    check_options(_OP, "mean", normalizer, ignore_index)
    check_chunk_tokens(_OP, chunk_tokens)
    on_gpu = runs_kernel(_OP, hidden, weight, targets, grad_weight, *arrays_among(normalizer))
    check_head(_OP, "", hidden, weight, None, None)
    check_targets(_OP, targets, hidden.shape[:-1], weight.shape[0], ignore_index)
    check_grad_weight(_OP, weight, grad_weight)
    if not on_gpu:
        return reference.linear_cross_entropy(
            hidden,
            weight,
            targets,
            ignore_index=ignore_index,
            normalizer=normalizer,
            grad_weight=grad_weight,
        )
    check_array(_OP, "hidden", hidden, dtypes=KERNEL_DTYPES)
    rows, classes = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    tokens = rows.shape[0]
    config = plan_linear_loss(tokens, rows.shape[1], chunk_tokens)
    divisor, count = normalizer_of(classes, tokens, ignore_index, "mean", normalizer)
    boost = exact_boost(rows.dtype, divisor, tokens, divisor_on_gpu=count is not None)

    gradients = HeadGradients(rows, weight, grad_weight, boost)
    logits = empty_logits(rows, config.chunk_tokens, weight.shape[0])
    losses = empty(rows, (tokens,), np.float32)
    for chunk in config.chunks():
        part, target_part = logits[: chunk.stop - chunk.start], classes[chunk]
        project(rows[chunk], weight, part)
        launch = prepare_rows(part, target_part, ignore_index)
        launch_rows(launch, part, target_part, losses[chunk], part, None, count, boost / divisor)
        gradients.add(chunk, part)
    return LinearCrossEntropyResult(
        total_loss(None, losses, divisor, count)[0],
        gradients.grad_hidden.reshape(hidden.shape),
        gradients.grad_weight,
    )


def _specs(device: Device) -> list[KernelSpec]:
    rows = [
        plan_cross_entropy(
            size, dtype.name, dtype.itemsize, "int32", 16 // dtype.itemsize, True, device
        ).spec()
        for dtype, size in REPRESENTATIVE_ROWS
    ]
    return [*rows, count_spec("int32"), total_spec()]


register(
    name=_OP,
    family="distill",
    function=linear_cross_entropy,
    reference=reference.linear_cross_entropy,
    specs=_specs,
)
