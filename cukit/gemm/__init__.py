"""Matrix products."""

from cukit.gemm.decision import MatmulPlan, forget_decisions
from cukit.gemm.gemv import gemv
from cukit.gemm.matmul import explain_matmul, matmul, tune_matmul
from cukit.gemm.tma import matmul_tma

__all__ = [
    "MatmulPlan",
    "explain_matmul",
    "forget_decisions",
    "gemv",
    "matmul",
    "matmul_tma",
    "tune_matmul",
]
