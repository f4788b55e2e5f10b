"""Differentiable ops on torch tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cukit.errors import ConfigError
from cukit.torch import _operator_definitions as _operator_definitions
from cukit.torch._checks import refuse_gradient

Window = tuple[int | None, int | None]

_ops: Any = torch.ops.cukit


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`cukit.rms_norm` with gradients.

    Args:
        x: float32|float16|bfloat16 [..., hidden]; float64 on the CPU.
        weight: [hidden]; converted to the dtype of `x`.
        eps: added to the mean square.
        residual: dtype and shape of `x`; added to `x` before the norm.

    Returns:
        `y`, or with `residual` the pair `(y, x + residual)`.

    Raises:
        ArrayError, ConfigError: as :func:`cukit.rms_norm`.
    """
    weight = weight.to(x.dtype)
    if residual is None:
        return _ops.rms_norm(x, weight, eps)
    return _ops.add_rms_norm(x, residual, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """:func:`cukit.layer_norm` with gradients.

    Args:
        x: float32|float16|bfloat16 [..., hidden]; float64 on the CPU.
        weight, bias: [hidden]; converted to the dtype of `x`.
        eps: added to the variance.

    Returns:
        `y`, dtype and shape of `x`.

    Raises:
        ArrayError, ConfigError: as :func:`cukit.layer_norm`.
    """
    weight = weight.to(x.dtype)
    bias = torch.zeros_like(weight) if bias is None else bias.to(x.dtype)
    return _ops.layer_norm(x, weight, bias, eps)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`cukit.rope` with gradients for `q` and `k`.

    Args:
        q: [batch, seq_len, num_heads_q, head_dim], any strides with a contiguous last axis.
        k: [batch, seq_len, num_heads_k, head_dim], likewise.
        cos, sin: float32 [max_positions, rotary_dim / 2]; they get no gradient.
        position_ids: int32|int64 [batch, seq_len] or [seq_len].
        interleaved: whether adjacent elements form pairs.

    Returns:
        `(q_out, k_out)`, contiguous.

    Raises:
        ArrayError, ConfigError: as :func:`cukit.rope`; `cos` or `sin` requires grad.
    """
    refuse_gradient("rope", "the tables are constants", cos=cos, sin=sin)
    q_out, k_out = _ops.rope(q, k, cos, sin, position_ids, interleaved)
    return q_out, k_out


def silu_and_mul(x: Tensor) -> Tensor:
    """:func:`cukit.silu_and_mul` with gradients: [..., 2H] -> [..., H], SwiGLU's activation."""
    return _ops.silu_and_mul(x)


def gelu_and_mul(x: Tensor, *, approximate: str = "none") -> Tensor:
    """:func:`cukit.gelu_and_mul` with gradients: [..., 2H] -> [..., H], GeGLU's activation."""
    return _ops.gelu_and_mul(x, approximate)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """:func:`cukit.gelu` with gradients."""
    return _ops.gelu(x, approximate)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: Window | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    scale: float | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`cukit.flash_attention` with gradients for q, k, v and sinks.

    Args:
        q: float16|bfloat16 [batch, seq_len_q, num_heads_q, head_dim]; float32 and float64 on the
            CPU. A transposed view of [batch, heads, seq, head_dim] is read without a copy. Under
            autocast q, k and v are converted to its dtype.
        k, v: [batch, seq_len_kv, num_heads_kv, head_dim].
        deterministic: whether the backward is deterministic; None follows
            `torch.use_deterministic_algorithms`.
        return_lse: also return the log-sum-exp, which has no gradient.
        Other arguments: as in :func:`cukit.flash_attention`. alibi_slopes, bias and mask get no
            gradient.

    Returns:
        `out`, contiguous [batch, seq_len_q, num_heads_q, v's head_dim], or the pair `(out, lse)`.

    Raises:
        ArrayError, ConfigError: as :func:`cukit.flash_attention`; bias or alibi_slopes requires
            grad.
    """
    reason = "it gets no gradient; detach it"
    refuse_gradient("flash_attention", reason, bias=bias, alibi_slopes=alibi_slopes)
    if window_size is not None and len(window_size) != 2:
        raise ConfigError(f"flash_attention: window_size must be a pair, got {window_size!r}")
    q, k, v = autocast(q), autocast(k), autocast(v)
    left, right = (None, None) if window_size is None else window_size
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    out, lse = _ops.flash_attention(
        q, k, v,
        causal=causal, window_left=left, window_right=right, softcap=softcap, scale=scale,
        alibi_slopes=alibi_slopes, sinks=sinks, bias=bias, mask=mask,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
        max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv, deterministic=deterministic,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """:func:`cukit.linear` with gradients: `f(x weight^T + bias)` in one kernel.

    Args:
        x: float16|bfloat16 [..., k]; float32 and float64 on the CPU.
        weight: [n, k]; weight and bias are converted to the dtype of `x`; under autocast, all
            three to autocast's dtype.
        bias: [n].
        activation: None, "relu", "gelu", "gelu_tanh" or "silu".

    Returns:
        [..., n], dtype of `x` (under autocast, autocast's).

    Raises:
        ArrayError, ConfigError: as :func:`cukit.linear`.
    """
    x = autocast(x)
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    keep = activation is not None and _needs_gradient(x, weight, bias)
    return _ops.linear(x, weight, bias, activation, keep)[0]


def gated_linear(x: Tensor, gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """:func:`cukit.gated_linear` with gradients: `f(x gate^T) * (x up^T)` in one kernel.

    Args:
        x: float16|bfloat16 [..., k]; float32 and float64 on the CPU.
        gate, up: [n, k]; dtypes as for :func:`linear`.
        activation: of the gate: "silu", "gelu", "gelu_tanh" or "relu".

    Returns:
        [..., n], dtype of `x` (under autocast, autocast's).

    Raises:
        ArrayError, ConfigError: as :func:`cukit.gated_linear`.
    """
    x = autocast(x)
    gate, up = gate.to(x.dtype), up.to(x.dtype)
    keep = _needs_gradient(x, gate, up)
    return _ops.gated_linear(x, gate, up, activation, keep)[0]


def gated_mlp(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str = "silu"
) -> Tensor:
    """Llama's feed-forward layer, `(f(x gate^T) * (x up^T)) down^T`, with gradients.

    On Hopper one kernel of the backward computes `grad_out down` and, from it, the gradients of
    both inner products (:func:`cukit.gated_linear_backward` with `down`).

    Args:
        x: float16|bfloat16 [..., k]; float32 and float64 on the CPU.
        gate, up: [n, k]; down: [m, n]; dtypes as for :func:`linear`.
        activation: of the gate: "silu", "gelu", "gelu_tanh" or "relu".

    Returns:
        [..., m], dtype of `x` (under autocast, autocast's).

    Raises:
        ArrayError, ConfigError: as :func:`cukit.gated_linear`.
    """
    x = autocast(x)
    gate, up, down = gate.to(x.dtype), up.to(x.dtype), down.to(x.dtype)
    if _needs_gradient(x, gate, up, down):
        return _ops.gated_mlp(x, gate, up, down, activation)[0]
    return torch.nn.functional.linear(_ops.gated_linear(x, gate, up, activation)[0], down)


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )


def autocast(x: Tensor) -> Tensor:
    """`x`, converted to autocast's dtype if autocast is on for its device."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x
