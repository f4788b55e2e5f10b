"""Dequantisation, and quantisation with given scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cukit.core.arrays import (
    ACCESS_BYTES,
    KERNEL_DTYPES,
    Array,
    address_of,
    adopt,
    bfloat16,
    check_array,
    empty,
    float16,
    float32,
    runs_kernel,
    write_out,
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.narrow_dtype import (
    NarrowDtype,
    check_narrow_dtype,
    float8_e4m3,
    int4,
    int8,
)
from cukit.core.overlap import check_overlap
from cukit.core.quantized_array import QuantizedArray, install_conversions
from cukit.core.scalars import check_dtype
from cukit.errors import ArrayError
from cukit.quantization._matrices import Matrices, matrices_of, scale_strides
from cukit.quantization._quantize_plan import FORMATS
from cukit.reference import narrow as narrow_reference
from cukit.reference import quantize as reference
from cukit.registry import register

_THREADS = 256
_ITEMS = 4
_BLOCK_EXTENTS = (1, 32, 64, 128)
"""Block extents known at compile time: division is a shift instead of twenty instructions."""


def dequantize(array: QuantizedArray, dtype: Any = float32, *, out: Array | None = None) -> Array:
    """The values (code - zero_point) * scale of `array`.

    Args:
        array: QuantizedArray [..., k], with or without scales.
        dtype: of the result: float32, float16 or bfloat16.
        out: written in place; [..., k] of `dtype`, C-contiguous. It must not overlap `array`.

    Returns:
        `out` or a new array [..., k] on the device of `array`.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument.

    Computed in float32 and rounded once; subnormal float32 values become 0 on the GPU. One kernel
    handles blocks that extend along the last axis, the last two axes, or the last axis and all
    leading axes; for other blocks, a kernel decodes the codes and array operations apply the
    scales. Runs on CuPy's current stream; deterministic. Also available as
    :meth:`QuantizedArray.decode`.

    >>> import numpy as np, cukit as ck
    >>> array = ck.quantize(np.array([[0.5, -1.0], [4.0, 2.0]], np.float32), ck.float8_e4m3)
    >>> ck.dequantize(array)
    array([[ 0.5, -1. ],
           [ 4. ,  2. ]], dtype=float32)
    """
    if not isinstance(array, QuantizedArray):
        raise ArrayError(f"dequantize: array must be a QuantizedArray, got {type(array).__name__}")
    dtype = check_dtype("dequantize", "dtype", dtype, KERNEL_DTYPES)
    check_narrow_dtype("dequantize", "array", array.dtype)
    if out is not None:
        (out,) = adopt("dequantize", out)
        check_array("dequantize", "out", out, dtypes=(dtype,), shape=array.shape)
        check_overlap(
            "dequantize",
            out,
            storage=array.storage,
            scales=array.scales,
            zero_points=array.zero_points,
        )
    if array.block_shape is None:
        return write_out(out, array.decode(dtype))
    storage, scales, zero_points = array.storage, array.scales, array.zero_points
    if not runs_kernel("dequantize", storage, out) or not array.size:
        values = reference.dequantize(
            storage, array.dtype.name, array.shape[-1], scales, zero_points, array.block_shape
        )
        return write_out(out, values.astype(dtype, copy=False))
    storage = storage if storage.flags.c_contiguous else storage.copy(order="C")
    if out is None:
        out = empty(storage, array.shape, dtype)
    if matrices_of(array.shape, array.block_shape) is None:
        codes = QuantizedArray(storage, array.dtype, array.shape).decode()
        out[...] = narrow_reference.dequantize(codes, scales, zero_points, array.block_shape)
    else:
        _launch("dequantize", out, storage, array)
    return out


def encode_scaled(x: Array, array: QuantizedArray) -> None:
    """Fills `array`, whose scales are given, with the codes of `x`; see `QuantizedArray.encode`.

    array: its codes must be C-contiguous.
    x: float32|float16|bfloat16, with the shape and on the device of `array`, any layout.
    """
    assert array.block_shape is not None
    scales, zero_points, block = array.scales, array.zero_points, array.block_shape
    if not x.size:
        return
    if not runs_kernel("dequantize", x, array.storage) or matrices_of(x.shape, block) is None:
        scaled = narrow_reference.quantize(x, scales, zero_points, block)
        array.storage[...] = QuantizedArray.encode(scaled, array.dtype).storage
        return
    x = x if x.flags.c_contiguous else x.copy(order="C")
    _launch("encode_scaled", x, array.storage, array)


def _launch(entry: str, values: Array, storage: Array, array: QuantizedArray) -> None:
    """Runs a kernel; scales and zero points with unsupported strides are copied first."""
    scales, zero_points = array.scales, array.zero_points
    details = (array.dtype, array.block_shape)
    launch = _prepare(entry, values, storage, scales, zero_points, *details)
    if launch is None:
        scales, zero_points = (
            None if factors is None else factors.copy(order="C")
            for factors in (scales, zero_points)
        )
        launch = _prepare(entry, values, storage, scales, zero_points, *details)
    launch(values, storage, scales, zero_points)


@dataclass(frozen=True)
class DequantizeConfig:
    """One call's launch configuration: thread blocks that process THREADS * ITEMS vectors each.

    entry: `"dequantize"` or `"encode_scaled"`.
    block: extents of a block of values; 0 for an extent that is not known at compile time.
    one_scale: whether no vector crosses a block boundary.
    """

    entry: str
    format: str
    dtype: str
    scale_dtype: str
    zero_point_dtype: str
    aligned: bool
    block: tuple[int, int]
    one_scale: bool
    index: str
    num_blocks: int

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        defines = (
            ("FORMAT", FORMATS[self.format]),
            ("DTYPE", self.dtype),
            ("SCALE", self.scale_dtype),
            ("ZERO_POINT", self.zero_point_dtype),
            ("ALIGNED", int(self.aligned)),
            ("BLOCK_ROWS", self.block[0]),
            ("BLOCK_COLS", self.block[1]),
            ("ONE_SCALE", int(self.one_scale)),
            ("INDEX", self.index),
            ("THREADS", _THREADS),
            ("ITEMS", _ITEMS),
        )
        return KernelSpec("quantization/dequantize.cu", self.entry, defines, _THREADS)


def plan_dequantize(
    matrices: Matrices,
    narrow: NarrowDtype,
    dtype: np.dtype[Any],
    scale_dtype: str,
    zero_point_dtype: str | None = None,
    *,
    aligned: bool = True,
    entry: str = "dequantize",
) -> DequantizeConfig:
    """The kernel that converts between codes of `narrow` and values of `dtype`.

    aligned: whether rows start at multiples of 16 bytes of values, and their codes at the
        corresponding multiples.
    """
    vector = ACCESS_BYTES // dtype.itemsize
    vectors = matrices.num_matrices * matrices.rows * -(-matrices.cols // vector)
    vectors_per_block = _THREADS * _ITEMS
    rows, cols = (
        extent if extent in _BLOCK_EXTENTS else 0
        for extent in (matrices.block_rows, matrices.block_cols)
    )
    return DequantizeConfig(
        entry=entry,
        format=narrow.name,
        dtype=dtype.name,
        scale_dtype=scale_dtype,
        zero_point_dtype=zero_point_dtype or "none",
        aligned=aligned,
        block=(rows, cols),
        one_scale=matrices.block_cols % vector == 0 or matrices.block_cols == matrices.cols,
        index="uint32" if (vectors + vectors_per_block) * vector < 2**32 else "uint64",
        num_blocks=-(-vectors // vectors_per_block),
    )


@launch_plan
def _prepare(
    entry: str,
    values: Array,
    storage: Array,
    scales: Array,
    zero_points: Array | None,
    narrow: NarrowDtype,
    block: tuple[int, ...],
) -> Launch | None:
    matrices = matrices_of(values.shape, block)
    if matrices is None:
        return None
    strides = scale_strides(matrices, scales)
    if strides is None or (
        zero_points is not None and strides != scale_strides(matrices, zero_points)
    ):
        return None
    vector = ACCESS_BYTES // values.itemsize
    aligned = (
        matrices.cols % vector == 0
        and address_of(values) % ACCESS_BYTES == 0
        and address_of(storage) % (vector * narrow.bits // 8) == 0
    )
    config = plan_dequantize(
        matrices,
        narrow,
        values.dtype,
        scales.dtype.name,
        None if zero_points is None else zero_points.dtype.name,
        aligned=aligned,
        entry=entry,
    )
    parameters = matrices.pack(narrow, strides)
    return Launch(load_kernel(config.spec()), (config.num_blocks,), (parameters,))


def _specs(device: Device) -> list[KernelSpec]:
    """Rows, groups with zero points, tiles; both alignments, and an uncommon block size."""

    def spec(
        narrow: NarrowDtype,
        block: tuple[int, int],
        *args: Any,
        dtype: Any = bfloat16,
        **options: Any,
    ) -> KernelSpec:
        matrices = matrices_of((4096, 4096), block)
        assert matrices is not None
        return plan_dequantize(matrices, narrow, dtype, *args, **options).spec()

    return [
        spec(int8, (1, 4096), "float32"),
        spec(int8, (1, 4096), "float32", dtype=float16),
        spec(int8, (1, 4096), "float32", dtype=float32),
        spec(int4, (1, 128), "bfloat16", "int8"),
        spec(int4, (1, 12), "float16", aligned=False),
        spec(float8_e4m3, (128, 128), "float32"),
        spec(float8_e4m3, (4096, 4096), "float32", entry="encode_scaled"),
        spec(int4, (1, 12), "float16", "int8", aligned=False, entry="encode_scaled"),
    ]


install_conversions(dequantize=dequantize)

register(
    name="dequantize",
    family="quantization",
    function=dequantize,
    reference=reference.dequantize,
    specs=_specs,
)
