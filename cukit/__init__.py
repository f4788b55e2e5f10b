"""cukit: CUDA kernels as plain source strings, with a NumPy-like surface.

>>> import cukit as ck
>>> x = ck.ones((2, 8))          # on the GPU where there is one, else on the CPU
>>> ck.rms_norm(x, ck.ones(8)).shape
(2, 8)
"""

from typing import Any

from cukit.array_api import (
    NarrowArray,
    NarrowDtype,
    QuantizedArray,
    arange,
    asarray,
    default_device,
    empty,
    empty_like,
    float8_e4m3,
    float8_e5m2,
    full,
    full_like,
    int4,
    int8,
    linspace,
    ones,
    ones_like,
    to_numpy,
    xp_namespace,
    zeros,
    zeros_like,
)
from cukit.attention import (
    block_sparse_attention,
    flash_attention,
    flash_attention_backward,
)
from cukit.distill import (
    adamw,
    cross_entropy,
    cross_entropy_backward,
    global_norm,
    kl_divergence,
    kl_divergence_backward,
    linear_cross_entropy,
    linear_kl_divergence,
)
from cukit.emulator import (
    activate_from_environment,
    backend,
)
from cukit.errors import (
    ArrayDtypeError,
    ArrayError,
    ArrayLayoutError,
    ArrayShapeError,
    CacheError,
    CompileError,
    ConfigError,
    CukitError,
    DataError,
    EmulatorError,
    LaunchError,
    MissingDependencyError,
    OutOfMemoryError,
    PointerError,
    UnsupportedDeviceError,
)
from cukit.gemm import (
    MatmulPlan,
    explain_matmul,
    gemv,
    matmul,
    matmul_tma,
    tune_matmul,
)
from cukit.layers import (
    embedding,
    embedding_backward,
    gelu,
    gelu_and_mul,
    gelu_and_mul_backward,
    gelu_backward,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
    rope,
    rope_backward,
    silu_and_mul,
    silu_and_mul_backward,
)
from cukit.memory import (
    DeviceBuffer,
    MemoryPool,
    MemoryPoolConfig,
    batched_copy,
    memory_pool_allocate,
    memory_pool_free,
)
from cukit.quantization import (
    QuantizationReport,
    dequantize,
    load_quantized,
    quantization_report,
    quantize,
    save_quantized,
)
from cukit.registry import (
    get_kernel,
    register_kernel,
)

__version__ = "0.1.0"

__all__ = [
    "ArrayDtypeError",
    "ArrayError",
    "ArrayLayoutError",
    "ArrayShapeError",
    "CacheError",
    "CompileError",
    "ConfigError",
    "CukitError",
    "DataError",
    "DeviceBuffer",
    "EmulatorError",
    "LaunchError",
    "MatmulPlan",
    "MemoryPool",
    "MemoryPoolConfig",
    "MissingDependencyError",
    "NarrowArray",
    "NarrowDtype",
    "OutOfMemoryError",
    "PointerError",
    "QuantizationReport",
    "QuantizedArray",
    "UnsupportedDeviceError",
    "__version__",
    "adamw",
    "arange",
    "asarray",
    "backend",
    "batched_copy",
    "block_sparse_attention",
    "cross_entropy",
    "cross_entropy_backward",
    "default_device",
    "dequantize",
    "embedding",
    "embedding_backward",
    "empty",
    "empty_like",
    "explain_matmul",
    "flash_attention",
    "flash_attention_backward",
    "float8_e4m3",
    "float8_e5m2",
    "full",
    "full_like",
    "gelu",
    "gelu_and_mul",
    "gelu_and_mul_backward",
    "gelu_backward",
    "gemv",
    "get_kernel",
    "global_norm",
    "int4",
    "int8",
    "kl_divergence",
    "kl_divergence_backward",
    "layer_norm",
    "layer_norm_backward",
    "linear_cross_entropy",
    "linear_kl_divergence",
    "linspace",
    "load_quantized",
    "matmul",
    "matmul_tma",
    "memory_pool_allocate",
    "memory_pool_free",
    "ones",
    "ones_like",
    "quantization_report",
    "quantize",
    "register_kernel",
    "rms_norm",
    "rms_norm_backward",
    "rope",
    "rope_backward",
    "save_quantized",
    "silu_and_mul",
    "silu_and_mul_backward",
    "to_numpy",
    "tune_matmul",
    "xp",
    "xp_namespace",
    "zeros",
    "zeros_like",
]

activate_from_environment()


def __getattr__(name: str) -> Any:
    # Which namespace `xp` is depends on the machine and on CUKIT_DEVICE: looked up when used.
    if name == "xp":
        return xp_namespace()
    raise AttributeError(f"module 'cukit' has no attribute {name!r}")
