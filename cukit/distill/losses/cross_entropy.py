"""Cross-entropy on logits, with its gradient from the same launch."""

from __future__ import annotations

from typing import Any

from cukit.core.arrays import (
    FLOAT_DTYPES,
    KERNEL_DTYPES,
    Array,
    adopt,
    check_array,
    runs_kernel,
    write_out,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan
from cukit.core.scalars import check_flag
from cukit.distill.losses._cross_entropy_rows import OPTIONS, cross_entropy_specs, plan_launch
from cukit.distill.losses._loss_options import LossOptions, RowOptions, common_vocabulary
from cukit.distill.losses._row_loss import count_spec, empty_gradient, evaluate_rows, total_spec
from cukit.reference import losses as reference
from cukit.registry import register


def cross_entropy(
    logits: Array,
    targets: Array,
    *,
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
    """Cross-entropy of rows of logits: `loss = log sum_v exp z_v - z_target`.

    Args:
        logits: float32|float16|bfloat16 [..., vocab_size], C-contiguous. float64 on the CPU only.
        targets: int32|int64 [...]. Rows whose target is `ignore_index` have zero loss and gradient,
            as do rows whose logits are all -inf.
        ignore_index: target of the rows to ignore.
        token_weights: float32 [...], 0 or more: the weight of each row's loss.
        vocab_size: number of leading columns in use; the others are padding: their values are
            ignored, their gradient is zero.
        logit_scale, softcap: for given logits x, the loss uses `softcap * tanh(logit_scale * x /
            softcap)`, or `logit_scale * x` without a softcap; both above 0. The gradient is with
            respect to x.
        reduction: "mean", the sum over rows divided by the sum of their weights (without weights,
            by the number of rows that are not ignored); "tokens", the sum divided by that number
            even with weights; "sum"; or "none".
        normalizer: replaces the divisor of "mean" and "tokens": a number or a float32 0-d array,
            such as the token count of all batches that a step accumulates, on all GPUs.
        return_grad: also return the gradient with respect to `logits`.
        grad_loss: gradient of the loss: a number or float32 0-d array ([rows] for "none").
        inplace: overwrite `logits` with the gradient.

    Returns:
        The loss, float32 0-d ([rows] for "none"); with `return_grad`, `(loss, grad_logits)`.

    Raises:
        ArrayError: dtype, shape, layout or device; a target outside the vocabulary, on the CPU. On
            the GPU such a target makes its row's loss and gradient NaN.
        ConfigError: an option outside its range.

    Rows that fit in the shared memory of a block or cluster are read from device memory once.
    Runs on CuPy's current stream without synchronising, accumulates in float32 and is
    deterministic.

    >>> import numpy as np, cukit as ck
    >>> logits = np.log(np.array([[0.25, 0.75]], np.float32))
    >>> round(float(ck.cross_entropy(logits, np.array([1]))), 4)
    0.2877
    """
    options = OPTIONS._replace(logit_scale=logit_scale, softcap=softcap)
    rows = RowOptions(
        targets, token_weights, ignore_index, vocab_size, reduction, normalizer, grad_loss
    )
    loss, grad = _evaluate("cross_entropy", logits, options, rows, return_grad, inplace)
    return loss if grad is None else (loss, grad)


def cross_entropy_backward(
    grad_loss: Any,
    logits: Array,
    targets: Array,
    *,
    token_weights: Array | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    reduction: str = "mean",
    normalizer: Any = None,
    inplace: bool = False,
) -> Array:
    """Gradient of :func:`cross_entropy`: `(softmax(z) - onehot(target)) * grad_loss / normalizer`.

    Args:
        grad_loss: gradient of the loss: a number or float32 0-d array ([rows] for "none").
        inplace: overwrite `logits`.
        Other arguments: as in the forward.

    Returns:
        `grad_logits`, shape and dtype of `logits`.

    Raises:
        ArrayError, ConfigError: as :func:`cross_entropy`.

    `cross_entropy(..., return_grad=True)` gives loss and gradient at the cost of this call.
    """
    options = OPTIONS._replace(logit_scale=logit_scale, softcap=softcap)
    rows = RowOptions(
        targets, token_weights, ignore_index, vocab_size, reduction, normalizer, grad_loss
    )
    return _evaluate(
        "cross_entropy_backward", logits, options, rows, True, inplace, return_loss=False
    )[1]


def _evaluate(
    op: str,
    logits: Array,
    options: LossOptions,
    rows: RowOptions,
    return_grad: bool,
    inplace: bool,
    *,
    return_loss: bool = True,
) -> tuple[Array, Array | None]:
    (logits,) = adopt(op, logits)
    check_flag(op, "return_grad", return_grad)
    check_flag(op, "inplace", inplace)
    rows = rows.adopt(op)
    options = options.check(op, rows.targets)
    if not runs_kernel(op, logits, *rows.arrays):
        _check(op, logits, rows)
        given = {**rows._asdict(), "softcap": options.softcap, "return_grad": return_grad}
        result = reference.cross_entropy(logits, logit_scale=options.logit_scale, **given)
        if not return_grad:
            return result, None
        loss, grad = result
        return loss, write_out(logits, grad) if inplace else grad
    grad = empty_gradient(op, "logits", logits, inplace) if return_grad else None
    _, grad_loss = rows.upstream()
    launch = _prepare(
        op, logits, rows.targets, rows.token_weights, grad, grad_loss, options.transforms,
        rows.ignore_index, rows.vocab_size, rows.reduction,
    )  # fmt: skip
    losses = evaluate_rows(
        launch, (logits,), options, rows, grad, soft=False, return_loss=return_loss
    )
    return None if losses is None else losses.loss, grad


@launch_plan
def _prepare(
    op: str,
    logits: Array,
    targets: Array,
    token_weights: Array | None,
    grad: Array | None,
    grad_loss: Array | None,
    transform: bool,
    ignore_index: int,
    vocab_size: int | None,
    reduction: str,
) -> Launch:
    rows = RowOptions(
        targets, token_weights, ignore_index, vocab_size, reduction, grad_loss=grad_loss
    )
    columns = _check(op, logits, rows)
    check_array(op, "logits", logits, dtypes=KERNEL_DTYPES)
    return plan_launch(logits, grad, grad_loss, rows, transform, columns, logits.shape[-1])


def _check(op: str, logits: Array, rows: RowOptions) -> int:
    """Checks the arrays; returns the number of columns in use."""
    check_array(op, "logits", logits, dtypes=FLOAT_DTYPES, min_ndim=1)
    columns = common_vocabulary(op, rows.vocab_size, logits=logits.shape[-1])
    rows.check(op, logits.shape[:-1], columns, required=True)
    return columns


def _specs(device: Device) -> list[KernelSpec]:
    rows = cross_entropy_specs(device, ((False, False), (True, False), (True, True)))
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
