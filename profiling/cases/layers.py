"""Cases of `cukit.layers`: memory-bound, so the bytes are the floor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from cukit.layers import rms_norm, rms_norm_backward
from cukit.reference import norms
from profiling import peers
from profiling.arms import backward_arms, forward_arms
from profiling.case import Case, Workload, itemsize
from profiling.data import normal

FAMILY = "layers"
EPS = 1e-6

Shape = tuple[int, int]
SHAPES: tuple[Shape, ...] = ((8192, 4096), (16384, 8192))
SMALL_SHAPES: tuple[Shape, ...] = ((24, 256),)


def cases(small: bool = False) -> list[Case]:
    """Every op of the family on [tokens, hidden], bfloat16."""
    makers = (rms_norm_case, rms_norm_residual_case, rms_norm_backward_case)
    shapes = SMALL_SHAPES if small else SHAPES
    return [maker(tokens, hidden, "bfloat16") for maker in makers for tokens, hidden in shapes]


def _torch_rms_norm(torch: ModuleType) -> Callable[..., Any]:
    functional = torch.nn.functional
    return lambda x, weight: functional.rms_norm(x, x.shape[-1:], weight, EPS)


def _torch_rms_norm_residual(torch: ModuleType) -> Callable[..., Any]:
    normalise = _torch_rms_norm(torch)

    def function(x: Any, weight: Any, residual: Any) -> Any:
        total = x + residual
        return normalise(total, weight), total

    return function


def _liger_rms_norm() -> Callable[..., Any]:
    function = peers.optional("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    # In place its backward would overwrite the gradient that the next sample reads.
    return lambda x, weight: function.apply(x, weight, EPS, 0.0, "llama", False)


def _liger_rms_norm_residual() -> Callable[..., Any]:
    function = peers.optional("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
    return lambda x, weight, residual: function.apply(x, residual, weight, EPS, 0.0, "llama", False)


def rms_norm_case(tokens: int, hidden: int, dtype: str) -> Case:
    """One tensor in, one out."""

    def build() -> Workload:
        x, weight = normal((tokens, hidden), dtype), normal((hidden,), dtype)
        return Workload(
            arms=forward_arms(
                partial(rms_norm, x, weight, EPS),
                _torch_rms_norm,
                x,
                weight,
                liger=_liger_rms_norm,
            ),
            expected=partial(norms.rms_norm, x, weight, EPS),
        )

    traffic = 2 * tokens * hidden * itemsize(dtype)
    return Case(FAMILY, "rms_norm", f"{tokens}x{hidden}", dtype, build, bytes=traffic)


def rms_norm_residual_case(tokens: int, hidden: int, dtype: str) -> Case:
    """Two tensors in (x, residual), two out (y, x + residual)."""

    def build() -> Workload:
        x, residual = normal((tokens, hidden), dtype), normal((tokens, hidden), dtype)
        weight = normal((hidden,), dtype)
        return Workload(
            arms=forward_arms(
                partial(rms_norm, x, weight, EPS, residual),
                _torch_rms_norm_residual,
                x,
                weight,
                residual,
                liger=_liger_rms_norm_residual,
            ),
            expected=partial(norms.rms_norm, x, weight, EPS, residual),
        )

    traffic = 4 * tokens * hidden * itemsize(dtype)
    return Case(FAMILY, "rms_norm", f"{tokens}x{hidden} residual", dtype, build, bytes=traffic)


def rms_norm_backward_case(tokens: int, hidden: int, dtype: str) -> Case:
    """Two tensors in (grad_out, x), one out, and the gradient of the weight."""

    def build() -> Workload:
        x, weight = normal((tokens, hidden), dtype), normal((hidden,), dtype)
        grad_out = normal((tokens, hidden), dtype)
        return Workload(
            arms=backward_arms(
                partial(rms_norm_backward, grad_out, x, weight, EPS),
                _torch_rms_norm,
                (x, weight),
                grad_out,
                liger=_liger_rms_norm,
            ),
            expected=partial(norms.rms_norm_backward, grad_out, x, weight, EPS),
        )

    traffic = 3 * tokens * hidden * itemsize(dtype)
    return Case(FAMILY, "rms_norm_backward", f"{tokens}x{hidden}", dtype, build, bytes=traffic)
