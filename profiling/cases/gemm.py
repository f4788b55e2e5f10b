"""Cases of `cukit.gemm`.

`matmul` calls cuBLAS on both sides, so the case measures overhead. `linear` and related ops are
cukit's kernels; the peers are cuBLAS with a separate activation kernel, torch.compile, and
cuBLASLt's fused epilogue where it exists.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from cukit.gemm import (
    gated_linear,
    gated_linear_backward,
    linear,
    linear_backward,
    matmul,
    matmul_tma,
)
from cukit.reference import gemm as reference
from profiling import peers
from profiling.case import Case, Workload, itemsize
from profiling.data import normal
from profiling.standard_impls import backward_impls, forward_impls

Extents = tuple[int, int, int]

LLAMA_1B = ((2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048))
LLAMA_8B = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
"""(k, n) of the linear layers of a transformer block: joint q, k and v; output; joint gate and up;
down."""
TOKENS = (1, 16, 64, 128, 256, 512, 1024, 4096, 8192)

FUSED = ((128, 16384, 4096), (128, 11008, 4096), (4096, 16384, 4096), (4096, 8192, 8192))
GATED = ((16, 14336, 4096), (128, 14336, 4096), (4096, 14336, 4096), (4096, 8192, 2048))


def cases(small: bool = False) -> list[Case]:
    """Square products, the linear layers of a 1B and an 8B Llama, fused epilogues, gradients."""
    if small:
        return [
            matmul_case((48, 32, 64)),
            matmul_case((48, 32, 64), matmul_tma),
            linear_case((48, 32, 64), "gelu_tanh"),
            gated_case((48, 32, 64)),
            backward_case((48, 32, 64), "gelu"),
            gated_backward_case((48, 32, 64)),
        ]
    return [
        matmul_case((4096, 4096, 4096)),
        matmul_case((128, 16384, 4096)),
        *(matmul_case((size, size, size), matmul_tma) for size in (2048, 4096, 8192)),
        *(linear_case((m, n, k)) for k, n in (*LLAMA_1B, *LLAMA_8B) for m in TOKENS),
        *(linear_case(mnk, activation) for mnk in FUSED for activation in ("gelu_tanh", "silu")),
        *(gated_case(mnk) for mnk in GATED),
        backward_case((4096, 4096, 4096), None),
        backward_case((4096, 16384, 4096), "gelu_tanh"),
        gated_backward_case((4096, 8192, 2048)),
    ]


def torch_activation(torch: ModuleType, name: str | None) -> Callable[..., Any]:
    """PyTorch's function for the activation `name` of `linear`."""
    functional = torch.nn.functional
    known: dict[str | None, Callable[..., Any]] = {
        None: lambda z: z,
        "relu": functional.relu,
        "gelu": functional.gelu,
        "gelu_tanh": partial(functional.gelu, approximate="tanh"),
        "silu": functional.silu,
    }
    return known[name]


def _case(op: str, name: str, extents: Extents, build: Callable[[], Workload], **work: Any) -> Case:
    """work: `products`, the number of products of these extents; `of_x`, `of_w`, `of_y`, the
    numbers of arrays [m, k], [n, k] and [m, n] that are read or written."""
    m, n, k = extents
    elements = work["of_x"] * m * k + work["of_w"] * n * k + work["of_y"] * m * n
    return Case(
        family="gemm",
        op=op,
        name=name,
        dtype="bfloat16",
        build=build,
        flops=2 * m * n * k * work["products"],
        bytes=elements * itemsize("bfloat16"),
    )


def _operands(extents: Extents, rows: int = 1) -> tuple[Any, Any]:
    m, n, k = extents
    return normal((m, k), "bfloat16"), normal((rows * n, k), "bfloat16", scale=k**-0.5)


def _name(extents: Extents, activation: str | None = None) -> str:
    return "x".join(map(str, extents)) + (f" {activation}" if activation else "")


def matmul_case(extents: Extents, function: Callable[..., Any] = matmul) -> Case:
    """a [m, k] times the transpose of b [n, k]."""
    transposed = {"transpose_b": True} if function is matmul else {}

    def torch_matmul(torch: ModuleType) -> Callable[..., Any]:
        return lambda a, b: torch.matmul(a, b.T)

    def build() -> Workload:
        a, b = _operands(extents)
        return Workload(
            impls=forward_impls(partial(function, a, b, **transposed), torch_matmul, a, b),
            expected=partial(reference.matmul, a, b, transpose_b=True),
        )

    name = _name(extents)
    return _case(function.__name__, name, extents, build, products=1, of_x=1, of_w=1, of_y=1)


def linear_case(extents: Extents, activation: str | None = None) -> Case:
    """A linear layer of m tokens; with an activation, also with a bias."""

    def torch_linear(torch: ModuleType) -> Callable[..., Any]:
        function = torch_activation(torch, activation)
        return lambda x, w, bias=None: function(torch.nn.functional.linear(x, w, bias))

    def cublas_lt(torch: ModuleType) -> Callable[..., Any]:
        fused = torch.ops.aten._addmm_activation
        return lambda x, w, bias: fused(bias, x, w.T, use_gelu=True)

    def build() -> Workload:
        x, w = _operands(extents)
        arrays = (x, w) if activation is None else (x, w, normal((extents[1],), "bfloat16"))
        bias = arrays[2] if len(arrays) == 3 else None
        impls = forward_impls(partial(linear, x, w, bias, activation), torch_linear, *arrays)
        if activation == "gelu_tanh":
            impls["cublaslt"] = lambda: peers.forward(cublas_lt(peers.torch()), *arrays)
        return Workload(impls=impls, expected=partial(reference.linear, x, w, bias, activation))

    name = _name(extents, activation)
    return _case("linear", name, extents, build, products=1, of_x=1, of_w=1, of_y=1)


def torch_swiglu(torch: ModuleType) -> Callable[..., Any]:
    functional = torch.nn.functional

    def function(x: Any, w: Any) -> Any:
        gate, up = functional.linear(x, w).chunk(2, dim=-1)
        return functional.silu(gate) * up

    return function


def gated_case(extents: Extents) -> Case:
    """SwiGLU of m tokens: both projections and the product of their results."""

    def build() -> Workload:
        x, w = _operands(extents, rows=2)
        return Workload(
            impls=forward_impls(partial(gated_linear, x, w), torch_swiglu, x, w),
            expected=partial(reference.gated_linear, x, w),
        )

    name = _name(extents, "silu")
    return _case("gated_linear", name, extents, build, products=2, of_x=1, of_w=2, of_y=1)


def backward_case(extents: Extents, activation: str | None) -> Case:
    """Gradients of a linear layer and its bias, from the stored pre-activation."""

    def torch_linear(torch: ModuleType) -> Callable[..., Any]:
        function = torch_activation(torch, activation)
        return lambda x, w, bias: function(torch.nn.functional.linear(x, w, bias))

    def build() -> Workload:
        m, n, _ = extents
        x, w = _operands(extents)
        bias, grad_out = normal((n,), "bfloat16"), normal((m, n), "bfloat16")
        z = None
        if activation is not None:
            _, z = linear(x, w, bias, activation, return_preactivation=True)
        ours = partial(linear_backward, grad_out, x, w, z, activation, with_bias=True)
        return Workload(
            impls=backward_impls(ours, torch_linear, (x, w, bias), grad_out),
            expected=partial(
                reference.linear_backward, grad_out, x, w, z, activation, with_bias=True
            ),
        )

    name = _name(extents, activation)
    of_y = 1 if activation is None else 2  # the gradient and the pre-activation
    return _case("linear_backward", name, extents, build, products=2, of_x=2, of_w=2, of_y=of_y)


def gated_backward_case(extents: Extents) -> Case:
    """Gradients of SwiGLU, from the stored pre-activation."""

    def build() -> Workload:
        m, n, _ = extents
        x, w = _operands(extents, rows=2)
        grad_out = normal((m, n), "bfloat16")
        _, z = gated_linear(x, w, return_preactivation=True)
        return Workload(
            impls=backward_impls(
                partial(gated_linear_backward, grad_out, x, w, z), torch_swiglu, (x, w), grad_out
            ),
            expected=partial(reference.gated_linear_backward, grad_out, x, w, z),
        )

    name = _name(extents, "silu")
    return _case("gated_linear_backward", name, extents, build, products=4, of_x=2, of_w=4, of_y=3)
