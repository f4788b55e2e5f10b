"""Matrix products."""

from cukit.gemm.dense import matmul
from cukit.gemm.tma import matmul_tma

__all__ = ["matmul", "matmul_tma"]
