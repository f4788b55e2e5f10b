"""Arrays of float8 and int4: bytes in memory that carry the type they stand for.

CuPy has no such dtypes, so a NarrowArray pairs uint8 storage with its logical dtype and shape. Ops
that take quantised operands accept it; everything else works on :meth:`NarrowArray.dense`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cukit.core.arrays import Array, access_width, empty, float32, runs_kernel
from cukit.core.device import Device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.errors import ArrayShapeError
from cukit.reference import narrow as reference
from cukit.registry import register


@dataclass(frozen=True)
class NarrowDtype:
    """A storage format narrower than NumPy's own.

    name: `"float8_e4m3"` (finite only: the `fn` variant), `"float8_e5m2"` or `"int4"`.
    bits: of one element. most: largest magnitude that survives (7 on the positive side of int4).
    """

    name: str
    bits: int
    most: float

    def __repr__(self) -> str:
        return f"cukit.{self.name}"


float8_e4m3 = NarrowDtype("float8_e4m3", 8, 448.0)
float8_e5m2 = NarrowDtype("float8_e5m2", 8, 57344.0)
int4 = NarrowDtype("int4", 4, 7.0)
NARROW_DTYPES = (float8_e4m3, float8_e5m2, int4)


@dataclass(frozen=True, eq=False)
class NarrowArray:
    """float8 or int4 values.

    storage: uint8, C-contiguous; the logical shape, for int4 with half (rounded up) the last axis.
    dtype: what the bytes stand for.
    shape: logical shape.
    """

    storage: Array
    dtype: NarrowDtype
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of storage."""
        return int(self.storage.nbytes)

    def dense(self) -> Array:
        """The values as float32, on the same device."""
        return decode(self)

    def astype(self, dtype: Any) -> Array:
        """The values as `dtype`: dense for NumPy's dtypes, narrow again for a NarrowDtype."""
        return (
            encode(decode(self), dtype)
            if isinstance(dtype, NarrowDtype)
            else decode(self).astype(dtype)
        )

    def __getitem__(self, index: int | slice) -> NarrowArray:
        """Elements of the first axis, without a copy (needs at least two axes)."""
        if self.ndim < 2:
            raise ArrayShapeError("a NarrowArray of one axis cannot be indexed; use dense()")
        storage = self.storage[index]
        return NarrowArray(storage, self.dtype, (*storage.shape[:-1], self.shape[-1]))

    def __repr__(self) -> str:
        return f"NarrowArray({self.dtype.name}, shape={self.shape})"


def encode(x: Array, dtype: NarrowDtype) -> NarrowArray:
    """Rounds float32 `x` to `dtype`, ties to even, saturating. No scale is applied.

    x: float32 [..., n], any layout. Overflow and infinities become the largest finite value; NaN
    stays NaN in float8 and becomes 0 in int4.
    """
    contiguous = x if x.flags.c_contiguous else x.copy()
    if not runs_kernel("encode", contiguous):
        return NarrowArray(_reference_encode(contiguous, dtype), dtype, x.shape)
    if x.ndim == 0:
        raise ArrayShapeError("encode: a narrow array has at least one axis")
    extent = x.shape[-1]
    packed = extent if dtype.bits == 8 else -(-extent // 2)
    storage = empty(contiguous, (*x.shape[:-1], packed), np.uint8)
    _prepare("encode", contiguous, storage, dtype)(contiguous, storage)
    return NarrowArray(storage, dtype, x.shape)


def decode(array: NarrowArray) -> Array:
    """float32 values [..., n] of a NarrowArray, on its device."""
    storage = array.storage
    if not runs_kernel("decode", storage):
        return _reference_decode(storage, array.dtype, array.shape[-1])
    storage = storage if storage.flags.c_contiguous else storage.copy()
    out = empty(storage, array.shape, float32)
    _prepare("decode", out, storage, array.dtype)(out, storage)
    return out


def _reference_encode(x: Array, dtype: NarrowDtype) -> Array:
    return reference.encode_int4(x) if dtype is int4 else reference.encode_float8(x, dtype.name)


def _reference_decode(storage: Array, dtype: NarrowDtype, extent: int) -> Array:
    if dtype is int4:
        return reference.decode_int4(storage, extent)
    return reference.decode_float8(storage, dtype.name)


_THREADS = 256
_BYTES_PER_THREAD = 4


def narrow_spec(entry: str, dtype: NarrowDtype, vec: int) -> KernelSpec:
    """The variant of `entry` ("encode" or "decode") for a format and an access width."""
    formats = {"float8_e4m3": 0, "float8_e5m2": 1, "int4": 2}
    defines = (("FORMAT", formats[dtype.name]), ("VEC", vec), ("THREADS", _THREADS))
    return KernelSpec("array_api/narrow.cu", entry, defines, _THREADS)


@launch_plan
def _prepare(entry: str, values: Array, storage: Array, dtype: NarrowDtype) -> Launch:
    rows, cols = storage.size // max(1, storage.shape[-1]), storage.shape[-1]
    # A row at a time only where rows end in a half-used byte; otherwise one long run.
    extent = values.shape[-1]
    if dtype.bits == 8 or extent % 2 == 0:
        rows, cols, extent = 1, storage.size, values.size
    vec = min(_BYTES_PER_THREAD, access_width(cols, storage))
    blocks = -(-cols // (_THREADS * vec))
    scalars = (np.int64(rows), np.int64(cols), np.int64(extent))
    return Launch(load_kernel(narrow_spec(entry, dtype, vec)), (blocks, min(rows, 65535)), scalars)


def _specs(entry: str, device: Device) -> list[KernelSpec]:
    return [narrow_spec(entry, dtype, vec) for dtype in NARROW_DTYPES for vec in (1, 4)]


register(
    name="encode",
    family="array_api",
    function=encode,
    reference=_reference_encode,
    specs=lambda device: _specs("encode", device),
)
register(
    name="decode",
    family="array_api",
    function=decode,
    reference=_reference_decode,
    specs=lambda device: _specs("decode", device),
)
