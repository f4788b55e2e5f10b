"""Matrix products."""

from cukit.gemm.dense import matmul

__all__ = ["matmul"]
