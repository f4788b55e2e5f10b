"""Cases of `gemv`: few tokens with weights [out, in] and [in, out]; few outputs."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

from cukit.gemm import gemv, matmul
from cukit.reference import gemm as reference
from profiling import peers
from profiling.case import Case, Workload, itemsize
from profiling.data import normal


def cases(small: bool = False) -> list[Case]:
    """One, eight and sixteen tokens at the widths of 8B and 70B models; four outputs."""
    if small:
        return [gemv_case(3, 72, 64, transpose) for transpose in (False, True)]
    return [
        *(
            gemv_case(tokens, n, k, transpose_b)
            for n, k in ((4096, 4096), (8192, 8192), (28672, 8192))
            for tokens in (1, 8, 16)
            for transpose_b in (True, False)
        ),
        gemv_case(1, 1024, 8192, True),
        gemv_case(8192, 4, 8192, False),
    ]


def gemv_case(m: int, n: int, k: int, transpose_b: bool, dtype: str = "bfloat16") -> Case:
    """a [m, k] times b [k, n], or the transpose of b [n, k]."""

    def torch_matmul(torch: ModuleType) -> Any:
        return (lambda a, b: torch.matmul(a, b.T)) if transpose_b else torch.matmul

    def build() -> Workload:
        a = normal((m, k), dtype)
        b = normal((n, k) if transpose_b else (k, n), dtype, scale=k**-0.5)
        return Workload(
            impls={
                "cukit": lambda: partial(gemv, a, b, transpose_b=transpose_b),
                "cublas": lambda: partial(matmul, a, b, transpose_b=transpose_b),
                "torch-eager": lambda: peers.forward(torch_matmul(peers.torch()), a, b),
            },
            expected=partial(reference.matmul, a, b, transpose_b=transpose_b),
        )

    return Case(
        family="gemm",
        op="gemv",
        name=f"{m}x{n}x{k} b {'[n, k]' if transpose_b else '[k, n]'}",
        dtype=dtype,
        build=build,
        bytes=(m * k + n * k + m * n) * itemsize(dtype),
    )
