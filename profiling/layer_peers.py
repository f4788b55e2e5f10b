"""Peers of the ops of `cukit.layers`, as functions of tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from profiling import peers

EPS = 1e-6


def torch_rms_norm(torch: ModuleType) -> Callable[..., Any]:
    functional = torch.nn.functional
    return lambda x, weight: functional.rms_norm(x, x.shape[-1:], weight, EPS)


def torch_rms_norm_residual(torch: ModuleType) -> Callable[..., Any]:
    normalise = torch_rms_norm(torch)

    def function(x: Any, weight: Any, residual: Any) -> Any:
        total = x + residual
        return normalise(total, weight), total

    return function


def liger_rms_norm() -> Callable[..., Any]:
    function = peers.optional("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    # The last argument is in_place: True would overwrite grad_out, which the next sample reads.
    return lambda x, weight: function.apply(x, weight, EPS, 0.0, "llama", False)


def liger_rms_norm_residual() -> Callable[..., Any]:
    function = peers.optional("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
    return lambda x, weight, residual: function.apply(x, residual, weight, EPS, 0.0, "llama", False)


def torch_layer_norm(torch: ModuleType) -> Callable[..., Any]:
    functional = torch.nn.functional
    return lambda x, weight, bias: functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def liger_layer_norm() -> Callable[..., Any]:
    function = peers.optional("liger_kernel.ops.layer_norm").LigerLayerNormFunction
    return lambda x, weight, bias: function.apply(x, weight, bias, EPS)


def torch_silu_and_mul(torch: ModuleType) -> Callable[..., Any]:
    silu = torch.nn.functional.silu
    return lambda x: silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]


def torch_gelu_and_mul(torch: ModuleType) -> Callable[..., Any]:
    gelu = partial(torch.nn.functional.gelu, approximate="tanh")
    return lambda x: gelu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]


def torch_gelu(torch: ModuleType) -> Callable[..., Any]:
    return lambda x: torch.nn.functional.gelu(x)


def torch_rope(torch: ModuleType) -> Callable[..., Any]:
    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    def function(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        cos, sin = cos[:, None], sin[:, None]
        return rotate(q, cos, sin), rotate(k, cos, sin)

    return function


def torch_embedding(torch: ModuleType) -> Callable[..., Any]:
    return lambda weight, ids: torch.nn.functional.embedding(ids, weight)
