"""Checks of tensors that autograd would let pass."""

from __future__ import annotations

import torch

from cukit.errors import ConfigError


def refuse_gradient(op: str, reason: str, **tensors: torch.Tensor | None) -> None:
    """Raises ConfigError where a tensor that gets no gradient requires one."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ConfigError(f"{op}: {name} requires grad, but {reason}")
