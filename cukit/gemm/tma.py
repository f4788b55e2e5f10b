"""A matrix product on Hopper's copy engine and tensor cores, without a vendor library."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from cukit.core.arrays import (
    FLOAT_DTYPES,
    Array,
    adopt,
    bfloat16,
    check_array,
    check_same_dtype,
    empty,
    float16,
    runs_kernel,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.support import Support
from cukit.core.tensor_map import encode_tensor_map
from cukit.errors import ArrayShapeError
from cukit.reference import gemm as reference
from cukit.registry import register

_DTYPES = (float16, bfloat16)
_ARCH = "sm_90"
_TILE_M = _TILE_N = 128
_TILE_K = 64
_OUT_BOX = (64, 64)
_THREADS = 384
_STRIDE_ELEMENTS = 8  # strides of a tensor map are multiples of 16 bytes


def matmul_tma(a: Array, b: Array, *, out: Array | None = None) -> Array:
    """`out = a b^T`, as a linear layer multiplies: both operands contiguous along k.

    The kernel is written out (kernels_cu/gemm/matmul_tma_sm90.cu): a producer warp, a ring of tiles
    filled by TMA, two warpgroups of wgmma. It exists on Hopper (sm_90) only; other devices run the
    reference.

    Args:
        a: float16|bfloat16 [m, k], C-contiguous; float32|float64 on the CPU only.
        b: dtype of `a`, [n, k]. On the GPU k and n are multiples of 8.
        out: where to write; dtype of `a`, [m, n]. It must not overlap the operands.

    Returns:
        `out`, [m, n], dtype of `a`.

    Raises:
        ArrayError: dtype, shape or layout of an argument.

    Encodes three tensor maps a call on the host. Runs on CuPy's current stream, accumulates in
    float32, is deterministic.

    >>> import numpy as np, cukit as ck
    >>> ck.matmul_tma(np.ones((2, 8), np.float16), np.ones((3, 8), np.float16)).shape
    (2, 3)
    """
    a, b, out = adopt("matmul_tma", a, b, out)
    if not runs_kernel("matmul_tma", a, b, out):
        _check(a, b, out)
        return reference.matmul(a, b, transpose_b=True, out=out)
    launch = _prepare(a, b, out)
    if out is None:
        out = empty(a, (a.shape[0], b.shape[0]))
    if out.size:
        launch(
            encode_tensor_map(a, (_TILE_M, _TILE_K)),
            encode_tensor_map(b, (_TILE_N, _TILE_K)),
            encode_tensor_map(out, _OUT_BOX),
        )
    return out


@dataclass(frozen=True)
class MatmulTmaConfig:
    """Depth of the ring, and the grid."""

    dtype: str
    stages: int
    grid: tuple[int, int]

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        defines = (("DTYPE", self.dtype), ("STAGES", self.stages), ("THREADS", _THREADS))
        shared_bytes = 2 * (self.stages * (_TILE_M + _TILE_N) * _TILE_K + _TILE_M * _TILE_N)
        return KernelSpec(
            "gemm/matmul_tma_sm90.cu", "matmul_tma_sm90", defines, _THREADS, shared_bytes
        )


@cache
def plan_matmul_tma(m: int, n: int, dtype: str) -> MatmulTmaConfig:
    """Four steps in flight hide the memory's latency and leave room for the result."""
    return MatmulTmaConfig(dtype, stages=4, grid=(-(-n // _TILE_N), -(-m // _TILE_M)))


@launch_plan
def _prepare(a: Array, b: Array, out: Array | None) -> Launch:
    _check(a, b, out)
    check_array("matmul_tma", "a", a, dtypes=_DTYPES)
    (m, k), n = a.shape, b.shape[0]
    if k == 0 or k % _STRIDE_ELEMENTS or n % _STRIDE_ELEMENTS:
        raise ArrayShapeError(
            f"matmul_tma: k and n must be multiples of {_STRIDE_ELEMENTS} on the GPU, k not 0, "
            f"got k = {k}, n = {n}"
        )
    config = plan_matmul_tma(m, n, a.dtype.name)
    return Launch(load_kernel(config.spec()), config.grid, (np.int32(-(-k // _TILE_K)),))


def _check(a: Array, b: Array, out: Array | None) -> None:
    check_array("matmul_tma", "a", a, dtypes=FLOAT_DTYPES, ndim=2)
    check_array("matmul_tma", "b", b, shape=(None, a.shape[1]))
    if out is not None:
        check_array("matmul_tma", "out", out, shape=(a.shape[0], b.shape[0]))
    check_same_dtype("matmul_tma", a=a, b=b, out=out)


def _specs(device: Device) -> list[KernelSpec]:
    if device.arch != _ARCH:
        return []
    return [plan_matmul_tma(4096, 4096, dtype.name).spec() for dtype in _DTYPES]


register(
    name="matmul_tma",
    family="gemm",
    function=matmul_tma,
    reference=reference.matmul,
    specs=_specs,
    support=Support(_ARCH, _ARCH),
)
