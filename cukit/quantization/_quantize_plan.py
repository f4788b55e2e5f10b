"""Plans of quantisation: the kernel for an array and its launch shape. Pure; needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cukit.core.kernel import KernelSpec
from cukit.quantization._matrices import Matrices
from cukit.reference.quantize import CLIP_CANDIDATES

FORMATS = {"float8_e4m3": "E4M3", "float8_e5m2": "E5M2", "int8": "INT8", "int4": "INT4"}
_VECTOR_BYTES = 16
_WARP = 32
_THREADS = 256
_MAX_THREADS = 1024
_VECTORS_IN_FLIGHT = 4
"""16-byte loads that a thread has in flight; fewer do not saturate an H200's bandwidth."""
_SMALL_BLOCK_VECTORS = 2
"""Vectors per thread of a small block."""
_MAX_VECTORS = 8
"""The most vectors of a large block that a thread keeps in registers."""
_MIN_DIVIDED_BLOCK = 1 << 16
"""The fewest values for which a block of values is divided among several thread blocks."""
_TENSOR_THREADS = 512
_COLUMN_THREADS = 8
"""Adjacent vectors of a thread block that handles columns: 128 bytes, one cache line."""


@dataclass(frozen=True)
class Rounding:
    """The options that determine codes, scales and zero points, and not only speed."""

    format: str
    dtype: str
    scale_dtype: str
    zero_points: bool = False
    power_of_two: bool = False
    clip: str = "absmax"

    def defines(self) -> tuple[tuple[str, str | int], ...]:
        """Macros of every kernel."""
        return (
            ("FORMAT", FORMATS[self.format]),
            ("DTYPE", self.dtype),
            ("SCALE", self.scale_dtype),
            ("ZERO_POINTS", int(self.zero_points)),
            ("POWER_OF_TWO", int(self.power_of_two)),
        )


@dataclass(frozen=True)
class QuantizeConfig:
    """The launch configuration of one call.

    kernel: `"blocks"`: one pass; `"tensor"`: two launches, in which many thread blocks share each
        block of values; `"columns"`: one launch that reads the values twice.
    team: threads that share a block of values ("columns": adjacent vectors).
    blocks_per_team: blocks of values per team.
    items: 16-byte vectors that a thread loads at once.
    in_registers: whether a block of values is kept in registers.
    num_blocks: thread blocks; for "tensor", per tensor.
    flat: whether blocks of values divide the rows evenly and the codes have no padding.
    """

    kernel: str
    rounding: Rounding
    aligned: bool
    threads: int
    team: int
    blocks_per_team: int
    items: int
    in_registers: bool
    block: tuple[int, int]
    num_blocks: int
    flat: bool = False

    def specs(self) -> tuple[KernelSpec, ...]:
        """The kernel variants that are launched, in order."""
        defines = (
            *self.rounding.defines(),
            ("ALIGNED", int(self.aligned)),
            ("THREADS", self.threads),
            ("ITEMS", self.items),
        )
        if self.kernel == "tensor":
            entries: tuple[str, ...] = ("tensor_extremes", "tensor_codes")
        else:
            entries = (f"quantize_{self.kernel}",)
        if self.kernel == "columns":
            defines += (("COLS_THREADS", self.team),)
        if self.kernel == "blocks":
            defines += (
                ("TEAM", self.team),
                ("BLOCKS_PER_TEAM", self.blocks_per_team),
                ("IN_REGISTERS", int(self.in_registers)),
                ("FLAT", int(self.flat)),
                ("BLOCK_ROWS", self.block[0]),
                ("BLOCK_COLS", self.block[1]),
                ("CANDIDATES", CLIP_CANDIDATES[self.rounding.clip]),
            )
        source = f"quantization/quantize_{self.kernel}.cu"
        return tuple(KernelSpec(source, entry, defines, self.threads) for entry in entries)


@lru_cache(maxsize=1024)
def plan_quantize(
    matrices: Matrices, rounding: Rounding, itemsize: int, num_sms: int, *, aligned: bool = True
) -> QuantizeConfig:
    """The kernel for `matrices` of values of `itemsize` bytes.

    aligned: whether rows and blocks start at multiples of 16 bytes of values, and their codes at
        the corresponding multiples.
    """
    values = _VECTOR_BYTES // itemsize
    if in_columns(matrices, rounding.clip):
        return _plan_columns(matrices, rounding, values, aligned)
    block_size = matrices.block_rows * matrices.block_cols
    whole = matrices.block_cols == matrices.cols and matrices.rows % matrices.block_rows == 0
    few = matrices.num_blocks < num_sms and block_size >= _MIN_DIVIDED_BLOCK
    padded = matrices.cols % 2 and rounding.format == "int4" and matrices.block_rows > 1
    if whole and few and not padded and rounding.clip == "absmax":
        values_per_round = _TENSOR_THREADS * _VECTORS_IN_FLIGHT * values
        most = -(-num_sms * 2048 // _TENSOR_THREADS // matrices.num_blocks)
        parts = min(-(-block_size // values_per_round), most)
        return QuantizeConfig(
            "tensor", rounding, aligned, _TENSOR_THREADS, 1, 1, _VECTORS_IN_FLIGHT, False,
            (0, 0), parts,
        )  # fmt: skip
    return _plan_blocks(matrices, rounding, values, aligned)


def in_columns(matrices: Matrices, clip: str) -> bool:
    """Whether the "columns" kernel quantises `matrices`: blocks are parts of columns."""
    return matrices.block_cols == 1 < matrices.block_rows and clip == "absmax"


def _plan_blocks(
    matrices: Matrices, rounding: Rounding, values: int, aligned: bool
) -> QuantizeConfig:
    vectors = matrices.block_rows * -(-matrices.block_cols // values)
    in_registers = True
    if vectors <= _WARP * _VECTORS_IN_FLIGHT:
        # Several vectors per thread, because computing a scale costs as much as ten values.
        items = min(_SMALL_BLOCK_VECTORS, vectors)
        threads, team = _THREADS, min(_WARP, _power_of_two(-(-vectors // items)))
        items = -(-vectors // team)
        blocks_per_team = (
            min(team, max(1, _VECTORS_IN_FLIGHT // items)) if rounding.clip == "absmax" else 1
        )
    else:
        # For tiles, threads hold fewer vectors than for rows.
        most = _MAX_VECTORS if matrices.block_rows == 1 else _VECTORS_IN_FLIGHT
        wanted = most if vectors <= most * 512 else _MAX_VECTORS
        threads = min(_MAX_THREADS, max(2 * _WARP, _power_of_two(-(-vectors // wanted))))
        team, blocks_per_team, items = threads, 1, -(-vectors // threads)
        if items > _MAX_VECTORS:
            in_registers, items = False, _VECTORS_IN_FLIGHT
    teams = threads // team * blocks_per_team
    whole_bytes = rounding.format != "int4" or matrices.cols % 2 == 0
    flat = matrices.block_rows == 1 and matrices.cols % matrices.block_cols == 0 and whole_bytes
    tile = matrices.block_rows > 1 and matrices.block_cols != matrices.cols
    block = (
        matrices.block_rows if matrices.block_rows == 1 or tile else 0,
        matrices.block_cols if vectors <= _WARP or tile else 0,
    )
    return QuantizeConfig(
        "blocks", rounding, aligned, threads, team, blocks_per_team, items, in_registers, block,
        -(-matrices.num_blocks // teams),
        flat,
    )  # fmt: skip


def _plan_columns(
    matrices: Matrices, rounding: Rounding, values: int, aligned: bool
) -> QuantizeConfig:
    deep = _THREADS // _COLUMN_THREADS
    threads = _THREADS if matrices.block_rows <= deep * _VECTORS_IN_FLIGHT else 2 * _THREADS
    strips = -(-matrices.cols // (_COLUMN_THREADS * values))
    num_blocks = strips * matrices.blocks_down * matrices.num_matrices
    return QuantizeConfig(
        "columns", rounding, aligned, threads, _COLUMN_THREADS, 1, _VECTORS_IN_FLIGHT, False,
        (0, 0), num_blocks,
    )  # fmt: skip


def _power_of_two(number: int) -> int:
    """The smallest power of two not below `number`."""
    return 1 << (number - 1).bit_length()
