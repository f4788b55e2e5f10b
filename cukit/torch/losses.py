"""The losses of `cukit.distill` on tensors, with all options and autograd.

Losses on logits save their inputs and compute the gradient in the backward, in one launch that
includes the upstream gradient. Losses fused with a head compute the gradients together with the
loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cukit.torch._checks import refuse_gradient
from cukit.torch._operator_definitions import HEAD_LOSSES, LOSSES, NOT_OPTIONS, Loss

TEACHER = (
    "a teacher gets no gradient; run it under torch.no_grad(), freeze it with "
    "teacher.requires_grad_(False), or pass {name}.detach()"
)


def _public(loss: Loss) -> Callable[..., Any]:
    """The public function of a table row: name, arguments and options of the one on arrays."""
    operator = getattr(torch.ops.cukit, loss.name).default
    own = inspect.signature(loss.function)
    parameters = [each for each in own.parameters.values() if each.name not in NOT_OPTIONS]
    names = [each.name for each in parameters]
    teachers = [(each, names.index(each)) for each in loss.teachers]
    name = loss.name
    known = frozenset((*names, "return_parts"))
    parts = () if loss.result is None else ("loss", "soft_loss", "hard_loss")
    taken = tuple(
        index for index, each in enumerate(() if loss.result is None else loss.result._fields)
        if each in parts
    )  # fmt: skip

    def function(*args: Any, **options: Any) -> Any:
        for each in options:
            if each not in known:
                raise TypeError(f"{name}: no argument {each!r}; expected {', '.join(names)}")
        for each, index in teachers:
            value = args[index] if index < len(args) else options.get(each)
            refuse_gradient(name, TEACHER.format(name=each), **{each: value})
        return_parts = options.pop("return_parts", False)
        number = options.get("normalizer")
        if number is not None and not isinstance(number, Tensor):
            options["normalizer"] = as_scalar(number, args[0] if args else options[names[0]])
        found = operator(*args, **options)
        if not taken:
            return found
        if return_parts:
            return tuple([found[index] for index in taken])
        return found[0]

    function.__name__ = function.__qualname__ = name
    function.__module__ = __name__
    function.__dict__["__signature__"] = own.replace(
        parameters=parameters, return_annotation="Tensor"
    )
    gradients = " and ".join(
        f"`{each.removeprefix('grad_')}`"
        for each in (() if loss.result is None else loss.result._fields)
        if each.startswith("grad_")
    )
    function.__doc__ = (
        f":func:`cukit.{name}` on tensors, with gradients for {gradients or f'`{loss.student}`'}.\n"
        "\n    Arguments and options are those of that function, except options for gradients.\n"
        "    Returns the loss"
        + (
            "; with return_parts=True the losses `(" + ", ".join(parts[: len(taken)]) + ")`;\n"
            "    only the first has a gradient"
            if loss.result is not None
            else ""
        )
        + ".\n    Raises the same ArrayError and ConfigError"
        + (", and ConfigError for a teacher that requires grad" if teachers else "")
        + ".\n    "
    )
    return function


def as_scalar(value: float, like: Tensor) -> Tensor:
    """A number as a 0-d tensor for the operators, on the device of `like`, without a copy from the
    host that would synchronise."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.full((), float(value), dtype=dtype, device=like.device)


(
    cross_entropy,
    kl_divergence,
    distillation_loss,
    topk_distillation_loss,
    sampled_distillation_loss,
) = map(_public, LOSSES)
(
    linear_cross_entropy,
    linear_kl_divergence,
    linear_distillation_loss,
    linear_topk_distillation_loss,
    linear_sampled_distillation_loss,
) = map(_public, HEAD_LOSSES)


def teacher_top_k(
    teacher_logits: Tensor, k: int, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """:func:`cukit.teacher_top_k` on a tensor: `(log_probs, ids)`, both [..., k].

    Raises ArrayError and ConfigError as :func:`cukit.teacher_top_k`.
    """
    log_probs, ids = torch.ops.cukit.teacher_top_k(teacher_logits.detach(), k, temperature)
    return log_probs, ids
