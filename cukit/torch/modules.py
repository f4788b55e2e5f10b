"""Modules with the parameters and state dicts of their torch counterparts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cukit.errors import ConfigError
from cukit.torch import functional


class RMSNorm(nn.Module):
    """`y = x / sqrt(mean(x^2) + eps) * weight` over the last axis.

    hidden: extent of that axis. eps: added to the mean square.
    offset: added to the weight; Gemma stores norm weights minus 1.
    """

    def __init__(
        self, hidden: int, eps: float = 1e-6, *, offset: float = 0.0, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((hidden,), 1.0 - offset, device=device, dtype=dtype))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """[..., hidden] -> `y`, or with a residual `(y, x + residual)` from the same kernel."""
        weight = self.weight + self.offset if self.offset else self.weight
        return functional.rms_norm(x, weight, self.eps, residual)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(nn.Module):
    """`y = (x - mean) / sqrt(var + eps) * weight + bias` over the last axis.

    hidden: extent of that axis. eps: added to the variance. bias: whether there is a bias.
    """

    def __init__(
        self, hidden: int, eps: float = 1e-5, *, bias: bool = True, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros_like(self.weight)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same shape."""
        return functional.layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class FlashAttention(nn.Module):
    """Attention over `[batch, seq, heads, head_dim]` with fixed options, without parameters.

    causal, window_size, softcap, scale: as in :func:`cukit.torch.flash_attention`.
    """

    def __init__(
        self, *, causal: bool = False, window_size: functional.Window | None = None,
        softcap: float | None = None, scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.causal, self.window_size = causal, window_size
        self.softcap, self.scale = softcap, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """options: the other arguments of :func:`cukit.torch.flash_attention`, such as lengths."""
        return functional.flash_attention(
            q, k, v,
            causal=self.causal, window_size=self.window_size, softcap=self.softcap,
            scale=self.scale, **options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"causal={self.causal}, window_size={self.window_size}, softcap={self.softcap}"


class LinearActivation(nn.Linear):
    """`activation(x weight^T + bias)` in one kernel, with the parameters of nn.Linear.

    activation: "relu", "gelu", "gelu_tanh", "silu" or None.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *,
        activation: str | None = None, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return functional.linear(x, self.weight, self.bias, self.activation)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{super().extra_repr()}, activation={self.activation}"


class LinearGELU(LinearActivation):
    """`gelu(x weight^T + bias)`. approximate: "none" or "tanh"."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *,
        approximate: str = "none", device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if approximate not in ("none", "tanh"):
            raise ConfigError(
                f"LinearGELU: approximate must be 'none' or 'tanh', got {approximate!r}"
            )
        activation = "gelu" if approximate == "none" else "gelu_tanh"
        options: dict[str, Any] = {"activation": activation, "device": device, "dtype": dtype}
        super().__init__(in_features, out_features, bias, **options)


class LinearSiLU(LinearActivation):
    """`silu(x weight^T + bias)`."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        options: dict[str, Any] = {"activation": "silu", "device": device, "dtype": dtype}
        super().__init__(in_features, out_features, bias, **options)


class SwiGLU(nn.Module):
    """`down(act(gate(x)) * up(x))`, gate and up in one kernel.

    Submodules are named gate_proj, up_proj and down_proj, as in Llama's checkpoints.
    activation: "silu", "gelu", "gelu_tanh" or "relu".
    """

    def __init__(
        self, hidden: int, intermediate: int, *, activation: str = "silu", device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        options: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(hidden, intermediate, **options)
        self.up_proj = nn.Linear(hidden, intermediate, **options)
        self.down_proj = nn.Linear(intermediate, hidden, **options)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        gate, up, down = self.gate_proj.weight, self.up_proj.weight, self.down_proj
        if type(down) is nn.Linear:
            return functional.gated_mlp(x, gate, up, down.weight, self.activation)
        return down(functional.gated_linear(x, gate, up, self.activation))
