"""How products of 8-bit matrices run on Hopper: tiles, stages, and the path of the result."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Literal

from cukit.core.device import KIB
from cukit.core.kernel import KernelSpec

Code = Literal["Int8", "Float8E4M3"]

TILE_K = 128
OUT_BOX = (64, 64)
_SCALE_STAGE_BYTES = 1024
_BARRIER_BYTES = 16  # of a stage
_SHARED_BYTES = 227 * KIB
_MOST_STAGES = 12


class ResultPath(IntEnum):
    """How results go to memory (kernels_cu/common/hopper/scaled_epilogue.cuh)."""

    PAIRS = 0
    ROWS = 1
    STAGED = 2


@dataclass(frozen=True)
class Product8Bit:
    """What selects a kernel, beside the extents."""

    code: Code
    out: str
    """Name of the result's dtype."""
    promoted: bool = False
    """Whether float8 sums of 128 elements of k are added in float32 outside the tensor cores."""
    blocks: bool = False
    """Whether scales belong to blocks; else to rows or tensors."""


@dataclass(frozen=True)
class Tiling8Bit:
    """How the kernel cuts the result into tiles."""

    tile_m: int
    tile_n: int

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return min(2, self.tile_m // 64)

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        """Tiles along each axis of the result."""
        return -(-m // self.tile_m), -(-n // self.tile_n)


@dataclass(frozen=True)
class Config8Bit:
    """How one call runs."""

    product: Product8Bit
    tiling: Tiling8Bit
    result: ResultPath
    num_blocks: int
    """Blocks of the persistent grid."""
    group: int
    """Rows of tiles that blocks walk over together."""
    cluster: int = 1
    partials: int = 0
    """Partial sums that a warpgroup keeps: 0 without promotion."""

    @property
    def stage_bytes(self) -> int:
        """Tiles of a and b, and scales of a."""
        operands = (self.tiling.tile_m + self.tiling.tile_n) * TILE_K
        return operands + _SCALE_STAGE_BYTES * self.product.blocks

    @property
    def result_bytes(self) -> int:
        """Pieces of the result on their way to memory."""
        if self.result != ResultPath.STAGED:
            return 0
        buffers = 2 if self.tiling.tile_n % 128 == 0 else 1
        return 2 * OUT_BOX[0] * OUT_BOX[1] * buffers * self.tiling.consumers

    @property
    def num_stages(self) -> int:
        """As many as shared memory holds."""
        room = _SHARED_BYTES - KIB - self.result_bytes
        return min(_MOST_STAGES, room // (self.stage_bytes + _BARRIER_BYTES))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.num_stages * self.stage_bytes + self.result_bytes

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        threads = 128 * (self.tiling.consumers + 1)
        defines = (
            ("CODE", self.product.code),
            ("OUT", self.product.out),
            ("TILE_M", self.tiling.tile_m),
            ("TILE_N", self.tiling.tile_n),
            ("CONSUMERS", self.tiling.consumers),
            ("STAGES", self.num_stages),
            ("CLUSTER", self.cluster),
            ("PARTIALS", self.partials),
            ("BLOCKS", int(self.product.blocks)),
            ("RESULT", int(self.result)),
            ("THREADS", threads),
        )
        entry = "matmul_8bit_sm90"
        return KernelSpec(f"gemm/{entry}.cu", entry, defines, threads, self.shared_bytes)


def tilings(product: Product8Bit) -> tuple[Tiling8Bit, ...]:
    """What plan_matmul_8bit chooses from: accumulators, and partial sums, fit into registers."""
    wide = (256, 192) if not product.promoted else (192, 160)
    narrow = (128, 112, 96, 80, 64, 48, 32, 16)
    return (
        *(Tiling8Bit(128, n) for n in wide),
        Tiling8Bit(256, 128),
        *(Tiling8Bit(128, n) for n in narrow),
        *(Tiling8Bit(64, n) for n in narrow),
    )


def _result_path(product: Product8Bit, tiling: Tiling8Bit, n: int) -> ResultPath:
    if product.out in ("float32", "int32") or n % 8:
        return ResultPath.PAIRS
    return ResultPath.STAGED if tiling.tile_n % 64 == 0 else ResultPath.ROWS


def configure(
    product: Product8Bit, tiling: Tiling8Bit, m: int, n: int, num_sms: int
) -> Config8Bit:
    """A launch with these tiles, whose walk keeps about a square of the result in flight."""
    tiles_m, tiles_n = tiling.tiles(m, n)
    num_blocks = min(tiles_m * tiles_n, num_sms)
    group = round((num_blocks * tiling.tile_n / tiling.tile_m) ** 0.5)
    beside = tiling.tile_m <= 128 and tiling.tile_n <= 128
    return Config8Bit(
        product,
        tiling,
        _result_path(product, tiling, n),
        num_blocks,
        max(1, min(group, tiles_m)),
        partials=0 if not product.promoted else 2 if beside else 1,
    )


@cache
def plan_matmul_8bit(
    product: Product8Bit, m: int, n: int, k: int, num_sms: int
) -> Config8Bit:
    """The tiles that take the least time: rounds of tiles times the cycles of a tile."""

    def cycles(tiling: Tiling8Bit) -> float:
        tiles_m, tiles_n = tiling.tiles(m, n)
        rounds = -(-tiles_m * tiles_n // num_sms)
        tensor = tiling.tile_m * tiling.tile_n / 32
        load = (min(m, tiling.tile_m) + tiling.tile_n) * TILE_K / 48
        step = max(tensor, load, 250.0)
        return rounds * (-(-k // TILE_K) * step + 1500 + tiling.tile_m * tiling.tile_n / 16)

    best = min(tilings(product), key=cycles)
    return configure(product, best, m, n, num_sms)
