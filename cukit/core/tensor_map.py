"""TMA descriptors: how a Hopper kernel asks the copy engine for tiles of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cukit.core import backend
from cukit.core.arrays import Array, address_of
from cukit.core.device import INSTALL_GPU_EXTRA
from cukit.errors import ArrayLayoutError, ArrayShapeError, ConfigError, MissingDependencyError

SWIZZLE_BYTES = (0, 32, 64, 128)
_MOST_AXES = 5
_MOST_BOX = 256
_ALIGNMENT = 16
_DESCRIPTOR = np.dtype((np.void, 128))


class TensorView(NamedTuple):
    """What a map describes: elements at `address` + position * strides, in bytes, of an array that
    takes the bytes from `low` to `high`."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    writeable: bool
    low: int
    high: int


def encode_tensor_map(
    array: Array, box: Sequence[int], *, swizzle_bytes: int = 128
) -> np.ndarray[Any, Any]:
    """A `CUtensorMap` over `array`, passed by value to a kernel (`const __grid_constant__`).

    Args:
        array: CuPy array (NumPy for the emulator) of 2 to 5 axes; last axis contiguous, other
            strides multiples of 16 bytes (of axes with more than one element), 16-byte aligned.
            fp8 travels as uint8.
        box: extent of one tile on each axis of `array`, each at most 256; the innermost extent
            times the element size must be a multiple of 16 bytes and at most `swizzle_bytes` where
            that is not 0.
        swizzle_bytes: 0, 32, 64 or 128: width of the pattern that spreads rows over the banks.

    Returns:
        A NumPy array of one 128-byte element. Elements outside `array` read as zero and are not
        written. It holds the address of `array`: keep that alive, and encode anew for another.

    Raises:
        ArrayLayoutError, ArrayShapeError, ConfigError: the rules above.
        MissingDependencyError: cuda-bindings is not installed.
    """
    _check_tensor(array)
    _check_box(array.shape, array.itemsize, box, swizzle_bytes)
    return _encode(_view(array), box, swizzle_bytes)


def encode_sequence_map(
    array: Array, longest: int, box: Sequence[int], *, swizzle_bytes: int = 128
) -> np.ndarray[Any, Any]:
    """A map of sequences that lie one behind the other, each with nothing but zeros behind it.

    Row `i` of a sequence of `length` rows that ends before row `end` of the array is found at
    `[end, longest - length + i, ...]`; what lies behind its last row is outside, and zero, though
    another sequence may begin there.

    Args:
        array: [rows, ...], 2 to 4 axes, as encode_tensor_map asks for.
        longest: no sequence has more rows.
        box: extents of the map's axes, one more than the array's: [1, rows, ...].
        swizzle_bytes: as in encode_tensor_map.

    The map begins `longest` rows before the array, and a step along either of its first two axes is
    a step of a row: no position that is inside leads to what is not the array's. Its own first
    address may lie in memory that is not mapped, and TMA touches that address when a box is wholly
    outside the tensor, whatever is outside: rows or columns. So a kernel must ask only for boxes
    with at least one element inside (seen on Hopper; the emulator reports it).
    """
    _check_tensor(array)
    whole = _view(array)
    shape = (array.shape[0] + 1, longest, *array.shape[1:])
    _check_box(shape, array.itemsize, box, swizzle_bytes)
    row = whole.strides[0]
    view = whole._replace(
        address=whole.address - longest * row, shape=shape, strides=(row, *whole.strides)
    )
    return _encode(view, box, swizzle_bytes)


def _encode(view: TensorView, box: Sequence[int], swizzle_bytes: int) -> np.ndarray[Any, Any]:
    if backend.active is not None:
        return backend.active.encode_tensor_map(view, box, swizzle_bytes)
    driver = _driver()
    rank = len(view.shape)
    status, tensor_map = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, _data_type(view.dtype)),
        rank,
        view.address,
        [driver.cuuint64_t(extent) for extent in reversed(view.shape)],
        [driver.cuuint64_t(stride) for stride in reversed(view.strides[:-1])],
        [driver.cuuint32_t(extent) for extent in reversed(tuple(box))],
        [driver.cuuint32_t(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, _swizzle_name(swizzle_bytes)),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status) != 0:
        raise ArrayLayoutError(
            f"encode_tensor_map: the driver refused shape {view.shape}, strides {view.strides}, "
            f"box {tuple(box)}, swizzle {swizzle_bytes}: {status!r}"
        )
    words = np.array([int(word) for word in tensor_map.opaque], np.uint64)
    return words.view(_DESCRIPTOR)


def _driver() -> ModuleType:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MissingDependencyError(f"TMA needs cuda-bindings: {INSTALL_GPU_EXTRA}") from error
    return driver  # type: ignore[no-any-return]


def _swizzle_name(swizzle_bytes: int) -> str:
    suffix = f"{swizzle_bytes}B" if swizzle_bytes else "NONE"
    return f"CU_TENSOR_MAP_SWIZZLE_{suffix}"


def _data_type(dtype: np.dtype[Any]) -> str:
    names = {
        "float32": "FLOAT32",
        "float16": "FLOAT16",
        "bfloat16": "BFLOAT16",
        "uint8": "UINT8",
        "int8": "UINT8",
        "int32": "INT32",
        "uint16": "UINT16",
        "float64": "FLOAT64",
    }
    if dtype.name not in names:
        raise ConfigError(
            f"encode_tensor_map: dtype must be one of {', '.join(names)}, got {dtype.name}"
        )
    return f"CU_TENSOR_MAP_DATA_TYPE_{names[dtype.name]}"


def _strides(array: Array) -> list[int]:
    """Of all axes but the last; one that is never stepped along gets any the driver accepts."""
    axes = zip(array.strides[:-1], array.shape[:-1], strict=True)
    return [stride if extent > 1 else _ALIGNMENT for stride, extent in axes]


def _view(array: Array) -> TensorView:
    low = address_of(array)
    last = zip(array.shape, array.strides, strict=True)
    return TensorView(
        low,
        array.shape,
        (*_strides(array), array.itemsize),
        array.dtype,
        array.flags.writeable if isinstance(array, np.ndarray) else True,
        low,
        low + sum((extent - 1) * stride for extent, stride in last) + array.itemsize,
    )


def _check_tensor(array: Array) -> None:
    if not 2 <= array.ndim <= _MOST_AXES:
        raise ArrayShapeError(f"encode_tensor_map: 2 to 5 axes, got shape {array.shape}")
    if array.strides[-1] != array.itemsize:
        raise ArrayLayoutError(
            f"encode_tensor_map: the last axis must be contiguous, got strides {array.strides}"
        )
    if any(stride % _ALIGNMENT or stride < 0 for stride in _strides(array)):
        raise ArrayLayoutError(
            f"encode_tensor_map: strides must be multiples of 16 bytes, got {array.strides}"
        )
    if address_of(array) % _ALIGNMENT:
        raise ArrayLayoutError("encode_tensor_map: the array must be 16-byte aligned")


def _check_box(
    shape: tuple[int, ...], itemsize: int, box: Sequence[int], swizzle_bytes: int
) -> None:
    if swizzle_bytes not in SWIZZLE_BYTES:
        raise ConfigError(
            f"encode_tensor_map: swizzle_bytes must be one of {SWIZZLE_BYTES}, got {swizzle_bytes}"
        )
    if len(box) != len(shape) or not all(1 <= extent <= _MOST_BOX for extent in box):
        raise ConfigError(
            f"encode_tensor_map: box needs {len(shape)} extents of 1..{_MOST_BOX}, got {tuple(box)}"
        )
    row_bytes = box[-1] * itemsize
    if row_bytes % 16 or (swizzle_bytes and row_bytes > swizzle_bytes):
        raise ConfigError(
            f"encode_tensor_map: a box row has {row_bytes} bytes; expected a multiple of 16"
            + (f" up to {swizzle_bytes}" if swizzle_bytes else "")
        )
