"""Creation of arrays on the default device, and conversion from and to other libraries."""

from __future__ import annotations

import functools
import importlib
import math
import numbers
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np

from cukit.core import backend
from cukit.core.arrays import KERNEL_DTYPES, Array, adopt, is_gpu_array
from cukit.core.device import gpu_available, require_cupy
from cukit.core.narrow_dtype import NarrowDtype
from cukit.core.quantized_array import QuantizedArray
from cukit.core.scalars import check_flag, check_integer, check_number, check_shape
from cukit.errors import (
    ArrayDtypeError,
    ArrayError,
    ArrayShapeError,
    ConfigError,
    CukitError,
    OutOfMemoryError,
    UnsupportedDeviceError,
)
from cukit.quantization.encode import encode

DeviceName = Literal["cpu", "gpu"]
Shape = int | Sequence[int]
Dtype = Any
"""A NumPy dtype or its name, including `"bfloat16"` and the types of ml_dtypes."""

_MAX_AXES = 64
_MAX_BYTES = 2**63


def default_device() -> DeviceName:
    """The device of new arrays: `"gpu"` if there is one, else `"cpu"`.

    The environment variable CUKIT_DEVICE overrides this choice. While the emulator is active, the
    device is always `"cpu"`.
    """
    if backend.active is not None:
        return "cpu"
    chosen = os.environ.get("CUKIT_DEVICE", "gpu" if gpu_available() else "cpu")
    return _checked(chosen)


def xp_namespace(device: DeviceName | None = None) -> Any:
    """The array-API-standard namespace of `device`: array-api-compat's CuPy or NumPy."""
    library = "cupy" if _place(device) == "gpu" else "numpy"
    return importlib.import_module(f"array_api_compat.{library}")


def asarray(
    obj: Any,
    dtype: Dtype | NarrowDtype | None = None,
    *,
    device: DeviceName | None = None,
    copy: bool | None = None,
) -> Array:
    """`obj` as an array on `device`; shares memory if neither device nor dtype changes.

    Args:
        obj: NumPy or CuPy array, DLPack tensor (torch, JAX, ...), QuantizedArray, nested sequence
            or number.
        dtype: None keeps the dtype (Python floats become float32); a narrow dtype returns a
            QuantizedArray without scales.
        device: `"cpu"` or `"gpu"`; None leaves GPU data on the GPU and moves other data to the
            default device.
        copy: True always copies, False raises ArrayError if a copy would be needed, None copies if
            needed.

    Raises:
        ArrayError: `obj` cannot be converted to an array of numbers.
        UnsupportedDeviceError: `device="gpu"` without a GPU.
    """
    if copy is not None:
        check_flag("asarray", "copy", copy)
    if copy is False and (isinstance(obj, QuantizedArray) or isinstance(dtype, NarrowDtype)):
        raise ArrayError("asarray: copy=False, but the array has to be decoded or encoded")
    if copy is False and isinstance(obj, (bool, int, float, complex, list, tuple, np.generic)):
        raise ArrayError(
            f"asarray: copy=False, but a {type(obj).__name__} has to be copied into an array"
        )
    if isinstance(obj, QuantizedArray):
        obj = obj.decode()
    if isinstance(dtype, NarrowDtype):
        array = asarray(obj, device=device, copy=copy)
        return encode(array if array.dtype in KERNEL_DTYPES else array.astype(np.float32), dtype)
    array = _adopted("asarray", obj)
    if device is None and is_gpu_array(array):
        device = "gpu"
    wanted = None if dtype is None else _dtype("asarray", dtype)
    place = _place(device)
    moves = is_gpu_array(array) != (place == "gpu")
    converts = wanted is not None and wanted != array.dtype
    if copy is False and (moves or converts):
        raise ArrayError("asarray: copy=False, but the device or the dtype has to change")
    if moves:
        array = to_numpy(array) if place == "cpu" else require_cupy("GPU arrays").asarray(array)
    if converts:
        return array.astype(wanted)
    return array.copy() if copy and not moves else array


def to_numpy(array: Any) -> np.ndarray[Any, Any]:
    """The contents of any array as a NumPy array; shares memory with a CPU array.

    Synchronises with the GPU for a GPU array. A QuantizedArray is decoded to float32.
    """
    if isinstance(array, QuantizedArray):
        array = array.decode()
    adopted = _adopted("to_numpy", array)
    return np.asarray(adopted.get() if is_gpu_array(adopted) else adopted)


def empty(shape: Shape, dtype: Dtype = np.float32, *, device: DeviceName | None = None) -> Array:
    """An uninitialised array on `device`, by default the default device."""
    resolved = _dtype("empty", dtype)
    extents = _extents("empty", shape, resolved)
    return _made("empty", lambda: _module(device).empty(extents, resolved))


def zeros(shape: Shape, dtype: Dtype = np.float32, *, device: DeviceName | None = None) -> Array:
    """An array of zeros on `device`, by default the default device."""
    resolved = _dtype("zeros", dtype)
    extents = _extents("zeros", shape, resolved)
    return _made("zeros", lambda: _module(device).zeros(extents, resolved))


def ones(shape: Shape, dtype: Dtype = np.float32, *, device: DeviceName | None = None) -> Array:
    """An array of ones on `device`, by default the default device."""
    return full(shape, 1, dtype, device=device)


def full(
    shape: Shape, value: float, dtype: Dtype = np.float32, *, device: DeviceName | None = None
) -> Array:
    """An array filled with `value` on `device`, by default the default device."""
    resolved = _dtype("full", dtype)
    if not isinstance(value, numbers.Number) and getattr(value, "shape", None) != ():
        raise ConfigError(f"full: value must be a number, got {value!r}")
    extents = _extents("full", shape, resolved)
    return _made("full", lambda: _module(device).full(extents, value, resolved))


def arange(
    start: float,
    stop: float | None = None,
    step: float = 1,
    dtype: Dtype | None = None,
    *,
    device: DeviceName | None = None,
) -> Array:
    """Numbers from `start` to `stop`, exclusive, in steps of `step`; `arange(stop)` starts at 0.

    dtype: None selects int64 for integer arguments, else float32.
    """
    if stop is None:
        start, stop = 0, start
    for name, value in (("start", start), ("stop", stop), ("step", step)):
        check_number("arange", name, value)
    if step == 0:
        raise ConfigError("arange: step must not be 0")
    if dtype is None:
        integers = all(isinstance(value, (int, np.integer)) for value in (start, stop, step))
        dtype = np.int64 if integers else np.float32
    resolved = _dtype("arange", dtype)
    wide: np.dtype[Any] = resolved if resolved.kind in "iu" else np.dtype(np.float64)
    _extents("arange", max(0, math.ceil((float(stop) - start) / step)), wide)
    return _module(device).arange(start, stop, step, wide).astype(resolved)


def linspace(
    start: float,
    stop: float,
    num: int,
    dtype: Dtype = np.float32,
    *,
    device: DeviceName | None = None,
) -> Array:
    """`num` evenly spaced numbers from `start` to `stop`, inclusive."""
    resolved = _dtype("linspace", dtype)
    check_number("linspace", "start", start)
    check_number("linspace", "stop", stop)
    check_integer("linspace", "num", num, least=0)
    _extents("linspace", num, np.dtype(np.float64))
    return _module(device).linspace(start, stop, num, dtype=np.float64).astype(resolved)


def empty_like(array: Array, dtype: Dtype | None = None) -> Array:
    """An uninitialised array with shape, device and (unless given) dtype of `array`."""
    return _like(empty, "empty_like", array, dtype)


def zeros_like(array: Array, dtype: Dtype | None = None) -> Array:
    """Zeros with shape, device and (unless given) dtype of `array`."""
    return _like(zeros, "zeros_like", array, dtype)


def ones_like(array: Array, dtype: Dtype | None = None) -> Array:
    """Ones with shape, device and (unless given) dtype of `array`."""
    return _like(ones, "ones_like", array, dtype)


def full_like(array: Array, value: float, dtype: Dtype | None = None) -> Array:
    """An array of `value` with shape, device and (unless given) dtype of `array`."""
    return _like(functools.partial(full, value=value), "full_like", array, dtype)


def _like(create: Callable[..., Array], op: str, array: Any, dtype: Dtype | None) -> Array:
    model = _adopted(op, array)
    chosen = model.dtype if dtype is None else dtype
    return create(model.shape, dtype=chosen, device=_device_of(model))


def _adopted(op: str, array: Any) -> Array:
    """`array`, an array or a Python number or sequence, as an array of numbers. Raises ArrayError
    for any other object."""
    if isinstance(array, (int, float, complex, bool, list, tuple)):
        try:
            array = np.asarray(array)
        except ValueError:
            raise ArrayError(f"{op}: the nested sequences have different lengths") from None
        if array.dtype == np.float64:
            array = array.astype(np.float32)
    (adopted,) = adopt(op, array)
    if adopted is None:
        raise ArrayError(f"{op}: expected an array, got None")
    if not _holds_numbers(adopted.dtype):
        raise ArrayDtypeError(f"{op}: expected numbers, got an array of {adopted.dtype}")
    return adopted


def _holds_numbers(dtype: np.dtype[Any]) -> bool:
    """True for numeric dtypes, including those of ml_dtypes, which have NumPy's kind "V"."""
    return dtype.kind in "biufc" or (dtype.kind == "V" and dtype.type is not np.void)


def _extents(op: str, shape: Any, dtype: np.dtype[Any]) -> tuple[int, ...]:
    extents = check_shape(op, shape)
    if len(extents) > _MAX_AXES or math.prod(extents) * dtype.itemsize >= _MAX_BYTES:
        raise ArrayShapeError(f"{op}: shape {shape!r} exceeds the limits of an array")
    return extents


def _made(op: str, make: Callable[[], Array]) -> Array:
    """`make()`, with the memory and overflow errors of NumPy or CuPy translated to cukit's."""
    try:
        return make()
    except CukitError:
        raise
    except MemoryError as error:
        raise OutOfMemoryError(f"{op}: {error}") from error
    except OverflowError as error:
        raise ConfigError(f"{op}: a number is out of range: {error}") from None


def _dtype(op: str, dtype: Dtype) -> np.dtype[Any]:
    """`dtype` as a NumPy dtype; None is float32. Raises ArrayDtypeError unless it is numeric."""
    if isinstance(dtype, NarrowDtype):
        raise ConfigError(
            f"{op}: dtype {dtype.name} needs values: create the array with asarray(values, "
            f"{dtype.name})"
        )
    is_bfloat16 = isinstance(dtype, str) and dtype == "bfloat16"
    try:
        resolved = np.dtype(
            ml_dtypes.bfloat16 if is_bfloat16 else np.float32 if dtype is None else dtype
        )
    except (TypeError, ValueError):
        raise ArrayDtypeError(f"{op}: dtype must be a dtype of numbers, got {dtype!r}") from None
    if not _holds_numbers(resolved):
        raise ArrayDtypeError(f"{op}: dtype must be a dtype of numbers, got {resolved}")
    return resolved


def _device_of(array: Array) -> DeviceName:
    return "gpu" if is_gpu_array(array) else "cpu"


def _checked(device: str) -> DeviceName:
    if not isinstance(device, str) or device not in ("cpu", "gpu"):
        raise ConfigError(f"device: expected 'cpu' or 'gpu', got {device!r}")
    return device  # type: ignore[return-value]


def _place(device: DeviceName | None) -> DeviceName:
    place = default_device() if device is None else _checked(device)
    if place == "gpu" and not gpu_available():
        raise UnsupportedDeviceError("device='gpu', but no GPU was found; run `cukit doctor`")
    return place


def _module(device: DeviceName | None) -> Any:
    return require_cupy("GPU arrays") if _place(device) == "gpu" else np
