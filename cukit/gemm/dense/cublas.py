"""Calls into cuBLAS: row-major matrix products on CuPy's current stream."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from cukit.core.arrays import Array, HostArray, bfloat16, float16, float32, float64
from cukit.core.device import INSTALL_GPU_EXTRA
from cukit.errors import ConfigError, MissingDependencyError

# cudaDataType_t, cublasComputeType_t, cublasGemmAlgo_t and cublasMath_t of the CUDA headers.
_DATA_TYPES = {float32: 0, float64: 1, float16: 2, bfloat16: 14}
_COMPUTE_32F = 68
_COMPUTE_64F = 70
_COMPUTE_32F_FAST_TF32 = 77
_DEFAULT_ALGORITHM = -1
# Without this flag, cuBLAS may add the partial sums of a split-k product in 16 bits.
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16


class Matrix(NamedTuple):
    """The layout of a row-major matrix: element (i, j) is at offset `i * leading + j`."""

    rows: int
    columns: int
    leading: int
    transposed: bool = False


@functools.cache
def _library() -> Any:
    try:
        from cupy_backends.cuda.libs import cublas
    except ImportError as error:
        raise MissingDependencyError(
            f"matrix products need cuBLAS ({error}): {INSTALL_GPU_EXTRA}"
        ) from error
    return cublas


@functools.cache
def _handle_getter() -> Any:
    from cupy.cuda.device import get_cublas_handle

    return get_cublas_handle


@functools.lru_cache(maxsize=64)
def _coefficient(value: float, wide: bool) -> tuple[int, HostArray]:
    """The host address of a scalar, and the array that owns it, kept alive by the cache."""
    scalar = np.array(value, np.float64 if wide else np.float32)
    return scalar.ctypes.data, scalar


def gemm(
    a: Array,
    b: Array,
    out: Array,
    layouts: tuple[Matrix, Matrix, Matrix],
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    tf32: bool = False,
) -> None:
    """out = alpha * op(a) @ op(b) + beta * out, accumulated in float32 (float64 for float64).

    layouts: of `a`, `b` and `out`, which must match and not overlap; nothing is checked here.
    tf32: round float32 operands to TF32; otherwise they are multiplied in full precision.
    """
    if type(out) is np.ndarray:
        _gemm_on_host(a, b, out, layouts, alpha, beta)
        return
    left, right, target = layouts
    wide = a.dtype == float64
    compute = _COMPUTE_64F if wide else _COMPUTE_32F_FAST_TF32 if tf32 else _COMPUTE_32F
    cublas = _library()
    handle = _handle_getter()()
    mode = cublas.getMathMode(handle)
    cublas.setMathMode(handle, _DISALLOW_REDUCED_PRECISION_REDUCTION)
    try:
        # cuBLAS reads matrices as column-major, i.e. transposed: out^T = op(b)^T op(a)^T.
        cublas.gemmEx(
            handle, int(right.transposed), int(left.transposed),
            target.columns, target.rows, left.rows if left.transposed else left.columns,
            _coefficient(alpha, wide)[0],
            b.data.ptr, _DATA_TYPES[b.dtype], right.leading,
            a.data.ptr, _DATA_TYPES[a.dtype], left.leading,
            _coefficient(beta, wide)[0],
            out.data.ptr, _DATA_TYPES[out.dtype], target.leading,
            compute, _DEFAULT_ALGORITHM,
        )  # fmt: skip
    except NotImplementedError as error:
        raise ConfigError(
            "cuBLAS products cannot be captured in a CUDA graph (a limitation of CuPy); `linear` "
            "and `gated_linear` can"
        ) from error
    finally:
        cublas.setMathMode(handle, mode)


def _gemm_on_host(
    a: HostArray,
    b: HostArray,
    out: HostArray,
    layouts: tuple[Matrix, Matrix, Matrix],
    alpha: float,
    beta: float,
) -> None:
    """:func:`gemm` on NumPy arrays, for ops that run in the emulator."""
    left, right, target = (
        _view(array, layout) for array, layout in zip((a, b, out), layouts, strict=True)
    )
    wide = float64 if a.dtype == float64 else float32
    product = alpha * (left.astype(wide) @ right.astype(wide))
    target[...] = product + beta * target.astype(wide) if beta else product


def _view(array: HostArray, layout: Matrix) -> HostArray:
    """The matrix that starts where `array` does."""
    strides = (layout.leading * array.itemsize, array.itemsize)
    matrix = np.lib.stride_tricks.as_strided(array, (layout.rows, layout.columns), strides)
    return matrix.T if layout.transposed else matrix
