"""Matrix products.

An op is read in three steps: its module checks the arguments, `*_plan` chooses tiles (pure,
printable, no GPU needed), and `*_launch` prepares the kernel's arguments. Small ops do all three
in one module. The 8-bit products share `plan_8bit` and `launch_8bit`. Modules that begin with an
underscore are helpers.
"""

from cukit.gemm._matmul_decision import MatmulPlan, forget_decisions
from cukit.gemm.adaptive import adaptive_depth, adaptive_depth_backward, create_adaptive_depth_mask
from cukit.gemm.block_sparse import (
    BlockPattern,
    BlockSparseMatrix,
    bsr_from_mask,
    create_sparse_mask,
)
from cukit.gemm.bsr import bsr_matmul
from cukit.gemm.depth_routing import (
    depth_combine,
    depth_combine_backward,
    depth_gather,
    depth_router,
    depth_router_backward,
)
from cukit.gemm.fp8 import matmul_fp8
from cukit.gemm.gemv import gemv
from cukit.gemm.grouped import grouped_gated_linear, grouped_gemm, grouped_gemm_backward
from cukit.gemm.grouped_fp8 import grouped_gemm_fp8
from cukit.gemm.int8 import matmul_int8
from cukit.gemm.linear import gated_linear, linear
from cukit.gemm.linear_backward import gated_linear_backward, linear_backward
from cukit.gemm.matmul import explain_matmul, matmul, tune_matmul
from cukit.gemm.tma import matmul_tma
from cukit.gemm.tree import tree_matmul
from cukit.gemm.weight_only import quantized_linear
from cukit.gemm.weight_only_layout import PackedWeight, pack_weight

__all__ = [
    "BlockPattern",
    "BlockSparseMatrix",
    "MatmulPlan",
    "PackedWeight",
    "adaptive_depth",
    "adaptive_depth_backward",
    "bsr_from_mask",
    "bsr_matmul",
    "create_adaptive_depth_mask",
    "create_sparse_mask",
    "depth_combine",
    "depth_combine_backward",
    "depth_gather",
    "depth_router",
    "depth_router_backward",
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
