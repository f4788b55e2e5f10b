"""TMA descriptors: how a Hopper kernel asks the copy engine for tiles of a tensor."""

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
from cukit.core.kernel import by_value, bytes_by_value
from cukit.errors import ArrayLayoutError, ArrayShapeError, ConfigError, UnsupportedDeviceError

SWIZZLE_BYTES = (0, 32, 64, 128)
_MOST_AXES = 5
_MOST_BOX = 256
_MOST_MAPS = 256
_ALIGNMENT = 16
_DESCRIPTOR = np.dtype((np.void, 128))

Box = tuple[int, ...]


class TensorMapCache:
    """Tensor maps of arrays of one description, by address.

    A map holds nothing but that and the address; encoding one takes as long as a launch. Memory
    pools hand out the same addresses again and again.
    """

    __slots__ = ("_encode", "_known")

    def __init__(self, encode: Callable[[Array], Any]) -> None:
        """`encode`: from an array to its map."""
        self._encode = encode
        self._known: dict[int, Any] = {}

    def __call__(self, array: Array) -> Any:
        """The map of an array, in the form that a launch takes."""
        address = address_of(array)
        found = self._known.get(address)
        if found is None:
            found = self._encode(array)
            if type(found) is np.ndarray:
                found = by_value(found)
            if len(self._known) >= _MOST_MAPS:
                self._known.clear()
            self._known[address] = found
        return found


def encode_tensor_map(
    array: Array, box: Box, *, swizzle_bytes: int = 128, batches: bool = False
) -> Any:
    """A `CUtensorMap` over `array`, passed by value to a kernel (`const __grid_constant__`).

    Args:
        array: CuPy array (NumPy for the emulator) of 2 to 5 axes; last axis contiguous, other
            strides multiples of 16 bytes (of axes with more than one element), 16-byte aligned.
            fp8 travels as uint8.
        box: extent of one tile on each axis of `array`, each at most 256; the innermost extent
            times the element size must be a multiple of 16 bytes and at most `swizzle_bytes` where
            that is not 0.
        swizzle_bytes: 0, 32, 64 or 128: width of the pattern that spreads rows over the banks.
        batches: where `array` has an axis less than `box`, it is the only one of a batch.

    Returns:
        An argument for a launch: what `core.kernel.by_value` makes of 128 bytes, for the emulator
        the bytes as a NumPy array. Elements outside `array` read as zero and are not written. It
        holds the address of `array`: keep that alive, and encode anew for another.

    Raises:
        ArrayLayoutError, ArrayShapeError, ConfigError: the rules above.
    """
    shape, strides = array.shape, array.strides
    if batches and len(shape) < len(box):
        shape, strides = (1, *shape), (0, *strides)
    layout = _layout(shape, strides, array.itemsize)
    return _encode(array, _aligned_address(array), layout, box, swizzle_bytes)


def encode_sequence_map(array: Array, longest: int, box: Box, *, swizzle_bytes: int = 128) -> Any:
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
    (rows, *others), itemsize = array.shape, array.itemsize
    row, *steps = _layout(array.shape, array.strides, itemsize).steps
    layout = _layout((rows + 1, longest, *others), (row, row, *steps), itemsize)
    return _encode(array, _aligned_address(array) - longest * row, layout, box, swizzle_bytes)


def _encode(array: Array, address: int, layout: _Layout, box: Box, swizzle_bytes: int) -> Any:
    shape, steps = layout.shape, layout.steps
    given = _driver_arguments(array.dtype, box, len(shape), swizzle_bytes)
    if backend.active is not None:
        view = backend.TensorView(address, shape, steps, array)
        return backend.active.encode_tensor_map(view, box, swizzle_bytes)
    room: Any = _Room()
    begin = ctypes.addressof(room)
    start = -begin % _MAP_ALIGNMENT
    arguments = (
        ctypes.c_void_p(begin + start),
        given.dtype,
        len(shape),
        ctypes.c_void_p(address),
        layout.extents,
        layout.strides,
        given.box,
        given.steps,
        _NO_INTERLEAVE,
        given.swizzle,
        _PROMOTE_TO_256_BYTES,
        _FILL_WITH_ZEROS,
    )
    status = _driver_function()(*arguments)
    if status == _INVALID_CONTEXT:  # a thread that has not called CUDA's runtime yet
        array.device.use()
        require_cupy("tensor maps").cuda.runtime.free(0)
        status = _driver_function()(*arguments)
    if status != 0:
        raise ArrayLayoutError(
            f"encode_tensor_map: the driver refused shape {shape}, strides {steps}, "
            f"box {box}, swizzle {swizzle_bytes}: CUDA error {status}"
        )
    encoded = bytes_by_value(room, begin + start, _DESCRIPTOR.itemsize)
    return np.frombuffer(room, _DESCRIPTOR, 1, start) if encoded is None else encoded


# cuda.h: members of CUtensorMapDataType by NumPy's names, and of the other enumerations.
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
_Room = ctypes.c_char * (_DESCRIPTOR.itemsize + _MAP_ALIGNMENT)


class _DriverArguments(NamedTuple):
    """What of a map does not depend on the array, as the driver takes it."""

    dtype: int
    box: bytes
    steps: bytes
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
    """`cuTensorMapEncodeTiled`. cuda-bindings makes an object of every number, which takes longer
    than the call. The call returns at once: the interpreter stays locked."""
    try:
        function = ctypes.PyDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise UnsupportedDeviceError(f"TMA needs a driver of CUDA 12 or newer: {error}") from error
    # Without argtypes ctypes takes numbers as int, and bytes by their address, in half the time.
    return function


class _Layout(NamedTuple):
    """Where the elements of an array lie: as numbers, strides in bytes, and as the driver takes
    them."""

    shape: tuple[int, ...]
    steps: tuple[int, ...]
    extents: bytes
    strides: bytes


_WORDS = [struct.Struct(f"{count}Q") for count in range(_MOST_AXES + 1)]


@functools.lru_cache(maxsize=_MOST_MAPS)
def _layout(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> _Layout:
    """Arrays of one layout come together: keys and values, queries and their gradient. An axis that
    is never stepped along gets any stride the driver accepts."""
    axes = len(shape)
    if not 2 <= axes <= _MOST_AXES:
        raise ArrayShapeError(f"encode_tensor_map: 2 to 5 axes, got shape {shape}")
    if strides[-1] != itemsize:
        raise ArrayLayoutError(
            f"encode_tensor_map: the last axis must be contiguous, got strides {strides}"
        )
    steps = [
        stride if extent > 1 else _ALIGNMENT
        for stride, extent in zip(strides[:-1], shape, strict=False)
    ]
    for step in steps:
        if step % _ALIGNMENT or step < 0:
            raise ArrayLayoutError(
                f"encode_tensor_map: strides must be multiples of 16 bytes, got {strides}"
            )
    extents = _WORDS[axes].pack(*shape[::-1])
    return _Layout(shape, (*steps, itemsize), extents, _WORDS[axes - 1].pack(*steps[::-1]))


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
    if len(box) != axes or not all(1 <= extent <= _MOST_BOX for extent in box):
        raise ConfigError(
            f"encode_tensor_map: box needs {axes} extents of 1..{_MOST_BOX}, got {box}"
        )
    row_bytes = box[-1] * itemsize
    if row_bytes % 16 or (swizzle_bytes and row_bytes > swizzle_bytes):
        raise ConfigError(
            f"encode_tensor_map: a box row has {row_bytes} bytes; expected a multiple of 16"
            + (f" up to {swizzle_bytes}" if swizzle_bytes else "")
        )
