"""A matrix product on Hopper's TMA and tensor cores, without a vendor library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial

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
from cukit.core.device import Device, current_device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.map_cache import TensorMapCache
from cukit.core.parameters import parameter_structs
from cukit.core.support import Support
from cukit.core.tensor_map import encode_tensor_map
from cukit.errors import ArrayShapeError
from cukit.reference import gemm as reference
from cukit.registry import register

_PARAMETERS = parameter_structs("gemm/parameters.cuh")["GemmParameters"]
_DTYPES = (float16, bfloat16)
_ARCH = "sm_90"
_TILE_K = 64
_OUT_BOX = (64, 64)
_CONSUMERS = 2
_THREADS = 384
_ITEM_BYTES = 2
_STRIDE_ELEMENTS = 8  # strides of a tensor map are multiples of 16 bytes


def matmul_tma(a: Array, b: Array, *, out: Array | None = None) -> Array:
    """`out = a b^T`, as a linear layer multiplies: both operands contiguous along k.

    A persistent kernel (kernels_cu/gemm/matmul_tma_sm90.cu): a producer warpgroup loads tiles by
    TMA, two consumer warpgroups multiply them with wgmma. It exists on Hopper (sm_90) only; other
    devices run the reference.

    Args:
        a: float16|bfloat16 [m, k], C-contiguous; float32|float64 on the CPU only.
        b: dtype of `a`, [n, k]. On the GPU k and n are multiples of 8.
        out: where to write; dtype of `a`, [m, n]. It must not overlap the operands.

    Returns:
        `out`, [m, n], dtype of `a`.

    Raises:
        ArrayError: dtype, shape or layout of an argument.

    Runs on CuPy's current stream, accumulates in float32, is deterministic.

    >>> import numpy as np, cukit as ck
    >>> ck.matmul_tma(np.ones((2, 8), np.float16), np.ones((3, 8), np.float16)).shape
    (2, 3)
    """
    a, b, out = adopt("matmul_tma", a, b, out)
    if not runs_kernel("matmul_tma", a, b, out):
        _check(a, b, out)
        return reference.matmul(a, b, transpose_b=True, out=out)
    return prepare_matmul_tma(a, b, out)(a, b, out)


@dataclass(frozen=True)
class MatmulTiling:
    """How the kernel cuts the result into tiles."""

    tile_m: int
    tile_n: int
    num_stages: int
    cluster: int = 1
    """Blocks that share a tile of b: their tiles of the result lie one below the other."""
    cost: float = 1.0
    """Time of a product of one element, as a multiple of the first tiling's."""

    @property
    def shared_bytes(self) -> int:
        """The stages of a and b, and pieces of the result on their way to memory."""
        stages = self.num_stages * (self.tile_m + self.tile_n) * _TILE_K
        buffers = 2 if self.tile_n % 128 == 0 else 1
        return _ITEM_BYTES * (stages + _CONSUMERS * buffers * math.prod(_OUT_BOX))

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        """Tiles of a cluster along each axis of the result."""
        return -(-m // (self.tile_m * self.cluster)), -(-n // self.tile_n)


TILINGS = (
    MatmulTiling(128, 256, 4),
    MatmulTiling(256, 128, 4, cost=1.01),
    MatmulTiling(128, 192, 5, cost=1.08),
    MatmulTiling(128, 128, 6, cost=1.12),
    MatmulTiling(128, 64, 8, cost=1.85),
)
"""What plan_matmul_tma chooses from; costs were measured on an H200, with one tile for each SM."""

CLUSTER_TILING = MatmulTiling(128, 256, 4, cluster=2)
"""Half the loads of b, and never faster: the H200's L2 serves both blocks as quickly, and blocks
that wait for each other lose 0.5 % (profiling/notes/matmul_tma_sm90.md). Not planned."""


@dataclass(frozen=True)
class MatmulTmaConfig:
    """How one call runs."""

    dtype: str
    tiling: MatmulTiling
    num_blocks: int
    """Blocks of the persistent grid."""
    group: int
    """Rows of tiles, of clusters where there are any, that blocks walk over together."""

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        tiling = self.tiling
        defines = (
            ("DTYPE", self.dtype),
            ("TILE_M", tiling.tile_m),
            ("TILE_N", tiling.tile_n),
            ("STAGES", tiling.num_stages),
            ("CLUSTER", tiling.cluster),
            ("THREADS", _THREADS),
        )
        entry = "matmul_tma_sm90"
        return KernelSpec(f"gemm/{entry}.cu", entry, defines, _THREADS, tiling.shared_bytes)


@cache
def plan_matmul_tma(m: int, n: int, dtype: str, num_sms: int) -> MatmulTmaConfig:
    """The tiling that takes the least time: rounds of tiles times the cost of a tile.

    Groups are chosen so that the tiles in flight form about a square of the result, which reads
    the fewest rows of a and b.
    """

    def cost(tiling: MatmulTiling) -> float:
        tiles_m, tiles_n = tiling.tiles(m, n)
        rounds = -(-tiles_m * tiles_n // (num_sms // tiling.cluster))
        return rounds * tiling.tile_m * tiling.tile_n * tiling.cost

    tiling = min(TILINGS, key=cost)
    tiles_m, tiles_n = tiling.tiles(m, n)
    clusters = min(tiles_m * tiles_n, num_sms // tiling.cluster)
    rows = tiling.tile_m * tiling.cluster
    group = round((clusters * tiling.tile_n / rows) ** 0.5)
    return MatmulTmaConfig(dtype, tiling, clusters * tiling.cluster, max(1, min(group, tiles_m)))


class MappedMatmul:
    """A launch for arrays of one description, checked before."""

    __slots__ = ("_a", "_b", "_launch", "_out")

    def __init__(self, config: MatmulTmaConfig, m: int, n: int, k: int) -> None:
        tiling = config.tiling
        parameters = _PARAMETERS.pack(m=m, n=n, steps=-(-k // _TILE_K), group=config.group)
        self._launch = Launch(load_kernel(config.spec()), (config.num_blocks,), (parameters,))
        boxes = (tiling.tile_m, _TILE_K), (tiling.tile_n // tiling.cluster, _TILE_K), _OUT_BOX
        self._a, self._b, self._out = (
            TensorMapCache(partial(encode_tensor_map, box=box)) for box in boxes
        )

    def __call__(self, a: Array, b: Array, out: Array | None) -> Array:
        """Launches the kernel; `out` or a new array."""
        if out is None:
            out = empty(a, (a.shape[0], b.shape[0]))
        if out.size:
            self._launch(self._a(a), self._b(b), self._out(out))
        return out


@launch_plan
def prepare_matmul_tma(a: Array, b: Array, out: Array | None) -> MappedMatmul:
    """Checks, plan, kernel and tensor maps of a call."""
    _check(a, b, out)
    check_array("matmul_tma", "a", a, dtypes=_DTYPES)
    (m, k), n = a.shape, b.shape[0]
    if k == 0 or k % _STRIDE_ELEMENTS or n % _STRIDE_ELEMENTS:
        raise ArrayShapeError(
            f"matmul_tma: k and n must be multiples of {_STRIDE_ELEMENTS} on the GPU, k not 0, "
            f"got k = {k}, n = {n}"
        )
    return MappedMatmul(plan_matmul_tma(m, n, a.dtype.name, current_device().num_sms), m, n, k)


def _check(a: Array, b: Array, out: Array | None) -> None:
    check_array("matmul_tma", "a", a, dtypes=FLOAT_DTYPES, ndim=2)
    check_array("matmul_tma", "b", b, shape=(None, a.shape[1]))
    if out is not None:
        check_array("matmul_tma", "out", out, shape=(a.shape[0], b.shape[0]))
    check_same_dtype("matmul_tma", a=a, b=b, out=out)


def _specs(device: Device) -> list[KernelSpec]:
    if device.arch != _ARCH:
        return []
    return [
        MatmulTmaConfig(dtype.name, tiling, device.num_sms, 1).spec()
        for dtype in _DTYPES
        for tiling in (*TILINGS, CLUSTER_TILING)
    ]


register(
    name="matmul_tma",
    family="gemm",
    function=matmul_tma,
    reference=reference.matmul,
    specs=_specs,
    support=Support(_ARCH, _ARCH),
)
