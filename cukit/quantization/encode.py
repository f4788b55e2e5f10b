"""Conversion between floats and the codes of QuantizedArrays, without scales."""

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
)
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.narrow_dtype import NARROW_DTYPES, NarrowDtype, check_narrow_dtype, int4, int8
from cukit.core.quantized_array import Axis, GroupSize, QuantizedArray, install_conversions
from cukit.core.scalars import check_dtype
from cukit.errors import ArrayError
from cukit.quantization._quantize_plan import FORMATS
from cukit.quantization.dequantize import encode_scaled
from cukit.reference import narrow as reference
from cukit.registry import register


def encode(
    x: Array,
    dtype: NarrowDtype,
    scales: Array | None = None,
    zero_points: Array | None = None,
    axis: Axis = None,
    group_size: GroupSize = None,
) -> QuantizedArray:
    """Encodes `x`; see :meth:`QuantizedArray.encode`.

    x: float32|float16|bfloat16 [..., n], any layout.
    """
    (x,) = adopt("encode", x)
    check_array("encode", "x", x, dtypes=KERNEL_DTYPES, min_ndim=1, contiguous=None)
    check_narrow_dtype("encode", "dtype", dtype)
    storage = empty(x, dtype.storage_shape(x.shape), dtype.storage_dtype)
    array = QuantizedArray(storage, dtype, x.shape, scales, zero_points, axis, group_size)
    if array.block_shape is not None:
        encode_scaled(x, array)
        return array
    if not runs_kernel("encode", x):
        storage[...] = reference.encode(x, dtype.name)
        return array
    x = x if x.flags.c_contiguous else x.copy(order="C")
    _prepare("encode", x, storage, dtype)(x, storage)
    return array


def decode(array: QuantizedArray, dtype: Any = float32) -> Array:
    """The codes of `array` as numbers, without scales applied.

    Returns float32|float16|bfloat16 [..., n] on the array's device.
    """
    if not isinstance(array, QuantizedArray):
        raise ArrayError(f"decode: array must be a QuantizedArray, got {type(array).__name__}")
    resolved = check_dtype("decode", "dtype", dtype, KERNEL_DTYPES)
    check_narrow_dtype("decode", "the array's dtype", array.dtype)
    storage = array.storage
    if not runs_kernel("decode", storage):
        values = reference.decode(storage, array.dtype.name, array.shape[-1])
        return values.astype(resolved, copy=False)
    storage = storage if storage.flags.c_contiguous else storage.copy(order="C")
    out = empty(storage, array.shape, resolved)
    _prepare("decode", out, storage, array.dtype)(out, storage)
    return out


install_conversions(encode=encode, decode=decode)

_THREADS = 128
_VECS_PER_THREAD = 2
_ITEMS_PER_THREAD = 8  # bytes or values per thread with VEC 1


@dataclass(frozen=True)
class EncodeConfig:
    """The launch configuration of a conversion.

    vec: values per access; 1 for unaligned arrays and for rows that end in a partly filled byte.
    A thread issues `vecs_per_thread` loads before the first use.
    """

    entry: str
    format: str
    dtype: str
    vec: int
    vecs_per_thread: int
    index: str
    num_blocks: int

    def spec(self) -> KernelSpec:
        """The kernel variant for this configuration."""
        defines = (
            ("FORMAT", self.format),
            ("DTYPE", self.dtype),
            ("VEC", self.vec),
            ("VECS_PER_THREAD", self.vecs_per_thread),
            ("INDEX", self.index),
            ("THREADS", _THREADS),
        )
        return KernelSpec("quantization/encode.cu", self.entry, defines, _THREADS)


def plan_encode(
    entry: str,
    narrow: NarrowDtype,
    dtype: np.dtype[Any],
    rows: int,
    extent: int,
    *,
    aligned: bool = True,
) -> EncodeConfig:
    """The launch configuration of `entry` ("encode" or "decode") for values [rows, extent].

    rows: 1 if no row ends in a partially filled byte; all values then form one row.
    aligned: whether both arrays are aligned for vector accesses.
    """
    vec = ACCESS_BYTES // dtype.itemsize if aligned and rows == 1 else 1
    per_byte = 1 if vec > 1 or entry == "decode" else 8 // narrow.bits
    items = rows * (extent // vec if vec > 1 else -(-extent // per_byte))
    per_thread = _VECS_PER_THREAD if vec > 1 else _ITEMS_PER_THREAD
    per_block = _THREADS * per_thread
    num_blocks = max(-(-items // per_block), 1 if rows * extent else 0)
    index = "uint32" if rows * extent + per_block < 2**32 else "uint64"
    format_name = FORMATS[narrow.name]
    return EncodeConfig(entry, format_name, dtype.name, vec, per_thread, index, num_blocks)


@launch_plan
def _prepare(entry: str, values: Array, storage: Array, narrow: NarrowDtype) -> Launch:
    rows, extent = 1, values.size
    if values.shape[-1] * narrow.bits % 8:
        rows, extent = values.size // values.shape[-1], values.shape[-1]
    codes_bytes = ACCESS_BYTES // values.itemsize * narrow.bits // 8
    aligned = address_of(values) % ACCESS_BYTES == 0 and address_of(storage) % codes_bytes == 0
    config = plan_encode(entry, narrow, values.dtype, rows, extent, aligned=aligned)
    cols = narrow.storage_shape((extent,))[0]
    scalars = (np.int64(rows), np.int64(extent), np.int64(cols))
    return Launch(load_kernel(config.spec()), (config.num_blocks,), scalars)


def _specs(entry: str, device: Device) -> list[KernelSpec]:
    """All formats for float32 and bfloat16; int8 for float16; int4 with padded rows."""
    full_rows = [
        plan_encode(entry, narrow, dtype, 1, 1 << 20)
        for narrow in NARROW_DTYPES
        for dtype in (float32, bfloat16)
    ]
    half = plan_encode(entry, int8, float16, 1, 1 << 20)
    padded = plan_encode(entry, int4, float32, 64, 4097)
    return [config.spec() for config in (*full_rows, half, padded)]


register(
    name="encode",
    family="quantization",
    function=encode,
    reference=reference.encode,
    specs=lambda device: _specs("encode", device),
)
register(
    name="decode",
    family="quantization",
    function=decode,
    reference=reference.decode,
    specs=lambda device: _specs("decode", device),
)
