"""Grouped FP8 GEMM: each group of rows is multiplied by a separate matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from cukit.core.arrays import (
    Array,
    adopt,
    bfloat16,
    check_addresses,
    check_array,
    empty,
    float16,
    float32,
    runs_kernel,
    write_out,
)
from cukit.core.device import KIB, Device, current_device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.narrow_dtype import float8_e4m3
from cukit.core.overlap import check_overlap
from cukit.core.quantized_array import QuantizedArray
from cukit.core.scalars import check_dtype
from cukit.core.support import Support
from cukit.core.tensor_map import TensorMapCache, encode_tensor_map
from cukit.errors import ArrayDtypeError, ArrayShapeError, ConfigError
from cukit.gemm.grouped._grouped_launch import GROUPED_PARAMETERS, encode_groups, encode_matrices
from cukit.gemm.grouped._grouped_plan import MAX_GROUPS, STATIC_BYTES, Layout, max_groups
from cukit.gemm.grouped.grouped import layout_of
from cukit.gemm.quantized._matmul_8bit_launch import scale_columns
from cukit.gemm.quantized._matmul_8bit_operands import both_operands, parts_of
from cukit.gemm.quantized._matmul_8bit_plan import TILE_K, Tiling8Bit, partials_of, scale_bytes
from cukit.reference import grouped_gemm as reference
from cukit.registry import register

_OP = "grouped_gemm_fp8"
_ARCH = "sm_90"
_OUT_DTYPES = (bfloat16, float16)
_ALIGNMENT = 16  # k is a multiple of this: strides of a tensor map are multiples of 16 bytes
_COLUMNS = 8  # n is a multiple of this, so that a row of the result is a multiple of 16 bytes
_PIECE = 64  # rows of the result that one TMA store writes
_EARLY_ROWS = 4  # a box of scales starts up to 3 rows early, at a multiple of 16 bytes
_MAX_STAGES = 8


def grouped_gemm_fp8(
    x: QuantizedArray,
    weights: QuantizedArray,
    expert_offsets: Array | None = None,
    *,
    expert_counts: Array | None = None,
    out_dtype: Any = None,
    out: Array | None = None,
) -> Array:
    """:func:`grouped_gemm` of FP8 codes with scales per block: `y[r] = weights[g] x[r]`.

    Args:
        x: float8_e4m3, [rows, k] or [groups, capacity, k], with one float32 scale per 128 elements
            of a row (`axis=-1, group_size=128`), stored column-major as for :func:`matmul_fp8`;
            other layouts are copied to this one.
        weights: float8_e4m3 [groups, n, k] with one float32 scale per block of 128 x 128
            (`axis=(1, 2), group_size=128`). On the GPU k must be a multiple of 16, n a multiple of
            8, codes and `out` must be 16-byte aligned, and there may be at most 512 groups.
        expert_offsets, expert_counts: as for :func:`grouped_gemm`.
        out_dtype: bfloat16 (default) or float16.
        out: array to write into, [rows, n] or [groups, capacity, n]. It must not overlap an input.

    Returns:
        `out` or a new array. On the GPU, rows that belong to no group are not written.

    Raises:
        ArrayError: dtype, shape or layout of an argument.
        ConfigError: scales for other block shapes; neither or both of offsets and counts; too many
            groups.

    The tensor cores accumulate 128 products at a time; these partial sums are added in float32. NaN
    and infinities are treated as in :func:`matmul_fp8`; streams and determinism as in
    :func:`grouped_gemm`. Scales per block: DeepSeek-V3, arXiv:2412.19437, section 3.3.

    >>> import numpy as np, cukit as ck
    >>> x = ck.QuantizedArray.encode(
    ...     np.ones((3, 16), np.float32), ck.float8_e4m3,
    ...     scales=np.ones((3, 1), np.float32), axis=1, group_size=128)
    >>> w = ck.QuantizedArray.encode(
    ...     np.ones((2, 8, 16), np.float32), ck.float8_e4m3,
    ...     scales=np.full((2, 1, 1), 2, np.float32), axis=(1, 2), group_size=128)
    >>> ck.grouped_gemm_fp8(x, w, np.array([0, 1, 3], np.int32), out_dtype=np.float16)[0, :2]
    array([16., 16.], dtype=float16)
    """
    left, right = (
        parts_of(_OP, name, array, float8_e4m3) for name, array in (("x", x), ("weights", weights))
    )
    expert_offsets, expert_counts, out = adopt(_OP, expert_offsets, expert_counts, out)
    check_overlap(
        _OP, out, x=left.storage, weights=right.storage, x_scales=left.scales,
        weight_scales=right.scales, expert_offsets=expert_offsets, expert_counts=expert_counts,
    )  # fmt: skip
    if not runs_kernel(_OP, *left[:2], *right[:2], expert_offsets, expert_counts, out):
        _, dtype = _check(x, weights, expert_offsets, expert_counts, out, out_dtype)
        y = reference.grouped_gemm_fp8(
            x, weights, expert_offsets, expert_counts=expert_counts, out_dtype=dtype
        )
        return write_out(out, y)
    launch, dtype = _prepare(*left, *right, expert_offsets, expert_counts, out, out_dtype)
    if out is None:
        out = empty(left.storage, (*x.shape[:-1], weights.shape[1]), dtype)
    if out.size:
        ends = expert_counts if expert_offsets is None else expert_offsets
        launch(left.storage, right.storage, out, left.scales, right.scales, ends)
    return out


@dataclass(frozen=True)
class GroupedFp8Config:
    """The launch configuration of one call."""

    out: str
    groups: int
    tiling: Tiling8Bit
    num_blocks: int
    raster_group: int
    """Tile rows of a rasterisation group."""

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage: tiles of both operands, and their scales."""
        return (self.tiling.tile_m + self.tiling.tile_n) * TILE_K + scale_bytes(self.tiling.tile_m)

    @property
    def epilogue_bytes(self) -> int:
        """Shared memory that stages the result for TMA stores."""
        piece = _piece(self.tiling)
        buffers = 2 if self.tiling.tile_n > piece else 1
        return self.tiling.consumers * buffers * _PIECE * piece * 2

    @property
    def num_stages(self) -> int:
        """The stages that fit into shared memory with the epilogue and static shared memory."""
        room = min(227 * KIB, 228 * KIB // self.tiling.blocks_per_sm - KIB) - STATIC_BYTES
        return min(_MAX_STAGES, (room - self.epilogue_bytes) // self.stage_bytes)

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        tiling = self.tiling
        threads = 128 * (tiling.consumers + 1)
        defines = (
            ("OUT", self.out),
            ("TILE_M", tiling.tile_m),
            ("TILE_N", tiling.tile_n),
            ("STAGES", self.num_stages),
            ("CONSUMERS", tiling.consumers),
            ("PARTIALS", partials_of(tiling)),
            ("BLOCKS_PER_SM", tiling.blocks_per_sm),
            ("THREADS", threads),
            ("GROUPS", max_groups(self.groups)),
        )
        shared = self.num_stages * self.stage_bytes + self.epilogue_bytes
        entry = "grouped_fp8_sm90"
        return KernelSpec(f"gemm/{entry}.cu", entry, defines, threads, shared)


def _piece(tiling: Tiling8Bit) -> int:
    """Columns of the result that one TMA store writes."""
    return next(width for width in (64, 32, 16) if tiling.tile_n % width == 0)


TILINGS = tuple(
    Tiling8Bit(tile_m, tile_n)
    for tile_m, tile_n in ((128, 192), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32))
)
# Measured on an H200 (profiling/notes/grouped_gemm_sm90.md).
_SM_BYTES_PER_US = 80e3  # from L2 to an SM
_SM_MACS_PER_US = 4096 * 1.3e3  # FP8 tensor cores of an SM
_STEP_US = 0.15  # minimum time of a k step (128 elements)
_TILE_US = 1.0  # fixed cost of a tile


def configure(
    rows: int, groups: int, n: int, out: str, tiling: Tiling8Bit, num_sms: int
) -> GroupedFp8Config:
    """The grid and rasterisation order for a tiling."""
    tiles_m, tiles_n = tiling.tiles(rows, n)
    blocks = min((tiles_m + groups) * tiles_n, num_sms * tiling.blocks_per_sm)
    raster_group = round((blocks * tiling.tile_n / tiling.tile_m) ** 0.5)
    return GroupedFp8Config(out, groups, tiling, max(1, blocks), max(1, raster_group))


def estimate_us(rows: int, groups: int, n: int, k: int, tiling: Tiling8Bit, num_sms: int) -> float:
    """Estimated time of a product, without the memory-bound part, which all tilings share.

    A group's last tile is assumed to be half empty.
    """
    each = rows / groups
    tiles_m = groups * min(each, each / tiling.tile_m + (0.5 if each > 1 else 0))
    tiles = tiles_m * -(-n // tiling.tile_n)
    loaded = (min(each, tiling.tile_m) + tiling.tile_n) * TILE_K
    macs = tiling.tile_m * tiling.tile_n * TILE_K
    share = tiling.blocks_per_sm if tiles > num_sms else 1
    step = max(share * loaded / _SM_BYTES_PER_US, share * macs / _SM_MACS_PER_US, _STEP_US)
    slots = num_sms * tiling.blocks_per_sm
    rounds = tiles / slots if tiles > 8 * slots else -(-tiles // slots)
    return rounds * (-(-k // TILE_K) * step + share * _TILE_US)


@cache
def plan_grouped_fp8(
    rows: int, groups: int, n: int, k: int, out: str, num_sms: int
) -> GroupedFp8Config:
    """The configuration with the shortest estimated time. rows: total of all groups."""
    tiling = min(TILINGS, key=lambda each: estimate_us(rows, groups, n, k, each, num_sms))
    return configure(rows, groups, n, out, tiling, num_sms)


class GroupedFp8Launch:
    """A launch of grouped_fp8_sm90.cu; takes checked arrays."""

    __slots__ = ("_launch", "_out", "_scales", "_weights", "_x")

    def __init__(self, config: GroupedFp8Config, layout: Layout, n: int, k: int) -> None:
        tiling = config.tiling
        parameters = GROUPED_PARAMETERS.pack(
            m=0,
            n=n,
            steps=-(-k // TILE_K),
            raster_group=config.raster_group,
            groups=layout.groups,
            longest=layout.longest,
            fixed_capacity=layout.fixed_capacity,
        )
        self._launch = Launch(load_kernel(config.spec()), (config.num_blocks,), (parameters,))
        of_rows, of_matrices = (tiling.tile_m, TILE_K), (tiling.tile_n, TILE_K)
        of_out = (_PIECE, _piece(tiling))
        self._x = TensorMapCache(partial(encode_groups, layout.longest, of_rows))
        self._weights = TensorMapCache(partial(encode_matrices, of_matrices))
        self._out = TensorMapCache(partial(encode_groups, layout.longest, of_out))
        self._scales = TensorMapCache(
            lambda scales: encode_tensor_map(
                scales.T, (1, tiling.tile_m + _EARLY_ROWS), swizzle_bytes=0
            )
        )

    def __call__(
        self, x: Array, weights: Array, out: Array, x_scales: Array, scales: Array, ends: Array
    ) -> None:
        columns = scale_columns(x_scales.reshape(-1, x_scales.shape[-1]))
        self._launch(
            self._x(x), self._weights(weights), self._out(out), self._scales(columns), scales, ends,
        )  # fmt: skip


def _check(
    x: QuantizedArray,
    weights: QuantizedArray,
    expert_offsets: Array | None,
    expert_counts: Array | None,
    out: Array | None,
    out_dtype: Any,
) -> tuple[Layout, np.dtype[Any]]:
    for name, array, axes in (("x", x, (2, 3)), ("weights", weights, (3,))):
        if array.dtype != float8_e4m3:
            raise ArrayDtypeError(f"{_OP}: {name} must be float8_e4m3, got {array.dtype.name}")
        if array.ndim not in axes:
            expected = " or ".join(map(str, axes))
            raise ArrayShapeError(
                f"{_OP}: {name} has shape {array.shape}, expected {expected} axes"
            )
        check_array(_OP, f"{name}.storage", array.storage, dtypes=(array.storage.dtype,))
    layout = layout_of(_OP, x.storage, weights.shape[0], expert_offsets, expert_counts)
    if x.shape[-1] != weights.shape[2]:
        raise ArrayShapeError(
            f"{_OP}: x of shape {x.shape} and weights of shape {weights.shape} do not match: inner "
            f"extents {x.shape[-1]} and {weights.shape[2]}"
        )
    _check_scales("x", x, (1,) * (x.ndim - 1) + (TILE_K,))
    _check_scales("weights", weights, (1, TILE_K, TILE_K))
    check_array(_OP, "the scales of weights", weights.scales, dtypes=(float32,))
    dtype = bfloat16
    if out_dtype is not None:
        dtype = check_dtype(_OP, "out_dtype", out_dtype, _OUT_DTYPES)
    if out is not None:
        dtypes = _OUT_DTYPES if out_dtype is None else (dtype,)
        check_array(_OP, "out", out, dtypes=dtypes, shape=(*x.shape[:-1], weights.shape[1]))
        dtype = out.dtype
    return layout, dtype


def _check_scales(name: str, array: QuantizedArray, block: tuple[int, ...]) -> None:
    extents = array.block_shape
    wanted = tuple(map(min, block, array.shape))
    if extents is None or tuple(map(min, extents, array.shape)) != wanted:
        raise ConfigError(f"{_OP}: scales of {name} must be for blocks of {block}, got {extents}")
    if array.scales is not None and array.scales.dtype != float32:
        raise ArrayDtypeError(
            f"{_OP}: the scales of {name} must be float32, got {array.scales.dtype.name}"
        )


@launch_plan
def _prepare(*values: Any) -> tuple[GroupedFp8Launch, np.dtype[Any]]:
    x, weights = both_operands(values)
    layout, dtype = _check(x, weights, *values[8:])
    storages = {"x.storage": x.storage, "weights.storage": weights.storage, "out": values[10]}
    check_addresses(_OP, **storages)
    groups, n, k = weights.shape
    if groups > MAX_GROUPS:
        raise ConfigError(f"{_OP}: at most {MAX_GROUPS} groups on the GPU, got {groups}")
    for name, extent, multiple in (("k", k, _ALIGNMENT), ("n", n, _COLUMNS)):
        if extent == 0 or extent % multiple:
            raise ArrayShapeError(
                f"{_OP}: {name} must be a multiple of {multiple} on the GPU, got {extent}"
            )
    config = plan_grouped_fp8(layout.rows, groups, n, k, dtype.name, current_device().num_sms)
    return GroupedFp8Launch(config, layout, n, k), dtype


def _configs(device: Device) -> Iterator[GroupedFp8Config]:
    for tiling in TILINGS:
        yield configure(32768, 8, 7168, "bfloat16", tiling, device.num_sms)
    yield configure(32768, 128, 7168, "float16", TILINGS[0], device.num_sms)


def _specs(device: Device) -> list[KernelSpec]:
    return [config.spec() for config in _configs(device)] if device.arch == _ARCH else []


register(
    name=_OP,
    family="gemm",
    function=grouped_gemm_fp8,
    reference=reference.grouped_gemm_fp8,
    specs=_specs,
    support=Support(_ARCH, _ARCH),
)
