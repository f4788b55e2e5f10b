"""Cross-entropy on logits, with its gradient from the same launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    adopt,
    check_array,
    empty,
    runs_kernel,
    write_out,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan
from cukit.distill._cross_entropy_rows import launch_rows, plan_cross_entropy, plan_launch
from cukit.distill._row_loss import (
    REPRESENTATIVE_ROWS,
    adopt_scalars,
    arrays_among,
    check_grad_loss,
    check_options,
    check_targets,
    count_spec,
    normalizer_of,
    total_loss,
    total_spec,
    upstream,
)
from cukit.reference import losses as reference
from cukit.registry import register


def cross_entropy(
    logits: Array,
    targets: Array,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: Any = None,
    return_grad: bool = False,
    grad_loss: Any = None,
    inplace: bool = False,
) -> Array | tuple[Array, Array]:
    """Cross-entropy of rows of logits: `loss = log sum_v exp z_v - z_target`.

    Args:
        logits: float32|float16|bfloat16 [..., vocab_size], C-contiguous. float64 on the CPU only.
        targets: int32|int64 [...]. Rows whose target is `ignore_index` have zero loss and gradient,
            as have rows without any mass (every logit -inf).
        ignore_index: the target that says so.
        reduction: "mean" over the rows that are not ignored, "sum", or "none".
        normalizer: what "mean" divides by instead: a number or a float32 0-d array, such as the
            number of tokens in all batches that a step accumulates.
        return_grad: also return the gradient for the logits.
        grad_loss: upstream gradient for that: a number or float32 0-d array ([rows] for "none").
        inplace: let the gradient overwrite the logits.

    Returns:
        The loss, float32 0-d ([rows] for "none"); with `return_grad`, `(loss, grad_logits)`.

    Raises:
        ArrayError: dtype, shape, layout or device; a target outside the vocabulary, on the CPU. On
            the GPU such a target makes its row's loss and gradient NaN.
        ConfigError: reduction or normalizer.

    Rows are read from device memory once where they fit the shared memory of a block or cluster.
    Runs on CuPy's current stream without synchronising, accumulates in float32, is deterministic.

    >>> import numpy as np, cukit as ck
    >>> logits = np.log(np.array([[0.25, 0.75]], np.float32))
    >>> round(float(ck.cross_entropy(logits, np.array([1]))), 4)
    0.2877
    """
    logits, targets = adopt("cross_entropy", logits, targets)
    normalizer, grad_loss = adopt_scalars("cross_entropy", normalizer, grad_loss)
    check_options(
        "cross_entropy",
        reduction,
        normalizer,
        ignore_index,
        return_grad=return_grad,
        inplace=inplace,
    )
    arrays = (logits, targets, *arrays_among(normalizer, grad_loss))
    if not runs_kernel("cross_entropy", *arrays):
        _check("cross_entropy", logits, targets, grad_loss, ignore_index, reduction)
        result = reference.cross_entropy(
            logits,
            targets,
            ignore_index=ignore_index,
            reduction=reduction,
            normalizer=normalizer,
            return_grad=return_grad,
            grad_loss=grad_loss,
        )
        return (result[0], write_out(logits, result[1])) if inplace and return_grad else result
    grad = None
    if return_grad:
        grad = logits if inplace else empty(logits, logits.shape)
    rows, divisor, count = _launch(
        "cross_entropy", logits, targets, grad, grad_loss, ignore_index, reduction, normalizer
    )
    loss = rows if reduction == "none" else total_loss(None, rows, divisor, count)[0]
    return loss if grad is None else (loss, grad)


def cross_entropy_backward(
    grad_loss: Any,
    logits: Array,
    targets: Array,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: Any = None,
    inplace: bool = False,
) -> Array:
    """Gradient of :func:`cross_entropy`: `(softmax(z) - onehot(target)) * grad_loss / normalizer`.

    Args:
        grad_loss: gradient of the loss: a number or float32 0-d array ([rows] for "none").
        logits, targets, ignore_index, reduction, normalizer: as in the forward.
        inplace: overwrite the logits.

    Returns:
        `grad_logits`, shape and dtype of `logits`.

    Raises:
        ArrayError, ConfigError: as :func:`cross_entropy`.

    `cross_entropy(..., return_grad=True)` gives loss and gradient for the price of this.
    """
    logits, targets = adopt("cross_entropy_backward", logits, targets)
    normalizer, grad_loss = adopt_scalars("cross_entropy_backward", normalizer, grad_loss)
    check_options("cross_entropy_backward", reduction, normalizer, ignore_index, inplace=inplace)
    arrays = (logits, targets, *arrays_among(normalizer, grad_loss))
    if not runs_kernel("cross_entropy_backward", *arrays):
        _check("cross_entropy_backward", logits, targets, grad_loss, ignore_index, reduction)
        return reference.cross_entropy_backward(
            grad_loss,
            logits,
            targets,
            ignore_index=ignore_index,
            reduction=reduction,
            normalizer=normalizer,
            inplace=inplace,
        )
    grad = logits if inplace else empty(logits, logits.shape)
    _launch(
        "cross_entropy_backward",
        logits,
        targets,
        grad,
        grad_loss,
        ignore_index,
        reduction,
        normalizer,
    )
    return grad


@launch_plan
def _prepare(
    op: str,
    logits: Array,
    targets: Array,
    grad: Array | None,
    grad_loss: Array | None,
    ignore_index: int,
    reduction: str,
) -> Launch:
    _check(op, logits, targets, grad_loss, ignore_index, reduction)
    check_array(op, "logits", logits, dtypes=KERNEL_DTYPES)
    return plan_launch(logits, targets, grad, grad_loss, ignore_index, logits.shape[-1])


def _launch(
    op: str,
    logits: Array,
    targets: Array,
    grad: Array | None,
    grad_loss: Any,
    ignore_index: int,
    reduction: str,
    normalizer: Any,
) -> tuple[Array, float, Array | None]:
    """Losses of the rows, and what their sum is divided by."""
    factor, grad_loss = upstream(grad_loss)
    launch = _prepare(op, logits, targets, grad, grad_loss, ignore_index, reduction)
    divisor, count = normalizer_of(targets, targets.size, ignore_index, reduction, normalizer)
    rows = empty(logits, (targets.size,), np.float32)
    factor /= divisor
    launch_rows(launch, logits, targets, rows, grad, grad_loss, count, factor)
    return rows, divisor, count


def _check(
    op: str, logits: Array, targets: Array, grad_loss: Any, ignore_index: int, reduction: str
) -> None:
    check_array(op, "logits", logits, dtypes=FLOAT_DTYPES, least_ndim=1)
    check_targets(op, targets, logits.shape[:-1], logits.shape[-1], ignore_index)
    check_grad_loss(op, grad_loss, reduction, logits.shape[:-1])


def _specs(device: Device) -> list[KernelSpec]:
    rows = [
        plan_cross_entropy(
            vocab_size, dtype.name, dtype.itemsize, "int32", 16 // dtype.itemsize, grad, device
        ).spec()
        for dtype, vocab_size in REPRESENTATIVE_ROWS
        for grad in (False, True)
    ]
    return [*rows, count_spec("int32"), total_spec()]


register(
    name="cross_entropy",
    family="distill",
    function=cross_entropy,
    reference=reference.cross_entropy,
    specs=_specs,
)
register(
    name="cross_entropy_backward",
    family="distill",
    function=cross_entropy_backward,
    reference=reference.cross_entropy_backward,
    specs=_specs,
)
