"""Arrays of 8-bit and 4-bit codes, with or without scales, used by all op families.

CuPy has neither FP8 nor sub-byte dtypes, so a QuantizedArray pairs the bytes in memory with their
interpretation:

    value = (code - zero_point) * scale

Blocks of elements share a scale, specified as in a NumPy reduction: `axis` names the axes along
which elements share a scale, `group_size` the number of elements that share one.

| scales of                                  | axis     | group_size | scales.shape for [n, k]    |
| ------------------------------------------ | -------- | ---------- | -------------------------- |
| the tensor                                 | None     | None       | [1, 1]                     |
| each row (token, output channel)           | 1        | None       | [n, 1]                     |
| each column (channel of a key cache)       | 0        | None       | [1, k]                     |
| 128 elements of a row (int4 weights, 1x128)| 1        | 128        | [n, ceil(k / 128)]         |
| 32 tokens of a column (KIVI's keys)        | 0        | 32         | [ceil(n / 32), k]          |
| blocks of 128x128                          | (0, 1)   | 128        | [ceil(n/128), ceil(k/128)] |
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from cukit.core.arrays import (
    KERNEL_DTYPES,
    Array,
    adopt,
    bfloat16,
    check_array,
    float32,
    is_gpu_array,
)
from cukit.core.device import gpu_available, require_cupy
from cukit.core.narrow_dtype import NARROW_DTYPES, NarrowDtype
from cukit.core.scalars import check_shape
from cukit.errors import (
    ArrayDtypeError,
    ArrayError,
    ArrayLayoutError,
    ArrayShapeError,
    ConfigError,
    UnsupportedDeviceError,
)

__all__ = ["QuantizedArray", "block_shape", "install_conversions", "is_float8", "scales_shape"]

SCALE_DTYPES = KERNEL_DTYPES
ZERO_POINT_DTYPES = (np.dtype(np.int8), *KERNEL_DTYPES)

Axis = int | Sequence[int] | None
GroupSize = int | Sequence[int | None] | None

_NAME = "QuantizedArray"

_conversions: dict[str, Callable[..., Any]] = {}


def install_conversions(**functions: Callable[..., Any]) -> None:
    """Sets the functions that :meth:`QuantizedArray.encode` and `decode` call: `encode`, `decode`
    and `dequantize`.

    core must not import the ops, so the modules that define these functions install them on import.
    """
    _conversions.update(functions)


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedArray:
    """Codes, their element type, and optional scales. Shares memory with the arrays passed in.

    storage: int8 for int8, else uint8; the logical shape with the last extent in bytes (for int4
        half of it, rounded up). Any strides; each op documents the layouts it supports.
    dtype: element type of the codes.
    shape: logical shape, at least one axis.
    scales: None, or float32|float16|bfloat16 with extent ceil(shape[i] / block_shape[i]) for each
        axis i of the array.
    zero_points: None, or int8|float32|float16|bfloat16 with the shape of scales; integer dtypes
        only.
    axis: with scales: the axis or axes along which elements share a scale; None means all axes.
        Stored as an ascending tuple.
    group_size: with scales: number of consecutive elements along `axis` that share a scale, one
        number for all its axes or one per axis; None means the whole axis. The last group may be
        shorter. Stored as a tuple.

    Raises ArrayShapeError, ArrayDtypeError, ArrayLayoutError or ConfigError if the arguments are
    inconsistent.

    >>> import numpy as np, cukit as ck
    >>> weights = np.array([[0.5, -1.0, 2.0], [3.0, 0.0, -6.0]], np.float32)
    >>> scales = np.array([[0.5], [1.5]], np.float32)
    >>> quantized = ck.QuantizedArray.encode(weights, ck.int4, scales=scales, axis=1)
    >>> quantized
    QuantizedArray(int4, shape=(2, 3), scales=float32 (2, 1), axis=1, group_size=3)
    >>> quantized.decode()
    array([[ 0.5, -1. ,  2. ],
           [ 3. ,  0. , -6. ]], dtype=float32)
    """

    storage: Array
    dtype: NarrowDtype
    shape: tuple[int, ...]
    scales: Array | None = None
    zero_points: Array | None = None
    axis: Axis = None
    group_size: GroupSize = None
    block_shape: tuple[int, ...] | None = field(default=None, init=False)
    """Elements along each axis that share a scale; None without scales."""

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, NarrowDtype):
            raise ArrayDtypeError(
                f"{_NAME}: dtype must be one of {', '.join(d.name for d in NARROW_DTYPES)}, "
                f"got {self.dtype!r}"
            )
        storage, scales, zero_points = adopt(_NAME, self.storage, self.scales, self.zero_points)
        shape = check_shape(_NAME, self.shape)
        self._set(storage=storage, scales=scales, zero_points=zero_points, shape=shape)
        _check_storage(storage, self.dtype, self.shape)
        if scales is not None:
            self._check_scales()
            return
        for name in ("zero_points", "axis", "group_size"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{_NAME}: {name} needs scales, got none")

    def _set(self, **fields: Any) -> None:
        """Sets fields of this frozen dataclass to their normal form; for `__post_init__` only."""
        self.__dict__.update(fields)

    def _check_scales(self) -> None:
        grouping = _grouping(self.shape, self.axis, self.group_size)
        self._set(
            axis=grouping.axis,
            group_size=grouping.group_size,
            block_shape=grouping.block_shape,
        )
        _check_factors("scales", self.scales, SCALE_DTYPES, self, grouping)
        if self.zero_points is not None:
            if not self.dtype.integer:
                raise ArrayDtypeError(
                    f"{_NAME}: zero_points are for integer dtypes, got {self.dtype.name}"
                )
            _check_factors("zero_points", self.zero_points, ZERO_POINT_DTYPES, self, grouping)

    @staticmethod
    def encode(
        x: Array,
        dtype: NarrowDtype,
        *,
        scales: Array | None = None,
        zero_points: Array | None = None,
        axis: Axis = None,
        group_size: GroupSize = None,
    ) -> QuantizedArray:
        """Rounds `x` to the nearest codes: round(x / scale + zero_point), ties to even, saturating.

        x: float32|float16|bfloat16 [..., n], any layout. Overflow and infinities saturate to the
            largest finite value; NaN stays NaN in float8 and becomes 0 in integers.
        Other arguments as for the class; without scales, x itself is rounded. A scale below 2^-126
        in magnitude, such as 0, is treated as 1. `quantize` also computes the scales.
        """
        array: QuantizedArray = _conversions["encode"](
            x, dtype, scales, zero_points, axis, group_size
        )
        return array

    def decode(self, dtype: Any = float32) -> Array:
        """The values, scales applied, as float32, float16 or bfloat16 on the same device."""
        return _conversions["decode" if self.scales is None else "dequantize"](self, dtype)

    dequantize = decode

    def dense(self) -> Array:
        """`decode()` to float32."""
        return self.decode()

    def astype(self, dtype: Any) -> Array:
        """The values as `dtype`: an array for a NumPy dtype, a QuantizedArray without scales for a
        NarrowDtype."""
        if isinstance(dtype, NarrowDtype):
            return self.encode(self.decode(), dtype)
        resolved = np.dtype(bfloat16 if dtype == "bfloat16" else dtype)
        return (
            self.decode(resolved) if resolved in KERNEL_DTYPES else self.decode().astype(resolved)
        )

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        arrays = (self.storage, self.scales, self.zero_points)
        return sum(int(array.nbytes) for array in arrays if array is not None)

    @property
    def device(self) -> Literal["cpu", "gpu"]:
        """Device of the arrays, as named by `asarray`."""
        return "gpu" if is_gpu_array(self.storage) else "cpu"

    def copy(self) -> QuantizedArray:
        """A C-contiguous copy."""
        return self._map(lambda array: array.copy(order="C"))

    def to_device(self, device: Literal["cpu", "gpu"]) -> QuantizedArray:
        """This array if it is on `device`, else a copy on `device`.

        Raises UnsupportedDeviceError for `"gpu"` without a GPU.
        """
        if device not in ("cpu", "gpu"):
            raise ConfigError(f"device: expected 'cpu' or 'gpu', got {device!r}")
        if device == self.device:
            return self
        if device == "cpu":
            return self._map(lambda array: array.get())
        if not gpu_available():
            raise UnsupportedDeviceError("device='gpu', but no GPU was found; run `cukit doctor`")
        return self._map(require_cupy("GPU arrays").asarray)

    def __getitem__(self, index: int | slice) -> QuantizedArray:
        """Indexes the first axis without a copy (requires at least two axes).

        A slice that spans several groups of the first axis must start at a group boundary and have
        step 1.
        """
        if self.ndim < 2:
            raise ArrayShapeError(f"{_NAME}: arrays of one axis cannot be indexed; use decode()")
        if not isinstance(index, (int, np.integer, slice)):
            raise ArrayError(
                f"{_NAME}: index must be an int or a slice of the first axis, "
                f"got {type(index).__name__}"
            )
        storage = self.storage[index]
        shape = (*storage.shape[:-1], self.shape[-1])
        if self.scales is None:
            return QuantizedArray(storage, self.dtype, shape)
        grouping = _grouping(self.shape, self.axis, self.group_size)
        groups = _groups_of(index, self.shape[0], grouping.block_shape[0])
        dropped = 0 if isinstance(index, slice) else 1
        sizes = zip(grouping.axis, grouping.group_size, strict=True)
        kept = [(axis - dropped, size) for axis, size in sizes if axis >= dropped]
        return QuantizedArray(
            storage,
            self.dtype,
            shape,
            self.scales[groups],
            None if self.zero_points is None else self.zero_points[groups],
            tuple(axis for axis, _ in kept),
            tuple(size for _, size in kept),
        )

    def __repr__(self) -> str:
        parts = [self.dtype.name, f"shape={self.shape}"]
        for name in ("scales", "zero_points"):
            array = getattr(self, name)
            if array is not None:
                parts.append(f"{name}={array.dtype.name} {array.shape}")
        if self.scales is not None:
            for name in ("axis", "group_size"):
                values = getattr(self, name)
                parts.append(f"{name}={values[0] if len(values) == 1 else values}")
        return f"{_NAME}({', '.join(parts)})"

    def _map(self, function: Callable[[Array], Array]) -> QuantizedArray:
        return replace(
            self,
            storage=function(self.storage),
            scales=None if self.scales is None else function(self.scales),
            zero_points=None if self.zero_points is None else function(self.zero_points),
        )


def block_shape(
    shape: Sequence[int], axis: Axis = None, group_size: GroupSize = None
) -> tuple[int, ...]:
    """Extents of the blocks of an array of `shape` whose elements share a scale."""
    return _grouping(shape, axis, group_size).block_shape


def scales_shape(
    shape: Sequence[int], axis: Axis = None, group_size: GroupSize = None
) -> tuple[int, ...]:
    """The shape of the scales of an array of `shape`; see the table in the module docstring."""
    return _grouping(shape, axis, group_size).scales_shape


def is_float8(*arrays: Any) -> bool:
    """Whether any argument is a QuantizedArray of float8."""
    for array in arrays:  # noqa: SIM110  faster than a generator; runs on every attention call
        if isinstance(array, QuantizedArray) and not array.dtype.integer:
            return True
    return False


class _Grouping(NamedTuple):
    axis: tuple[int, ...]
    group_size: tuple[int, ...]
    block_shape: tuple[int, ...]
    scales_shape: tuple[int, ...]


def _grouping(shape: Sequence[int], axis: Axis, group_size: GroupSize) -> _Grouping:
    """axis and group_size in normal form (ascending axes, one number each), and the shapes that
    follow from them."""
    axes = None if axis is None else _integers("axis", axis)
    sizes = None if group_size is None else _integers("group_size", group_size, optional=True)
    return _group(tuple(shape), (axes,) if isinstance(axes, int) else axes, sizes)


def _integers(name: str, value: Any, *, optional: bool = False) -> Any:
    """`value`, an integer or a sequence of integers, as an int or a tuple of ints.

    optional: None is allowed too. Raises ConfigError for any other value.
    """
    if type(value) is int:
        return value
    several = isinstance(value, (list, tuple, range))
    try:
        plain = tuple(
            None if each is None and optional else _index(each)
            for each in (value if several else (value,))
        )
    except TypeError:
        raise ConfigError(
            f"{_NAME}: {name} must be None, an integer or a sequence of them, got {value!r}"
        ) from None
    return plain if several else plain[0]


def _index(value: Any) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError
    return operator.index(value)


@lru_cache(maxsize=4096)
def _group(
    shape: tuple[int, ...],
    axis: tuple[int, ...] | None,
    group_size: int | tuple[int | None, ...] | None,
) -> _Grouping:
    ndim = len(shape)
    axes = tuple(range(ndim)) if axis is None else axis
    if any(not -ndim <= a < ndim for a in axes) or len({a % ndim for a in axes}) < len(axes):
        raise ConfigError(f"{_NAME}: axis must name distinct axes of shape {shape}, got {axis}")
    sizes = group_size if isinstance(group_size, tuple) else (group_size,) * len(axes)
    if len(sizes) != len(axes) or any(size is not None and size < 1 for size in sizes):
        raise ConfigError(
            f"{_NAME}: group_size must be None, a positive integer, or one of these for each of "
            f"the axes {axes}, got {group_size}"
        )
    block = [1] * ndim
    for a, size in zip(axes, sizes, strict=True):
        block[a] = max(1, shape[a]) if size is None else int(size)
    ascending = tuple(sorted(a % ndim for a in axes))
    return _Grouping(
        axis=ascending,
        group_size=tuple(block[a] for a in ascending),
        block_shape=tuple(block),
        scales_shape=tuple(-(-n // size) for n, size in zip(shape, block, strict=True)),
    )


def _groups_of(index: int | slice, extent: int, size: int) -> int | slice:
    """The groups of `size` elements that `index` selects from an axis."""
    if not isinstance(index, slice):
        return int(index) % extent // size
    start, stop, step = index.indices(extent)
    if size == 1:
        return index
    chosen = range(start, stop, step)
    if not chosen:
        return slice(0, 0)
    first, last = start // size, chosen[-1] // size
    if first != last and (step != 1 or start % size):
        raise ArrayShapeError(
            f"{_NAME}: a slice across groups of {size} must start at a group boundary and have "
            f"step 1, got {start}:{stop}:{step}"
        )
    return slice(first, last + 1)


def _check_storage(storage: Array, dtype: NarrowDtype, shape: tuple[int, ...]) -> None:
    if not shape:
        raise ArrayShapeError(f"{_NAME}: shape must have at least one axis, got ()")
    name = f"storage of {dtype.name}"
    check_array(_NAME, name, storage, dtypes=(dtype.storage_dtype,), contiguous=None)
    expected = dtype.storage_shape(shape)
    if storage.shape != expected:
        raise ArrayShapeError(
            f"{_NAME}: storage of {dtype.name} of shape {shape} must have shape {expected}, "
            f"got {storage.shape}"
        )


def _check_factors(
    name: str,
    factors: Array,
    dtypes: Sequence[np.dtype[Any]],
    array: QuantizedArray,
    grouping: _Grouping,
) -> None:
    """Checks scales or zero points of `array`."""
    check_array(_NAME, name, factors, dtypes=dtypes, contiguous=None)
    if factors.shape != grouping.scales_shape:
        raise ArrayShapeError(
            f"{_NAME}: {name} of shape {array.shape} in blocks of {grouping.block_shape} must have "
            f"shape {grouping.scales_shape}, got {factors.shape}"
        )
    if is_gpu_array(factors) != is_gpu_array(array.storage):
        places = ["GPU" if is_gpu_array(a) else "CPU" for a in (array.storage, factors)]
        raise ArrayLayoutError(
            f"{_NAME}: all arrays must be on one device, got storage on the {places[0]} and "
            f"{name} on the {places[1]}"
        )
