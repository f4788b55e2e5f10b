"""Cross-entropy on logits, with its gradient from the same launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
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
from cukit.core.compiler import MacroValue
from cukit.core.device import Device, current_device
from cukit.core.kernel import NULL, KernelSpec, Launch, launch_plan, load_kernel
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

    Each row is read from device memory once. Runs on CuPy's current stream without synchronising,
    accumulates in float32, is deterministic.

    >>> import numpy as np, cukit as ck
    >>> logits = np.log(np.array([[0.25, 0.75]], np.float32))
    >>> float(ck.cross_entropy(logits, np.array([1])).round(4))
    0.2877
    """
    logits, targets = adopt("cross_entropy", logits, targets)
    normalizer, grad_loss = adopt_scalars("cross_entropy", normalizer, grad_loss)
    check_options("cross_entropy", reduction, normalizer)
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
    check_options("cross_entropy_backward", reduction, normalizer)
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


@dataclass(frozen=True)
class CrossEntropyConfig:
    """One way to run the kernel over rows of one vocabulary."""

    dtype: str
    index_dtype: str
    grad: bool
    split: VocabularySplit

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        defines: tuple[tuple[str, MacroValue], ...] = (
            ("DTYPE", self.dtype),
            ("ID", self.index_dtype),
            *self.split.defines(),
            ("GRAD", self.grad),
        )
        return KernelSpec(
            "distill/cross_entropy.cu",
            "cross_entropy",
            defines,
            self.split.threads,
            self.split.shared_bytes,
        )


@cache
def plan_cross_entropy(
    vocab_size: int,
    dtype: str,
    itemsize: int,
    index_dtype: str,
    vec: int,
    grad: bool,
    device: Device,
    **choice: Any,
) -> CrossEntropyConfig:
    """The loss alone takes one sweep over the row, the gradient a second one.

    choice: `cluster`, `cached`, `threads` of :func:`split_vocabulary`, to try others.
    """
    sweeps = 2 if grad else 1
    split = split_vocabulary(vocab_size, itemsize, vec, 1, sweeps, device, **choice)
    return CrossEntropyConfig(dtype, index_dtype, grad, split)


@launch_plan
def prepare_rows(
    op: str,
    logits: Array,
    targets: Array,
    grad: Array | None,
    grad_loss: Array | None,
    ignore_index: int,
    reduction: str,
) -> Launch:
    """The checked launch over the rows of `logits`, for :func:`launch_rows`."""
    _check(op, logits, targets, grad_loss, ignore_index, reduction)
    check_array(op, "logits", logits, dtypes=KERNEL_DTYPES)
    vocab_size = logits.shape[-1]
    config = plan_cross_entropy(
        vocab_size,
        logits.dtype.name,
        logits.itemsize,
        targets.dtype.name,
        row_access_width(logits, grad),
        grad is not None,
        current_device(),
    )
    stride = 1 if grad_loss is not None and grad_loss.ndim else 0
    grid = (math.prod(logits.shape[:-1]) * config.split.cluster,)
    scalars = (np.int64(ignore_index), np.int32(vocab_size), np.int32(stride))
    return Launch(load_kernel(config.spec()), grid, scalars)


def launch_rows(
    launch: Launch,
    logits: Array,
    targets: Array,
    row_losses: Array,
    grad: Array | None,
    grad_loss: Array | None,
    normalizer: Array | None,
    factor: float,
) -> None:
    """Writes `row_losses` [rows], and to `grad` the rows' gradients times
    `factor * grad_loss / normalizer`."""
    launch.kernel(
        launch.grid,
        (
            logits,
            targets,
            row_losses,
            NULL if grad is None else grad,
            NULL if grad_loss is None else grad_loss,
            NULL if normalizer is None else normalizer,
            *launch.scalars,
            np.float32(factor),
        ),
    )


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
    launch = prepare_rows(op, logits, targets, grad, grad_loss, ignore_index, reduction)
    divisor, count = normalizer_of(targets, targets.size, ignore_index, reduction, normalizer)
    rows = empty(logits, (targets.size,), np.float32)
    factor /= divisor
    launch_rows(launch, logits, targets, rows, grad, grad_loss, count, factor)
    return rows, divisor, count


def _check(
    op: str, logits: Array, targets: Array, grad_loss: Any, ignore_index: int, reduction: str
) -> None:
    check_array(op, "logits", logits, dtypes=FLOAT_DTYPES)
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
