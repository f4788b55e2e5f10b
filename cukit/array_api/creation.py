"""Arrays made on this machine's device, adopted from elsewhere, and brought back."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np

from cukit.array_api.narrow import encode
from cukit.core import backend
from cukit.core.arrays import KERNEL_DTYPES, Array, adopt, is_gpu_array
from cukit.core.device import gpu_available, require_cupy
from cukit.core.narrow_dtype import NarrowDtype
from cukit.core.quantized_array import QuantizedArray
from cukit.errors import ConfigError, UnsupportedDeviceError

DeviceName = Literal["cpu", "gpu"]
Shape = int | Sequence[int]
Dtype = Any
"""A NumPy dtype or its name, `"bfloat16"` and ml_dtypes' types included."""


def default_device() -> DeviceName:
    """`"gpu"` where one is present, else `"cpu"`; the environment variable CUKIT_DEVICE decides.

    The emulator works on the CPU's arrays.
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
    """`obj` as an array on `device`, sharing memory where it is there already.

    Args:
        obj: NumPy or CuPy array, torch or JAX or other DLPack tensor, QuantizedArray, nested
            sequence or number.
        dtype: None keeps it (Python floats become float32); a narrow dtype rounds to it, without
            scales.
        device: None leaves GPU data on the GPU and moves the rest to the default device.
        copy: True always copies, False raises ValueError where a copy would be needed.

    Raises:
        ArrayError: `obj` is no array. UnsupportedDeviceError: `device="gpu"` without one.
    """
    if isinstance(obj, QuantizedArray):
        obj = obj.decode()
    if isinstance(dtype, NarrowDtype):
        array = asarray(obj, device=device, copy=copy)
        return encode(array if array.dtype in KERNEL_DTYPES else array.astype(np.float32), dtype)
    if isinstance(obj, (int, float, complex, bool, list, tuple)):
        obj = _from_python(obj)
    (array,) = adopt("asarray", obj)
    assert array is not None
    if device is None and is_gpu_array(array):
        device = "gpu"
    wanted = None if dtype is None else _dtype(dtype)
    place = _place(device)
    moves = is_gpu_array(array) != (place == "gpu")
    converts = wanted is not None and wanted != array.dtype
    if copy is False and (moves or converts):
        raise ValueError("asarray: copy=False, but the device or the dtype has to change")
    if moves:
        array = to_numpy(array) if place == "cpu" else require_cupy("GPU arrays").asarray(array)
    if converts:
        return array.astype(wanted)
    return array.copy() if copy and not moves else array


def to_numpy(array: Any) -> np.ndarray[Any, Any]:
    """A NumPy array with the contents of any array; shares memory with a CPU array.

    Waits for the GPU work that produces it. A QuantizedArray comes back as its float32 values.
    """
    if isinstance(array, QuantizedArray):
        array = array.decode()
    if isinstance(array, (int, float, list, tuple)):
        array = _from_python(array)
    (adopted,) = adopt("to_numpy", array)
    assert adopted is not None
    return np.asarray(adopted.get() if is_gpu_array(adopted) else adopted)


def empty(shape: Shape, dtype: Dtype = np.float32, *, device: DeviceName | None = None) -> Array:
    """An uninitialised array."""
    return _module(device).empty(shape, _dtype(dtype))


def zeros(shape: Shape, dtype: Dtype = np.float32, *, device: DeviceName | None = None) -> Array:
    """An array of zeros."""
    return _module(device).zeros(shape, _dtype(dtype))


def ones(shape: Shape, dtype: Dtype = np.float32, *, device: DeviceName | None = None) -> Array:
    """An array of ones."""
    return full(shape, 1, dtype, device=device)


def full(
    shape: Shape, value: float, dtype: Dtype = np.float32, *, device: DeviceName | None = None
) -> Array:
    """An array filled with `value`."""
    return _module(device).full(shape, value, _dtype(dtype))


def arange(
    start: float,
    stop: float | None = None,
    step: float = 1,
    dtype: Dtype | None = None,
    *,
    device: DeviceName | None = None,
) -> Array:
    """Numbers from `start` (0 where `stop` is omitted) up to, without, `stop`.

    dtype: None gives int64 for integers and float32 otherwise.
    """
    if stop is None:
        start, stop = 0, start
    if dtype is None:
        integers = all(isinstance(value, int) for value in (start, stop, step))
        dtype = np.int64 if integers else np.float32
    wide = np.float64 if _dtype(dtype).kind not in "iu" else _dtype(dtype)
    return _module(device).arange(start, stop, step, wide).astype(_dtype(dtype))


def linspace(
    start: float,
    stop: float,
    num: int,
    dtype: Dtype = np.float32,
    *,
    device: DeviceName | None = None,
) -> Array:
    """`num` numbers from `start` to `stop`, both included."""
    return _module(device).linspace(start, stop, num, dtype=np.float64).astype(_dtype(dtype))


def empty_like(array: Array, dtype: Dtype | None = None) -> Array:
    """An uninitialised array with the shape, device and (unless given) dtype of `array`."""
    return empty(array.shape, dtype or array.dtype, device=_device_of(array))


def zeros_like(array: Array, dtype: Dtype | None = None) -> Array:
    """Zeros with the shape, device and (unless given) dtype of `array`."""
    return zeros(array.shape, dtype or array.dtype, device=_device_of(array))


def ones_like(array: Array, dtype: Dtype | None = None) -> Array:
    """Ones with the shape, device and (unless given) dtype of `array`."""
    return ones(array.shape, dtype or array.dtype, device=_device_of(array))


def full_like(array: Array, value: float, dtype: Dtype | None = None) -> Array:
    """`value` with the shape, device and (unless given) dtype of `array`."""
    return full(array.shape, value, dtype or array.dtype, device=_device_of(array))


def _from_python(obj: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(obj)
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _dtype(dtype: Dtype) -> np.dtype[Any]:
    if isinstance(dtype, NarrowDtype):
        raise ConfigError(f"dtype: make a {dtype.name} array with asarray(values, {dtype.name})")
    resolved: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return resolved


def _device_of(array: Array) -> DeviceName:
    return "gpu" if is_gpu_array(array) else "cpu"


def _checked(device: str) -> DeviceName:
    if device not in ("cpu", "gpu"):
        raise ConfigError(f"device: expected 'cpu' or 'gpu', got {device!r}")
    return device  # type: ignore[return-value]


def _place(device: DeviceName | None) -> DeviceName:
    place = default_device() if device is None else _checked(device)
    if place == "gpu" and not gpu_available():
        raise UnsupportedDeviceError("device='gpu', but no GPU is here; `cukit doctor` says why")
    return place


def _module(device: DeviceName | None) -> Any:
    return require_cupy("GPU arrays") if _place(device) == "gpu" else np
