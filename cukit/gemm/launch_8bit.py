"""Launches of products of 8-bit matrices: tensor maps, aligned copies, arguments."""

from __future__ import annotations

from functools import partial


from cukit.core.arrays import ACCESS_BYTES, Array, address_of, empty, float32
from cukit.core.kernel import Launch, load_kernel
from cukit.core.map_cache import TensorMapCache
from cukit.core.parameters import parameter_structs
from cukit.core.tensor_map import encode_tensor_map
from cukit.gemm.plan_8bit import OUT_BOX, TILE_K, Config8Bit, ResultPath

_PARAMETERS = parameter_structs("gemm/parameters.cuh")


class Mapped8Bit:
    """A launch for arrays of one description, checked before."""

    __slots__ = ("_a", "_b", "_blocks", "_launch", "_out", "_scales")

    def __init__(
        self, config: Config8Bit, m: int, n: int, k: int, a_stride: int = 0, b_stride: int = 0
    ) -> None:
        """a_stride, b_stride: 1 where each row of `a` (of `b`) has a scale, 0 where all share one."""
        tiling = config.tiling
        product = _PARAMETERS["GemmParameters"].pack(
            m=m, n=n, steps=-(-k // TILE_K), group=config.group
        )
        parameters = _PARAMETERS["QuantizedGemmParameters"].pack(
            product=product, a_stride=a_stride, b_stride=b_stride
        )
        self._launch = Launch(load_kernel(config.spec()), (config.num_blocks,), (parameters,))
        self._blocks = config.product.blocks
        boxes = (tiling.tile_m, TILE_K), (tiling.tile_n // tiling.cluster, TILE_K)
        self._a, self._b = (
            TensorMapCache(partial(encode_tensor_map, box=box)) for box in boxes
        )
        staged = config.result == ResultPath.STAGED
        self._out = TensorMapCache(partial(encode_tensor_map, box=OUT_BOX)) if staged else None
        self._scales = TensorMapCache(
            lambda scales: encode_tensor_map(scales.T, (1, tiling.tile_m), swizzle_bytes=0)
        )

    def __call__(
        self,
        a: Array,
        b: Array,
        out: Array,
        a_scales: Array | None,
        b_scales: Array | None,
        zero_points: Array | None = None,
        column_sums: Array | None = None,
        bias: Array | None = None,
    ) -> None:
        a, b = aligned_rows(a), aligned_rows(b)
        maps = [self._a(a), self._b(b)]
        if self._out is not None:
            maps.append(self._out(out))
        if self._blocks:
            a_scales = scale_columns(a_scales)
            self._launch(*maps, self._scales(a_scales), b_scales, bias, out)
        else:
            self._launch(*maps, a_scales, b_scales, zero_points, column_sums, bias, out)


def aligned_rows(codes: Array) -> Array:
    """`codes` [rows, k], or a copy whose rows begin at multiples of 16 bytes as TMA asks for."""
    if codes.strides[0] % ACCESS_BYTES == 0 and address_of(codes) % ACCESS_BYTES == 0:
        return codes
    rows, k = codes.shape
    wide = empty(codes, (rows, -(-k // ACCESS_BYTES) * ACCESS_BYTES))
    wide[:, :k] = codes
    return wide[:, :k]


def scale_columns(scales: Array) -> Array:
    """`scales` [rows, steps], or a copy that lies column by column at multiples of 16 bytes."""
    rows, steps = scales.shape
    along_rows, along_steps = scales.strides
    aligned = (steps == 1 or along_steps % ACCESS_BYTES == 0) and (
        address_of(scales) % ACCESS_BYTES == 0
    )
    if along_rows == scales.itemsize and aligned:
        return scales
    columns = empty(scales, (steps, -(-rows // 4) * 4), float32)
    columns[:, :rows] = scales.T
    return columns[:, :rows].T
