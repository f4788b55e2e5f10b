"""Quantised weights, packed in the register order of the tensor cores.

A weight [n, k] is divided into blocks of 64 rows x 128 columns, each contiguous with the scales and
zero points of its groups (scales per row are a separate array); kernels_cu/gemm/weight_codes.cuh
describes a block. Packing is done once, when a model is loaded, with array operations on the device
of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cukit.core.arrays import KERNEL_DTYPES, Array, namespace
from cukit.core.narrow_dtype import NarrowDtype, float8_e4m3, int4, int8
from cukit.core.quantized_array import QuantizedArray
from cukit.errors import ArrayDtypeError, ArrayError, ArrayShapeError, ConfigError

__all__ = ["GROUP_SIZES", "PackedWeight", "WeightDescription", "pack_weight"]

GROUP_SIZES = (32, 64, 128)
"""Columns that share a scale in a packed block."""

BLOCK_ROWS = 64
BLOCK_COLUMNS = 128
_PAIR_ROWS = 2 * BLOCK_ROWS
_WARPS, _HALVES, _ROWS = 4, 2, 8  # 64 rows: four warps of two halves of eight rows
_FIRST_FIELD = 3  # bit offset of the first int4 in a word
_OFFSET = {"int4": 8, "int8": 128}  # makes codes unsigned


class WeightDescription(NamedTuple):
    """The properties of a weight that a kernel is specialised for."""

    dtype: NarrowDtype
    shape: tuple[int, int]
    group_size: int | None
    """Columns that share a scale: 32, 64 or 128; None: one scale per row."""
    scale_dtype: np.dtype[Any]
    has_zero_points: bool
    float8: bool = False
    """Whether the codes are ordered for float8 activations rather than 16-bit ones."""

    @property
    def groups(self) -> int:
        """Groups along the columns of a block."""
        return 0 if self.group_size is None else BLOCK_COLUMNS // self.group_size

    @property
    def x_bytes(self) -> int:
        """Bytes per element of the activations."""
        return 1 if self.float8 else 2

    @property
    def order(self) -> str:
        """The order of the codes in a block."""
        return "int4 x float8" if self.float8 else self.dtype.name

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: 64 x 128 codes with their scales and zero points."""
        codes = BLOCK_ROWS * BLOCK_COLUMNS * self.dtype.bits // 8
        scales = self.groups * BLOCK_ROWS * self.scale_dtype.itemsize
        return codes + scales + (self.groups * BLOCK_ROWS // 2 if self.has_zero_points else 0)

    @property
    def steps(self) -> int:
        """Blocks along k."""
        return -(-self.shape[1] // BLOCK_COLUMNS)

    @property
    def pairs(self) -> int:
        """Pairs of blocks along n."""
        return -(-self.shape[0] // _PAIR_ROWS)


@dataclass(frozen=True, eq=False, repr=False)
class PackedWeight:
    """A quantised weight [n, k], packed by :func:`pack_weight`.

    blocks: uint8 [pairs, steps, 2 * block bytes].
    row_scales: float16|bfloat16|float32 [n] if the description has no group size, else None.
    """

    description: WeightDescription
    blocks: Array
    row_scales: Array | None

    @property
    def shape(self) -> tuple[int, int]:
        """[n, k] of the weight."""
        return self.description.shape

    @property
    def nbytes(self) -> int:
        """Bytes of the packed arrays."""
        return int(self.blocks.nbytes) + (
            0 if self.row_scales is None else int(self.row_scales.nbytes)
        )

    @cached_property
    def arrays(self) -> tuple[Array, Array | None]:
        """The arrays that are passed to a kernel."""
        return self.blocks, self.row_scales

    def unpack(self) -> QuantizedArray:
        """A new QuantizedArray with one scale per group of at most 128 columns, or per row."""
        return _unpack(self)

    def __repr__(self) -> str:
        weight = self.description
        group = "row" if weight.group_size is None else weight.group_size
        zeros = ", zero points" if weight.has_zero_points else ""
        return f"PackedWeight({weight.dtype.name}, shape={weight.shape}, group={group}{zeros})"


def pack_weight(weight: QuantizedArray, *, x_dtype: NarrowDtype | None = None) -> PackedWeight:
    """Packs a quantised weight for the weight-only kernels; done once, e.g. when a model is loaded.

    weight: int4|int8 [n, k] with float16|bfloat16|float32 scales for groups of 32, 64, 128 or a
        multiple of 128 columns, or one per row (`axis=1`). int4 may have integer zero points from
        -8 to 7; checking their values synchronises on the GPU.
    x_dtype: None for float16 or bfloat16 activations; float8_e4m3 for float8 activations (int4
        only).

    Returns arrays on the device of `weight`, padded to multiples of 128 rows and columns; scales of
    groups of more than 128 columns are repeated. Raises ArrayError or ConfigError.

    >>> import numpy as np, cukit as ck
    >>> scales = np.full((2, 1), 0.5, np.float16)
    >>> codes = ck.QuantizedArray.encode(np.ones((2, 64), np.float32), ck.int4, scales=scales,
    ...                                  axis=1, group_size=64)
    >>> ck.pack_weight(codes)
    PackedWeight(int4, shape=(2, 64), group=row)
    """
    description, repeats = _describe(weight, x_dtype)
    codes = _pad(_codes(weight), _OFFSET[weight.dtype.name])
    zeros = weight.zero_points
    if zeros is not None:
        zeros = _spread(zeros, repeats, description)
    if description.float8:
        codes = _look_up(_FLOAT8_PLACES, codes, zeros)
    blocks = _ORDERS[description.order].pack(codes)
    if description.group_size is None:
        return PackedWeight(description, _in_pairs([blocks]), weight.scales[:, 0].copy())  # type: ignore[index]
    scales = weight.scales.view(f"uint{8 * weight.scales.itemsize}")  # type: ignore[union-attr]
    parts = [blocks, _pack_scales(_spread(scales, repeats, description), description)]
    if zeros is not None:
        parts.append(_pack_zeros(zeros, description))
    return PackedWeight(description, _in_pairs(parts), None)


def _describe(weight: QuantizedArray, x_dtype: NarrowDtype | None) -> tuple[WeightDescription, int]:
    """The description of the packed weight, and how often each scale is repeated along k."""
    if not isinstance(weight, QuantizedArray):
        raise ArrayError(
            f"pack_weight: weight must be a QuantizedArray, got {type(weight).__name__}"
        )
    if weight.dtype not in (int4, int8):
        raise ArrayDtypeError(f"pack_weight: weight must be int4 or int8, got {weight.dtype.name}")
    if weight.ndim != 2:
        raise ArrayShapeError(f"pack_weight: weight must have 2 axes, got shape {weight.shape}")
    if weight.scales is None or weight.block_shape is None or weight.block_shape[0] != 1:
        raise ConfigError(
            "pack_weight: weight must have scales per row or per group of columns "
            f"(axis=1), got {weight!r}"
        )
    size = weight.block_shape[1]
    whole = size >= weight.shape[1]
    if not whole and size not in GROUP_SIZES and size % BLOCK_COLUMNS:
        raise ConfigError(
            f"pack_weight: group_size must be one of {GROUP_SIZES}, a multiple of {BLOCK_COLUMNS} "
            f"or None, got {size}"
        )
    if weight.zero_points is not None:
        if weight.dtype == int8:
            raise ConfigError("pack_weight: int8 weights must not have zero points")
        _check_zero_points(weight.zero_points)
    fits = isinstance(x_dtype, NarrowDtype) and (x_dtype, weight.dtype) == (float8_e4m3, int4)
    if x_dtype is not None and not fits:
        raise ConfigError(
            "pack_weight: x_dtype must be None or, for an int4 weight, float8_e4m3, "
            f"got {x_dtype!r} for {weight.dtype.name}"
        )
    by_row = whole and weight.zero_points is None and x_dtype is None
    group = None if by_row else min(size, BLOCK_COLUMNS) if not whole else BLOCK_COLUMNS
    repeats = 1 if by_row or size in GROUP_SIZES else -(-size // BLOCK_COLUMNS)
    n, k = weight.shape
    description = WeightDescription(
        weight.dtype,
        (n, k),
        group,
        weight.scales.dtype,
        weight.zero_points is not None,
        x_dtype is not None,
    )
    assert weight.scales.dtype in KERNEL_DTYPES
    return description, repeats


def _check_zero_points(zero_points: Array) -> None:
    values = zero_points.astype(np.float32)
    wrong = (values != values.round()) | (values < -8) | (values > 7)
    if bool(wrong.any()):
        worst = float(values[wrong][0])
        raise ConfigError(f"pack_weight: zero_points must be integers from -8 to 7, got {worst:g}")


def _codes(weight: QuantizedArray) -> Array:
    """Unsigned codes, uint8 [n, k]."""
    if weight.dtype == int8:
        return weight.storage.view(np.uint8) ^ 0x80
    xp = namespace(weight.storage)
    storage = weight.storage
    pairs = xp.stack((storage & 15, storage >> 4), axis=-1).reshape(len(storage), -1)
    return pairs[:, : weight.shape[1]] ^ 8


def _pad(array: Array, value: int) -> Array:
    """[n, k], padded with `value` to whole pairs of blocks."""
    n, k = array.shape
    padding = ((0, -n % _PAIR_ROWS), (0, -k % BLOCK_COLUMNS))
    return namespace(array).pad(array, padding, constant_values=value)


def _pack_int4(codes: Array) -> Array:
    """Codes [n, k] -> bytes [row block, step, 4096]."""
    xp = namespace(codes)
    # row block, warp, half, row | step, chunk, k16 step, eight, lane of the quad, column
    split = codes.reshape(
        -1, _WARPS, _HALVES, _ROWS, codes.shape[1] // BLOCK_COLUMNS, 2, 4, 2, 4, 2
    )
    words = xp.zeros(split[:, :, 0, :, :, :, :, 0, :, 0].shape, np.uint32)
    for half in range(2):
        for eight in range(2):
            for column in range(2):
                shift = 4 * (half + 2 * eight) + 16 * column
                field = split[:, :, half, :, :, :, :, eight, :, column].astype(np.uint32)
                words |= field << np.uint32(shift)
    words = (words << np.uint32(_FIRST_FIELD)) | (words >> np.uint32(32 - _FIRST_FIELD))
    # row block, warp, row, step, chunk, k16 step, lane: the step first, the k16 step last
    ordered = xp.ascontiguousarray(words.transpose(0, 3, 4, 1, 2, 6, 5))
    return ordered.view(np.uint8).reshape(*ordered.shape[:2], -1)


def _pack_int8(codes: Array) -> Array:
    """Codes [n, k] -> bytes [row block, step, 8192]."""
    # row block, warp, half, row | step, k32 step, k16 step, eight, lane of the quad, column
    split = codes.reshape(
        -1, _WARPS, _HALVES, _ROWS, codes.shape[1] // BLOCK_COLUMNS, 4, 2, 2, 4, 2
    )
    ordered = namespace(codes).ascontiguousarray(split.transpose(0, 4, 5, 1, 3, 8, 6, 7, 9, 2))
    return ordered.reshape(*ordered.shape[:2], -1)


def _pack_int4_float8(codes: Array) -> Array:
    """Codes [n, k] -> bytes [row block, step, 4096]."""
    xp = namespace(codes)
    # row block, warp, half, row | step, chunk, k32 step, sixteen, lane of the quad, column
    split = codes.reshape(
        -1, _WARPS, _HALVES, _ROWS, codes.shape[1] // BLOCK_COLUMNS, 2, 2, 2, 4, 4
    )
    words = xp.zeros(split[:, :, 0, ..., 0].shape, np.uint32)
    for half in range(2):
        for column in range(4):
            code = split[:, :, half, ..., column].astype(np.uint32)
            words |= code << np.uint32(4 * (column + 4 * half))
    # row block, warp, row, step, chunk, k32 step, sixteen, lane: the step first, as above
    ordered = xp.ascontiguousarray(words.transpose(0, 3, 4, 1, 2, 7, 5, 6))
    return ordered.view(np.uint8).reshape(*ordered.shape[:2], -1)


def _float8_places() -> np.ndarray[Any, np.dtype[np.int64]]:
    """[zero point + 8, code + 8] -> the code's index in the table of its zero point.

    Int4Float8Codes (kernels_cu/gemm/weight_codes.cuh) describes the tables.
    """
    zero, code = np.arange(16)[:, None], np.arange(16)
    pairs = (zero + 1) // 2
    moved = np.where(code < 2 * pairs, code + 8 - pairs, code - pairs)
    return np.where((code < pairs) | (code >= 8 + pairs), code, moved)


_FLOAT8_PLACES = _float8_places()
_FLOAT8_CODES = np.argsort(_FLOAT8_PLACES, axis=1)


def _look_up(
    table: np.ndarray[Any, np.dtype[np.int64]], codes: Array, zeros: Array | None
) -> Array:
    """Looks each of the codes [n, k] up in `table` [zero point + 8, code].

    zeros: zero points of groups of columns, int8 [n, groups], or None.
    """
    xp = namespace(codes)
    entries = xp.asarray(table.ravel(), np.uint8)
    if zeros is None:
        return entries[codes.astype(np.int16) + 16 * 8]
    first = (zeros.astype(np.int16) + 8) * 16
    groups = codes.reshape(*zeros.shape, -1)
    return entries[groups + first[..., None]].reshape(codes.shape)


def _spread(factors: Array, repeats: int, description: WeightDescription) -> Array:
    """Scales or zero points [n, groups], repeated for each group of each block, zero-padded."""
    xp = namespace(factors)
    columns = description.steps * description.groups
    spread = xp.repeat(factors, repeats, axis=1)[:, :columns] if repeats > 1 else factors
    padding = ((0, -len(spread) % _PAIR_ROWS), (0, columns - spread.shape[1]))
    return xp.pad(spread, padding)


def _split_rows(factors: Array, groups: int) -> Array:
    """[n, groups] -> row block, step, group, warp, row, half."""
    split = factors.reshape(-1, _WARPS, _HALVES, _ROWS, factors.shape[1] // groups, groups)
    return split.transpose(0, 4, 5, 1, 3, 2)


def _pack_scales(scales: Array, description: WeightDescription) -> Array:
    ordered = namespace(scales).ascontiguousarray(_split_rows(scales, description.groups))
    return ordered.view(np.uint8).reshape(*ordered.shape[:2], -1)


def _pack_zeros(zero_points: Array, description: WeightDescription) -> Array:
    codes = (zero_points.astype(np.int8) + 8).astype(np.uint8)
    ordered = _split_rows(codes, description.groups)
    both = ordered[..., 0] | ordered[..., 1] << 4
    return both.reshape(*both.shape[:2], -1)


def _in_pairs(parts: list[Array]) -> Array:
    """[row block, step, bytes] of each part -> [pair, step, 2 * bytes]."""
    xp = namespace(parts[0])
    blocks = xp.concatenate(parts, axis=2)
    rows, steps, size = blocks.shape
    paired = blocks.reshape(rows // 2, 2, steps, size).transpose(0, 2, 1, 3)
    return xp.ascontiguousarray(paired).reshape(rows // 2, steps, 2 * size)


def _unpack(packed: PackedWeight) -> QuantizedArray:
    weight = packed.description
    xp = namespace(packed.blocks)
    n, k = weight.shape
    pairs, steps, size = packed.blocks.shape
    blocks = packed.blocks.reshape(pairs, steps, 2, size // 2).transpose(0, 2, 1, 3)
    blocks = xp.ascontiguousarray(blocks).reshape(2 * pairs, steps, size // 2)
    code_bytes = BLOCK_ROWS * BLOCK_COLUMNS * weight.dtype.bits // 8
    codes = _ORDERS[weight.order].unpack(xp.ascontiguousarray(blocks[..., :code_bytes]))
    zeros = None
    if weight.has_zero_points:
        end = code_bytes + weight.groups * BLOCK_ROWS * weight.scale_dtype.itemsize
        both = blocks[..., end:].reshape(2 * pairs, steps, weight.groups, _WARPS, _ROWS)
        zeros = _join_rows(xp.stack((both & 15, both >> 4), axis=-1).astype(np.int8) - np.int8(8))
    if weight.float8:
        codes = _look_up(_FLOAT8_CODES, codes, zeros)
    storage = _as_storage(codes[:n, :k], weight.dtype)
    if weight.group_size is None:
        assert packed.row_scales is not None
        row_scales = packed.row_scales[:, None].copy()
        return QuantizedArray(storage, weight.dtype, weight.shape, row_scales, axis=1)
    groups = -(-k // weight.group_size)
    shape = (2 * pairs, steps, weight.groups, _WARPS, _ROWS, _HALVES)
    end = code_bytes + weight.groups * BLOCK_ROWS * weight.scale_dtype.itemsize
    scales = xp.ascontiguousarray(blocks[..., code_bytes:end]).view(weight.scale_dtype)
    return QuantizedArray(
        storage,
        weight.dtype,
        weight.shape,
        _join_rows(scales.reshape(shape))[:n, :groups],
        None if zeros is None else zeros[:n, :groups],
        1,
        weight.group_size,
    )


def _join_rows(split: Array) -> Array:
    """Inverse of `_split_rows`."""
    rows = split.transpose(0, 3, 5, 4, 1, 2)
    return rows.reshape(split.shape[0] * BLOCK_ROWS, -1)


def _unpack_int4(blocks: Array) -> Array:
    """Inverse of `_pack_int4`."""
    xp = namespace(blocks)
    words = blocks.view(np.uint32)
    words = (words >> np.uint32(_FIRST_FIELD)) | (words << np.uint32(32 - _FIRST_FIELD))
    shifts = xp.arange(0, 32, 4, dtype=np.uint32)
    fields = (words[..., None] >> shifts & np.uint32(15)).astype(np.uint8)
    # row block, step, chunk, warp, row, lane, k16 step, column, eight, half
    split = fields.reshape(*blocks.shape[:2], 2, _WARPS, _ROWS, 4, 4, 2, 2, _HALVES)
    return _matrix(split.transpose(0, 3, 9, 4, 1, 2, 6, 8, 5, 7))


def _unpack_int8(blocks: Array) -> Array:
    """Inverse of `_pack_int8`."""
    split = blocks.reshape(*blocks.shape[:2], 4, _WARPS, _ROWS, 4, 2, 2, 2, _HALVES)
    return _matrix(split.transpose(0, 3, 9, 4, 1, 2, 6, 7, 5, 8))


def _unpack_int4_float8(blocks: Array) -> Array:
    """Inverse of `_pack_int4_float8`."""
    xp = namespace(blocks)
    words = blocks.view(np.uint32)[..., None]
    codes = (words >> xp.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)).astype(np.uint8)
    # row block, step, chunk, warp, row, lane, k32 step, sixteen, half, column
    split = codes.reshape(*blocks.shape[:2], 2, _WARPS, _ROWS, 4, 2, 2, _HALVES, 4)
    return _matrix(split.transpose(0, 3, 8, 4, 1, 2, 6, 7, 5, 9))


def _matrix(split: Array) -> Array:
    """Row block, warp, half, row, step, position within a step -> [n, k]."""
    return split.reshape(split.shape[0] * BLOCK_ROWS, split.shape[4] * BLOCK_COLUMNS)


class _Order(NamedTuple):
    """Conversions between unsigned codes [n, k] and the bytes of blocks."""

    pack: Callable[[Array], Array]
    unpack: Callable[[Array], Array]


_ORDERS = {
    "int4": _Order(_pack_int4, _unpack_int4),
    "int8": _Order(_pack_int8, _unpack_int8),
    "int4 x float8": _Order(_pack_int4_float8, _unpack_int4_float8),
}


def _as_storage(codes: Array, dtype: NarrowDtype) -> Array:
    """Unsigned codes [n, k] -> the storage of a QuantizedArray."""
    xp = namespace(codes)
    if dtype == int8:
        return xp.ascontiguousarray(codes ^ 0x80).view(np.int8)
    signed = xp.pad(codes ^ 8, ((0, 0), (0, codes.shape[1] % 2)))
    return signed[:, 0::2] | signed[:, 1::2] << 4
