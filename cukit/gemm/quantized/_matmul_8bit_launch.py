"""Launches of 8-bit products: tensor maps, aligned copies, arguments."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cukit.core.arrays import ACCESS_BYTES, Array, address_of, empty, float32
from cukit.core.device import current_device
from cukit.core.kernel import Launch, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.core.tensor_map import TensorMapCache, encode_tensor_map
from cukit.gemm.dense._linear_launch import box_rows
from cukit.gemm.quantized._matmul_8bit_operands import Checked, Parts
from cukit.gemm.quantized._matmul_8bit_plan import (
    TILE_K,
    Code,
    Config8Bit,
    Config8BitSm80,
    Product8Bit,
    ResultPath,
    piece_columns,
    plan_matmul_8bit_sm80,
    plan_matmul_8bit_sm90,
)

_STRUCTS = parameter_structs("gemm/parameters.cuh")


class Prepared8Bit(NamedTuple):
    """A checked call on the current device."""

    launch: Matmul8BitSm90 | Matmul8BitSm80 | None
    """None for an empty result."""
    dtype: np.dtype[Any]
    """Dtype of the result."""

    def __call__(
        self,
        a: Parts,
        b: Parts,
        out: Array | None,
        column_sums: Array | None = None,
        bias: Array | None = None,
    ) -> Array:
        """Returns `out`, or a new array if it is None."""
        if out is None:
            out = empty(a.storage, (a.storage.shape[0], b.storage.shape[0]), self.dtype)
        if self.launch is not None:
            self.launch(a.storage, b.storage, out, a.scales, b.scales,
                        a.zero_points, column_sums, bias)  # fmt: skip
        return out


def prepare_8bit(code: Code, checked: Checked, promoted: bool = False) -> Prepared8Bit:
    """Plans a checked call on the current device; code, promoted: see :class:`Product8Bit`."""
    m, n, k, dtype, a_stride, b_stride = checked
    if m == 0 or n == 0:
        return Prepared8Bit(None, dtype)
    product = Product8Bit(code, dtype.name, promoted, blocks=a_stride is None)
    strides = a_stride or 0, b_stride or 0
    device = current_device()
    if device.arch != "sm_90":
        config = plan_matmul_8bit_sm80(product, m, n, device.num_sms)
        return Prepared8Bit(Matmul8BitSm80(config, m, n, k, *strides), dtype)
    tuned = plan_matmul_8bit_sm90(product, m, n, k, device.num_sms)
    return Prepared8Bit(Matmul8BitSm90(tuned, m, n, k, *strides), dtype)


class Matmul8BitSm90:
    """A launch of matmul_8bit_sm90.cu for operands of given shapes and dtypes."""

    __slots__ = ("_a", "_b", "_blocks", "_launch", "_out", "_scales", "_staged")

    def __init__(
        self, config: Config8Bit, m: int, n: int, k: int, a_stride: int = 0, b_stride: int = 0
    ) -> None:
        tiling = config.tiling
        boxes = box_rows(tiling.tile_m, m), box_rows(tiling.tile_n, n)
        parameters = _parameters((m, n, k), config.raster_group, boxes, (a_stride, b_stride))
        self._launch = Launch(load_kernel(config.spec()), (config.num_blocks,), (parameters,))
        self._blocks = config.product.blocks
        self._a, self._b = (
            TensorMapCache(partial(encode_tensor_map, box=(rows, TILE_K))) for rows in boxes
        )
        self._staged = config.result == ResultPath.STAGED
        piece = piece_columns(tiling.tile_n)
        self._out = TensorMapCache(
            partial(encode_tensor_map, box=(64, piece), swizzle_bytes=2 * piece)
        )
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
        if self._staged:
            maps.append(self._out(out))
        if self._blocks:
            a_scales = scale_columns(a_scales)
            self._launch(*maps, self._scales(a_scales), b_scales, bias, out)
        else:
            self._launch(*maps, a_scales, b_scales, zero_points, column_sums, bias, out)


class Matmul8BitSm80:
    """A launch of matmul_8bit_sm80.cu for operands of given shapes and dtypes."""

    __slots__ = ("_blocks", "_extents", "_kernel", "_launches")

    def __init__(
        self, config: Config8BitSm80, m: int, n: int, k: int, a_stride: int = 0, b_stride: int = 0
    ) -> None:
        self._blocks = config.product.blocks
        self._kernel = load_kernel(config.spec()), (config.num_blocks,)
        self._extents = (m, n, k, config.raster_group, a_stride, b_stride)
        self._launches: dict[tuple[int, ...], Launch] = {}

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
        if self._blocks:
            a_scales = scale_columns(a_scales)
            launch = self._launch(a.strides[0], b.strides[0], a_scales.strides[1] // 4)
            launch(a, b, a_scales, b_scales, bias, out)
        else:
            launch = self._launch(a.strides[0], b.strides[0], self._extents[4])
            launch(a, b, a_scales, b_scales, zero_points, column_sums, bias, out)

    def _launch(self, a_row_bytes: int, b_row_bytes: int, a_stride: int) -> Launch:
        """The launch for arrays with these strides, created once."""
        key = (a_row_bytes, b_row_bytes, a_stride)
        found = self._launches.get(key)
        if found is None:
            m, n, k, raster_group, _, b_stride = self._extents
            parameters = _parameters((m, n, k), raster_group, (0, 0), (a_stride, b_stride))
            rows = _STRUCTS["RowStrides"].pack(
                a_row_bytes=a_row_bytes, b_row_bytes=b_row_bytes, k=k
            )
            found = self._launches[key] = Launch(*self._kernel, (parameters, rows))
        return found


def _parameters(
    extents: tuple[int, int, int],
    raster_group: int,
    boxes: tuple[int, int],
    strides: tuple[int, int],
) -> Any:
    m, n, k = extents
    gemm = _STRUCTS["GemmParameters"].pack(
        m=m, n=n, steps=-(-k // TILE_K), raster_group=raster_group
    )
    linear = _STRUCTS["LinearParameters"].pack(gemm=gemm, box_a=boxes[0], box_b=boxes[1])
    return _STRUCTS["QuantizedParameters"].pack(
        linear=linear, a_stride=strides[0], b_stride=strides[1]
    )


def aligned_rows(codes: Array) -> Array:
    """`codes` [rows, k], or a copy with 16-byte aligned rows, which TMA requires."""
    if codes.strides[0] % ACCESS_BYTES == 0 and address_of(codes) % ACCESS_BYTES == 0:
        return codes
    rows, k = codes.shape
    wide = empty(codes, (rows, -(-k // ACCESS_BYTES) * ACCESS_BYTES))
    wide[:, :k] = codes
    return wide[:, :k]


def scale_columns(scales: Array) -> Array:
    """`scales` [rows, steps], or a column-major copy with 16-byte aligned columns."""
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
