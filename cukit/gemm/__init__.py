"""Matrix products.

A large op has three modules: the one with its name checks the arguments, `_*_plan` chooses tiles
(pure functions, which need no GPU), and `_*_launch` prepares the kernel's arguments. Small ops do
all three in one module. `matmul_fp8` and `matmul_int8` share `_matmul_8bit_plan` and
`_matmul_8bit_launch`.
Modules that begin with an underscore are helpers of this package.
"""

from cukit.gemm.dense.gemv import gemv
from cukit.gemm.dense.linear import gated_linear, linear
from cukit.gemm.dense.linear_backward import gated_linear_backward, linear_backward
from cukit.gemm.dense.tma import matmul_tma
from cukit.gemm.dense.tree import tree_matmul
from cukit.gemm.dispatch._matmul_decision import MatmulPlan, forget_decisions
from cukit.gemm.dispatch.matmul import explain_matmul, matmul, tune_matmul
from cukit.gemm.grouped.grouped import grouped_gated_linear, grouped_gemm, grouped_gemm_backward
from cukit.gemm.grouped.grouped_fp8 import grouped_gemm_fp8
from cukit.gemm.quantized.fp8 import matmul_fp8
from cukit.gemm.quantized.int8 import matmul_int8
from cukit.gemm.quantized.weight_only import quantized_linear
from cukit.gemm.quantized.weight_only_layout import PackedWeight, pack_weight
from cukit.gemm.sparse.block_sparse import (
    BlockPattern,
    BlockSparseMatrix,
    bsr_from_mask,
    create_sparse_mask,
)
from cukit.gemm.sparse.bsr import bsr_matmul

__all__ = [
    "BlockPattern",
    "BlockSparseMatrix",
    "MatmulPlan",
    "PackedWeight",
    "bsr_from_mask",
    "bsr_matmul",
    "create_sparse_mask",
    "explain_matmul",
    "forget_decisions",
    "gated_linear",
    "gated_linear_backward",
    "gemv",
    "grouped_gated_linear",
    "grouped_gemm",
    "grouped_gemm_backward",
    "grouped_gemm_fp8",
    "linear",
    "linear_backward",
    "matmul",
    "matmul_fp8",
    "matmul_int8",
    "matmul_tma",
    "pack_weight",
    "quantized_linear",
    "tree_matmul",
    "tune_matmul",
]
