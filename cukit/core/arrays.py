"""Array checks, and the choice between kernel and reference.

An op takes NumPy arrays, CuPy arrays, or any object with the DLPack protocol (no copy is made).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cukit.core import backend
from cukit.core.device import cupy_module, gpu_available
from cukit.core.support import kernel_runs_here
from cukit.errors import (
    ArrayDtypeError,
    ArrayError,
    ArrayLayoutError,
    ArrayShapeError,
    UnsupportedDeviceError,
)

Array = Any
"""A `numpy.ndarray` or `cupy.ndarray`; each op documents dtype and shape."""
HostArray = np.ndarray[Any, Any]
"""A `numpy.ndarray` on every device, such as a schedule that is computed on the host."""

bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
float16: np.dtype[Any] = np.dtype(np.float16)
float32: np.dtype[Any] = np.dtype(np.float32)
float64: np.dtype[Any] = np.dtype(np.float64)
int32: np.dtype[Any] = np.dtype(np.int32)
int64: np.dtype[Any] = np.dtype(np.int64)

KERNEL_DTYPES = (float32, float16, bfloat16)
"""Element types of the kernels. References also accept float64."""
FLOAT_DTYPES = (*KERNEL_DTYPES, float64)
INDEX_DTYPES = (int32, int64)


@functools.cache
def _known_types() -> tuple[type, ...]:
    cupy = cupy_module()
    return (np.ndarray,) if cupy is None else (np.ndarray, cupy.ndarray)


@functools.cache
def _passing_types() -> frozenset[type]:
    """Types that `adopt` returns unchanged."""
    return frozenset((*_known_types(), type(None)))


@functools.cache
def _gpu_type() -> type | None:
    cupy = cupy_module()
    return None if cupy is None else cupy.ndarray


def is_gpu_array(array: Array) -> bool:
    """True for a CuPy array."""
    kind = _gpu_type()
    return kind is not None and isinstance(array, kind)


def namespace(array: Array) -> Any:
    """`cupy` for a CuPy array, else `numpy`."""
    return cupy_module() if is_gpu_array(array) else np


def adopt(op: str, *arrays: Any) -> tuple[Array | None, ...]:
    """The arguments as NumPy or CuPy arrays that share their memory; None stays None.

    Tensors of other libraries (torch, JAX, ...) are converted through DLPack. Raises ArrayError for
    any other object, and UnsupportedDeviceError for a GPU tensor if CuPy finds no GPU.
    """
    passing = _passing_types()
    for array in arrays:
        if type(array) not in passing:
            return tuple(None if a is None else _adopt_one(op, a) for a in arrays)
    return arrays


def _adopt_one(op: str, array: Any) -> Array:
    if isinstance(array, np.ma.MaskedArray):
        raise ArrayError(f"{op}: masked arrays are not supported; fill them first (array.filled)")
    if isinstance(array, np.ndarray):
        return array.view(np.ndarray)  # subclasses such as np.matrix redefine operators
    if isinstance(array, _known_types()):
        return array
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        on_gpu = hasattr(array, "__cuda_array_interface__") or (
            int(array.__dlpack_device__()[0]) == _DLPACK_CUDA
        )
        if on_gpu and not gpu_available():
            raise UnsupportedDeviceError(f"{op}: got a GPU tensor, but CuPy finds no GPU")
        cupy = cupy_module()
        return cupy.from_dlpack(array) if on_gpu and cupy else np.from_dlpack(array)
    raise ArrayError(
        f"{op}: expected a NumPy or CuPy array or a DLPack tensor, got {type(array).__name__}"
    )


_DLPACK_CUDA = 2


def foreign_namespace(array: Any) -> Any:
    """The array-API namespace to which results are converted, for CPU arrays of other libraries.

    None for NumPy and CuPy arrays, for arrays on a CUDA device (whose results are CuPy arrays), and
    for objects without an array-API namespace.
    """
    if type(array) in _passing_types() or not hasattr(array, "__array_namespace__"):
        return None
    if isinstance(array, _known_types()):
        return None
    device = getattr(array, "__dlpack_device__", None)
    if device is not None and int(device()[0]) == _DLPACK_CUDA:
        return None
    return array.__array_namespace__()


Described = tuple[Any, ...]
"""An array as `describe` returns it: shape, strides, dtype, misalignment and device."""


def describe(*values: Any) -> tuple[Any, ...]:
    """A Described of each array; other values unchanged.

    Runs on every launch, hence one loop without function calls for CuPy arrays.
    """
    gpu_type: Any = _gpu_type()
    return tuple(
        [
            (a.shape, a.strides, a.dtype, (memory := a.data).ptr % ACCESS_BYTES, memory.device_id)
            if type(a) is gpu_type
            else _describe_array(a)
            if type(a) is np.ndarray
            else a
            for a in values
        ]
    )


def _describe_array(a: np.ndarray[Any, Any]) -> Hashable:
    return a.shape, a.strides, a.dtype, a.ctypes.data % ACCESS_BYTES, -1


def is_contiguous(array: Described) -> bool:
    """Whether a described array, of at least one axis, is C-contiguous."""
    shape, strides, dtype, *_ = array
    step = dtype.itemsize
    for extent, stride in zip(shape[::-1], strides[::-1], strict=True):
        if extent != 1 and stride != step:
            return 0 in shape
        step *= extent
    return True


def identify(*arrays: Array) -> tuple[Hashable, ...]:
    """Address, dtype, size and device of each array: the key of a cached table of addresses."""
    gpu_type: Any = _gpu_type()
    return tuple(
        (array.data.ptr, array.dtype, array.size, array.data.device_id)
        if type(array) is gpu_type
        else (array.ctypes.data, array.dtype, array.size, -1)
        for array in arrays
    )


ACCESS_BYTES = 16
"""The widest access of one thread, and the row alignment that allows it."""


def access_width(extent: int, *arrays: Array | None) -> int:
    """Elements per access: the widest vector, up to 16 bytes, that divides `extent` and to which
    every array is aligned. `extent` is the length of a contiguous run, e.g. a row."""
    present = [array for array in arrays if array is not None]
    itemsize = present[0].itemsize
    width: int = ACCESS_BYTES // itemsize
    while width > 1 and (
        extent % width or any(address_of(array) % (width * itemsize) for array in present)
    ):
        width //= 2
    return width


def address_of(array: Array) -> int:
    """Address of the first element."""
    return int(array.ctypes.data if type(array) is np.ndarray else array.data.ptr)


def runs_kernel(op: str, *arrays: Array | None) -> bool:
    """True if the arrays are on a GPU that can run the op's kernel, False for the reference.

    With an active backend (the emulator) NumPy arrays run the kernel, and CuPy arrays are rejected.
    Raises ArrayLayoutError if NumPy and CuPy arrays are mixed. On a GPU for which the op has no
    kernel (core.support) the reference runs on the CuPy arrays, with one warning per op.
    """
    gpu_type = _gpu_type()
    kinds = set(map(type, arrays))
    if gpu_type not in kinds:
        return backend.active is not None and kernel_runs_here(op, backend.active.key)
    if np.ndarray in kinds:
        places = ["GPU" if type(a) is gpu_type else "CPU" for a in arrays if a is not None]
        raise ArrayLayoutError(f"{op}: all arrays must be on one device, got {', '.join(places)}")
    if backend.active is not None:
        raise ArrayLayoutError(f"{op}: the active backend takes NumPy arrays, got CuPy arrays")
    first: Any = None
    for first in arrays:
        if first is not None:
            break
    return kernel_runs_here(op, first.data.device_id)


def check_current_device(arrays: Iterable[Any]) -> None:
    """Raises ArrayLayoutError unless all CuPy arrays are on CuPy's current device."""
    gpu_type: Any = _gpu_type()
    if gpu_type is None:
        return
    current = None
    for array in arrays:
        if not isinstance(array, gpu_type):
            continue
        place = array.data.device_id
        if current is None:
            current = cupy_module().cuda.runtime.getDevice()  # type: ignore[union-attr]
        if place != current:
            raise ArrayLayoutError(
                f"an array is on GPU {place}, but CuPy's current device is {current}; "
                f"use `with cupy.cuda.Device({place})`"
            )


def empty(like: Array, shape: Sequence[int], dtype: npt.DTypeLike | None = None) -> Array:
    """An uninitialised C-contiguous array in the memory space of `like`."""
    array = type(like)(shape, like.dtype if dtype is None else dtype)
    if backend.active is not None:
        backend.active.poison(array)
    return array


def check_addresses(op: str, **arrays: Array | None) -> None:
    """Raises ArrayLayoutError unless every array starts at a multiple of 16 bytes.

    For kernels that access them 16 bytes at a time, or through a tensor map.
    """
    for name, array in arrays.items():
        if array is not None and address_of(array) % ACCESS_BYTES:
            raise ArrayLayoutError(
                f"{op}: {name} must be 16-byte aligned on the GPU, got the address "
                f"{address_of(array):#x}; copy it"
            )


def check_array(
    op: str,
    name: str,
    array: Array,
    *,
    dtypes: Sequence[np.dtype[Any]] = FLOAT_DTYPES,
    shape: Sequence[int | None] | None = None,
    ndim: int | None = None,
    min_ndim: int = 0,
    contiguous: bool | None = True,
) -> None:
    """Raises an ArrayError that names the op, the argument, the requirement and the actual value.

    shape: required extents, None for any. contiguous: True requires C order, False a contiguous
    last axis; None allows any strides.
    """
    known: Any = _known_types()
    if not isinstance(array, known):
        raise ArrayError(f"{op}: {name} must be an array, got {type(array).__name__}")
    if array.dtype not in dtypes:
        allowed = ", ".join(dtype.name for dtype in dtypes)
        raise ArrayDtypeError(f"{op}: {name} must be {allowed}, got {array.dtype.name}")
    if not _is_aligned(array):
        raise ArrayLayoutError(
            f"{op}: {name} must be aligned to its element size of {array.itemsize} bytes, got "
            f"the address {address_of(array):#x}; copy it"
        )
    if ndim is not None and array.ndim != ndim:
        raise ArrayShapeError(f"{op}: {name} must have {ndim} axes, got shape {array.shape}")
    if array.ndim < min_ndim:
        axes = "axis" if min_ndim == 1 else "axes"
        raise ArrayShapeError(
            f"{op}: {name} must have at least {min_ndim} {axes}, got shape {array.shape}"
        )
    if shape is not None:
        extents = array.shape
        if len(shape) != len(extents):
            raise ArrayShapeError(f"{op}: {name} must have shape {_show(shape)}, got {extents}")
        for axis, (want, got) in enumerate(zip(shape, extents, strict=True)):
            if want is not None and want != got:
                raise ArrayShapeError(
                    f"{op}: {name} must have shape {_show(shape)}, got {extents} "
                    f"(axis {axis}: {got} instead of {want})"
                )
    if contiguous is None:
        return
    if contiguous:
        if not array.flags.c_contiguous:
            raise ArrayLayoutError(
                f"{op}: {name} must be C-contiguous, got strides {array.strides} "
                f"for shape {array.shape}"
            )
    elif array.strides[-1] != array.itemsize and array.size and array.shape[-1] > 1:
        raise ArrayLayoutError(
            f"{op}: the last axis of {name} must be contiguous, got strides {array.strides}"
        )


def _is_aligned(array: Array) -> bool:
    """Whether the address is a multiple of the element size.

    Views of byte arrays may start at any address; misaligned accesses fault on the GPU.
    """
    if type(array) is np.ndarray:
        return array.flags.aligned or array.dtype.alignment == 1
    return bool(array.data.ptr % array.itemsize == 0)


def adopt_arrays(op: str, name: str, arrays: Any) -> list[Array]:
    """Applies :func:`adopt` to the members of a list or tuple.

    Raises ArrayError for any other object and for members that are None.
    """
    if not isinstance(arrays, (list, tuple)):
        raise ArrayError(f"{op}: {name} must be a list of arrays, got {type(arrays).__name__}")
    known = _known_types()
    for index, array in enumerate(arrays):
        if type(array) not in known and not hasattr(array, "__dlpack__"):
            raise ArrayError(
                f"{op}: {name}[{index}] must be a NumPy or CuPy array or a DLPack tensor, "
                f"got {type(array).__name__}"
            )
    return [array for array in adopt(op, *arrays) if array is not None]


def write_out(out: Array | None, value: Array) -> Array:
    """`value`, or `out` filled with it: implements `out=` on the reference path."""
    if out is None:
        return value
    out[...] = value
    return out


def check_same_dtype(op: str, **arrays: Array | None) -> None:
    """Raises ArrayDtypeError unless all arrays (None is skipped) have the dtype of the first."""
    first, dtype = "", None
    for name, array in arrays.items():
        if array is None:
            continue
        if dtype is None:
            first, dtype = name, array.dtype
        elif array.dtype != dtype:
            raise ArrayDtypeError(
                f"{op}: {name} must have the dtype of {first} ({dtype.name}), "
                f"got {array.dtype.name}"
            )


def _show(shape: Sequence[int | None]) -> str:
    extents = ["any" if extent is None else str(extent) for extent in shape]
    return f"({extents[0]},)" if len(extents) == 1 else f"({', '.join(extents)})"
