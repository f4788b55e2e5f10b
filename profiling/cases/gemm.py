"""Cases of `cukit.gemm`.

`matmul` is cuBLAS on both sides: what shows is what we add around it. `matmul_tma` is a kernel of
ours beside cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from cukit.gemm import matmul, matmul_tma
from cukit.reference import gemm as reference
from profiling.arms import forward_arms
from profiling.case import Case, Workload, itemsize
from profiling.data import normal


def cases(small: bool = False) -> list[Case]:
    """Square products, and a linear layer of few tokens with its weight as [out, in]."""
    if small:
        return [
            matmul_case(48, 32, 64, "bfloat16"),
            matmul_case(48, 32, 64, "bfloat16", matmul_tma),
        ]
    return [
        matmul_case(4096, 4096, 4096, "bfloat16"),
        matmul_case(128, 16384, 4096, "bfloat16"),
        *(matmul_case(size, size, size, "bfloat16", matmul_tma) for size in (2048, 4096, 8192)),
    ]


def matmul_case(m: int, n: int, k: int, dtype: str, function: Callable[..., Any] = matmul) -> Case:
    """a [m, k] times the transpose of b [n, k]."""

    transposed = {"transpose_b": True} if function is matmul else {}

    def torch_matmul(torch: ModuleType) -> Callable[..., Any]:
        return lambda a, b: torch.matmul(a, b.T)

    def build() -> Workload:
        a, b = normal((m, k), dtype), normal((n, k), dtype, scale=k**-0.5)
        return Workload(
            arms=forward_arms(partial(function, a, b, **transposed), torch_matmul, a, b),
            expected=partial(reference.matmul, a, b, transpose_b=True),
        )

    return Case(
        family="gemm",
        op=function.__name__,
        name=f"{m}x{n}x{k}",
        dtype=dtype,
        build=build,
        flops=2 * m * n * k,
        bytes=(m * k + n * k + m * n) * itemsize(dtype),
    )
