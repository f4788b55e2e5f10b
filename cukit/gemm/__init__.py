"""Matrix products."""

from cukit.gemm.adaptive import (
    adaptive_depth,
    adaptive_depth_backward,
    create_adaptive_depth_mask,
)
from cukit.gemm.block_sparse import (
    BlockPattern,
    BlockSparseMatrix,
    bsr_from_mask,
    create_sparse_mask,
)
from cukit.gemm.bsr import bsr_matmul
from cukit.gemm.dense import matmul
from cukit.gemm.depth_routing import (
    depth_combine,
    depth_combine_backward,
    depth_gather,
    depth_router,
    depth_router_backward,
)
from cukit.gemm.linear import gated_linear, linear
from cukit.gemm.linear_backward import gated_linear_backward, linear_backward
from cukit.gemm.tma import matmul_tma
from cukit.gemm.tree import tree_matmul

__all__ = [
    "BlockPattern",
    "BlockSparseMatrix",
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
    "gated_linear",
    "gated_linear_backward",
    "linear",
    "linear_backward",
    "matmul",
    "matmul_tma",
    "tree_matmul",
]
