"""Checks of tensors that autograd does not make."""

from __future__ import annotations

import torch

from cukit.errors import ConfigError


def refuse_gradient(op: str, reason: str, **tensors: torch.Tensor | None) -> None:
    """Raises ConfigError if a tensor requires grad for which the op computes no gradient."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ConfigError(f"{op}: {name} requires grad, but {reason}")
