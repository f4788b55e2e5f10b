"""Matrix products."""

from cukit.gemm.dense import matmul
from cukit.gemm.tma import matmul_tma
from cukit.gemm.weight_only import quantized_linear
from cukit.gemm.weight_only_layout import PackedWeight, pack_weight

__all__ = ["PackedWeight", "matmul", "matmul_tma", "pack_weight", "quantized_linear"]
