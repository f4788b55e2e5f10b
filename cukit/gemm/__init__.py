"""Matrix products."""

from cukit.gemm.dense import matmul
from cukit.gemm.gemv import gemv
from cukit.gemm.tma import matmul_tma

__all__ = ["gemv", "matmul", "matmul_tma"]
