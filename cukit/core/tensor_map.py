"""TMA descriptors (tensor maps), which describe a tensor and its tiles to the TMA unit (sm_90)."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cukit.core import backend
from cukit.core.arrays import Array, address_of
from cukit.core.device import require_cupy
from cukit.core.kernel import bytes_by_value
from cukit.errors import ArrayLayoutError, ArrayShapeError, ConfigError, UnsupportedDeviceError

SWIZZLE_BYTES = (0, 32, 64, 128)
_MAX_AXES = 5
_MAX_BOX = 256
_MAX_MAPS = 256
_ALIGNMENT = 16
_DESCRIPTOR = np.dtype((np.void, 128))

Box = tuple[int, ...]


class TensorMapCache:
    """Tensor maps of arrays of one description (shape, strides, dtype), cached by address.

    A map depends only on description and address. Encoding one takes as long as a launch, and
    memory pools reuse addresses.
    """

    __slots__ = ("_encode", "_last", "_others")

    def __init__(self, encode: Callable[[Array], Any]) -> None:
        """encode: returns the map of an array."""
        self._encode = encode
        # Not in the dictionary: a cache made for a new length usually holds a single map.
        self._last: tuple[int, Any] = _NO_MAP
        self._others: dict[int, Any] = {}

    def __call__(self, array: Array) -> Any:
        """The map of an array as a launch argument."""
        address = address_of(array)
        known, found = last = self._last
        if address == known:
            return found
        found = self._others.get(address)
        if found is None:
            found = self._encode(array)
        if last is not _NO_MAP:
            if len(self._others) >= _MAX_MAPS:
                self._others.clear()
            self._others[known] = last[1]
        self._last = address, found
        return found


_NO_MAP = (-1, None)


def encode_tensor_map(
    array: Array, box: Box, *, swizzle_bytes: int | None = 128, batches: bool = False
) -> Any:
    """A `CUtensorMap` over `array`, passed by value to a kernel (`const __grid_constant__`).

    Args:
        array: CuPy array (NumPy for the emulator) of 2 to 5 axes, 16-byte aligned; last axis
            contiguous, other strides multiples of 16 bytes (of axes with more than one element).
            FP8 is passed as uint8.
        box: extent of one tile on each axis of `array`, each at most 256; the innermost extent
            times the element size must be a multiple of 16 bytes, and at most `swizzle_bytes`
            unless that is 0.
        swizzle_bytes: 0, 32, 64 or 128: width of the shared-memory swizzle pattern; None: the
            size of a box row.
        batches: if `array` has one axis fewer than `box`, prepend a batch axis of extent 1.

    Returns:
        A launch argument: 128 bytes in the form of `core.kernel.by_value`, or as a NumPy array for
        the emulator. Elements outside `array` read as zero and are not written. The map contains
        the address of `array`, which must stay alive.

    Raises:
        ArrayLayoutError, ArrayShapeError, ConfigError: a requirement above is violated.
    """
    shape, strides = array.shape, array.strides
    if batches and len(shape) < len(box):
        shape, strides = (1, *shape), (0, *strides)
    itemsize = array.itemsize
    layout = _layout(shape, strides, itemsize)
    if swizzle_bytes is None:
        swizzle_bytes = box[-1] * itemsize
    return _encode(array, _aligned_address(array), layout, box, swizzle_bytes)


def encode_sequence_map(array: Array, longest: int, box: Box, *, swizzle_bytes: int = 128) -> Any:
    """A map of packed variable-length sequences in which rows past the end of a sequence read as 0.

    Row `i` of a sequence of `length` rows that ends before row `end` of the array has the
    coordinates `[end, longest - length + i, ...]`. Rows past the end of the sequence are out of
    bounds of the map and therefore zero, even if another sequence is stored there.

    Args:
        array: [rows, ...], 2 to 4 axes, as required by encode_tensor_map.
        longest: upper bound of the sequences' row counts.
        box: extents of a tile: [1, rows, ...], one axis more than the array.
        swizzle_bytes: as in encode_tensor_map.

    The map starts `longest` rows before the array, and its first two axes both have the stride of a
    row. The coordinates above stay within the array, but the map's base address may be unmapped,
    and TMA accesses that address for a box that is completely out of bounds, in rows or in columns.
    A kernel must therefore only load boxes with at least one element in bounds (observed on Hopper;
    the emulator reports violations).
    """
    (rows, *others), itemsize = array.shape, array.itemsize
    row, *strides = _layout(array.shape, array.strides, itemsize).strides
    layout = _layout((rows + 1, longest, *others), (row, row, *strides), itemsize)
    return _encode(array, _aligned_address(array) - longest * row, layout, box, swizzle_bytes)


def _encode(array: Array, address: int, layout: _Layout, box: Box, swizzle_bytes: int) -> Any:
    shape, strides = layout.shape, layout.strides
    given = _driver_arguments(array.dtype, box, len(shape), swizzle_bytes)
    if backend.active is not None:
        view = backend.TensorView(address, shape, strides, array)
        return backend.active.encode_tensor_map(view, box, swizzle_bytes)
    buffer: Any = _Buffer()
    begin = ctypes.addressof(buffer)
    start = -begin % _MAP_ALIGNMENT
    arguments = (
        ctypes.c_void_p(begin + start),
        given.dtype,
        len(shape),
        ctypes.c_void_p(address),
        layout.packed_shape,
        layout.packed_strides,
        given.box,
        given.element_strides,
        _NO_INTERLEAVE,
        given.swizzle,
        _PROMOTE_TO_256_BYTES,
        _FILL_WITH_ZEROS,
    )
    status = _driver_function()(*arguments)
    if status == _INVALID_CONTEXT:  # a thread that has not called the CUDA runtime yet
        array.device.use()
        require_cupy("tensor maps").cuda.runtime.free(0)
        status = _driver_function()(*arguments)
    if status != 0:
        raise ArrayLayoutError(
            f"encode_tensor_map: the driver refused shape {shape}, strides {strides}, "
            f"box {box}, swizzle {swizzle_bytes}: CUDA error {status}"
        )
    encoded = bytes_by_value(buffer, begin + start, _DESCRIPTOR.itemsize)
    return np.frombuffer(buffer, _DESCRIPTOR, 1, start) if encoded is None else encoded


# Values from cuda.h: CUtensorMapDataType by NumPy dtype name, then other enumerations.
_DATA_TYPES = {
    "uint8": 0,
    "int8": 0,
    "uint16": 1,
    "int32": 3,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
_NO_INTERLEAVE = 0
_PROMOTE_TO_256_BYTES = 3  # in L2
_INVALID_CONTEXT = 201
_FILL_WITH_ZEROS = 0
_MAP_ALIGNMENT = 64
_Buffer = ctypes.c_char * (_DESCRIPTOR.itemsize + _MAP_ALIGNMENT)


class _DriverArguments(NamedTuple):
    """The driver arguments that do not depend on the array."""

    dtype: int
    box: bytes
    element_strides: bytes
    swizzle: int


@functools.lru_cache(maxsize=256)
def _driver_arguments(
    dtype: np.dtype[Any], box: Box, axes: int, swizzle_bytes: int
) -> _DriverArguments:
    if dtype.name not in _DATA_TYPES:
        raise ConfigError(
            f"encode_tensor_map: dtype must be one of {', '.join(_DATA_TYPES)}, got {dtype.name}"
        )
    _check_box(axes, dtype.itemsize, box, swizzle_bytes)
    return _DriverArguments(
        _DATA_TYPES[dtype.name],
        struct.pack(f"{axes}I", *reversed(box)),
        struct.pack(f"{axes}I", *[1] * axes),
        SWIZZLE_BYTES.index(swizzle_bytes),
    )


@functools.cache
def _driver_function() -> Any:
    """`cuTensorMapEncodeTiled` through ctypes: cuda-bindings wraps every number in an object, which
    takes longer than the call. PyDLL keeps the GIL, because the call is short."""
    try:
        function = ctypes.PyDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise UnsupportedDeviceError(f"TMA needs a CUDA 12 driver or newer: {error}") from error
    # Without argtypes, ctypes passes numbers as int and bytes by address, and takes half as long.
    return function


class _Layout(NamedTuple):
    """Shape and strides in bytes of an array, as tuples and packed for the driver."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    packed_shape: bytes
    packed_strides: bytes


_WORDS = [struct.Struct(f"{count}Q") for count in range(_MAX_AXES + 1)]


@functools.lru_cache(maxsize=_MAX_MAPS)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> _Layout:
    """Cached, because several arrays of a call have the same layout: keys and values, queries and
    their gradient. Axes of one element get a stride that the driver accepts."""
    axes = len(shape)
    if not 2 <= axes <= _MAX_AXES:
        raise ArrayShapeError(f"encode_tensor_map: expected 2 to 5 axes, got shape {shape}")
    if strides[-1] != itemsize:
        raise ArrayLayoutError(
            f"encode_tensor_map: the last axis must be contiguous, got strides {strides}"
        )
    outer = [
        stride if extent > 1 else _ALIGNMENT
        for stride, extent in zip(strides[:-1], shape, strict=False)
    ]
    for stride in outer:
        if stride % _ALIGNMENT or stride < 0:
            raise ArrayLayoutError(
                f"encode_tensor_map: strides must be multiples of 16 bytes, got {strides}"
            )
    packed_shape = _WORDS[axes].pack(*shape[::-1])
    packed_strides = _WORDS[axes - 1].pack(*outer[::-1])
    return _Layout(shape, (*outer, itemsize), packed_shape, packed_strides)


def _aligned_address(array: Array) -> int:
    address = address_of(array)
    if address % _ALIGNMENT:
        raise ArrayLayoutError("encode_tensor_map: the array must be 16-byte aligned")
    return address


def _check_box(axes: int, itemsize: int, box: Box, swizzle_bytes: int) -> None:
    if swizzle_bytes not in SWIZZLE_BYTES:
        raise ConfigError(
            f"encode_tensor_map: swizzle_bytes must be one of {SWIZZLE_BYTES}, got {swizzle_bytes}"
        )
    if len(box) != axes or not all(1 <= extent <= _MAX_BOX for extent in box):
        raise ConfigError(
            f"encode_tensor_map: box needs {axes} extents of 1..{_MAX_BOX}, got {box}"
        )
    row_bytes = box[-1] * itemsize
    if row_bytes % 16 or (swizzle_bytes and row_bytes > swizzle_bytes):
        raise ConfigError(
            f"encode_tensor_map: a box row has {row_bytes} bytes; expected a multiple of 16"
            + (f" up to {swizzle_bytes}" if swizzle_bytes else "")
        )
