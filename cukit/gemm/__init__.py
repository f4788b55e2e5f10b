"""Matrix products."""

from cukit.gemm.dense import matmul
from cukit.gemm.grouped import grouped_gated_linear, grouped_gemm, grouped_gemm_backward
from cukit.gemm.tma import matmul_tma

__all__ = [
    "grouped_gated_linear",
    "grouped_gemm",
    "grouped_gemm_backward",
    "matmul",
    "matmul_tma",
]
