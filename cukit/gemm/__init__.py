"""Matrix products."""

from cukit.gemm.dense import matmul
from cukit.gemm.fp8 import matmul_fp8
from cukit.gemm.grouped import grouped_gated_linear, grouped_gemm, grouped_gemm_backward
from cukit.gemm.int8 import matmul_int8
from cukit.gemm.tma import matmul_tma

__all__ = [
    "grouped_gated_linear",
    "grouped_gemm",
    "grouped_gemm_backward",
    "matmul",
    "matmul_fp8",
    "matmul_int8",
    "matmul_tma",
]
