"""Matrix products."""

from cukit.gemm.block_sparse import (
    BlockPattern,
    BlockSparseMatrix,
    bsr_from_mask,
    create_sparse_mask,
)
from cukit.gemm.bsr import bsr_matmul
from cukit.gemm.dense import matmul
from cukit.gemm.tma import matmul_tma
from cukit.gemm.tree import tree_matmul

__all__ = [
    "BlockPattern",
    "BlockSparseMatrix",
    "bsr_from_mask",
    "bsr_matmul",
    "create_sparse_mask",
    "matmul",
    "matmul_tma",
    "tree_matmul",
]
