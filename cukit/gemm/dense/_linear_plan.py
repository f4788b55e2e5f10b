"""Plans of dense products: tilings, a cost model for Hopper, and the selection. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

from cukit.core.arrays import ACCESS_BYTES
from cukit.core.compiler import MacroValue
from cukit.core.device import KIB, Device
from cukit.core.kernel import KernelSpec

HOPPER = "sm_90"
DTYPES = ("float16", "bfloat16")
ITEM_BYTES = 2
TILE_K = 64
ROW_BYTES = TILE_K * ITEM_BYTES
ACTIVATIONS = {
    None: "NoActivation",
    "relu": "Relu",
    "gelu": "GeluErf",
    "gelu_tanh": "GeluTanh",
    "silu": "Silu",
}
"""Activations by name, and their types in common/activation.cuh."""
GATED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")

_WARPGROUP = 128
_MAX_STAGES = 14
_SHARED_PER_BLOCK = 227 * KIB
_SHARED_PER_SM = 228 * KIB
_SMS = 132
_SMS_OF_CLUSTERS = {1: 132, 2: 132, 3: 117}
"""By blocks per cluster, the SMs of an H200 that the clusters can occupy
(cuOccupancyMaxActiveClusters); larger clusters: 120."""


@dataclass(frozen=True)
class Product:
    """The product that a variant is selected for: `out [m, n] = f(a b^T + bias)`.

    m, n, k: extents; with `gated`, n is the result's columns, half of the columns of `a b^T`.
    major_a, major_b: "K" for operands [m, k] and [n, k], "MN" for [k, m] and [k, n].
    keeps: whether the input of `activation` is stored too, for the backward.
    """

    m: int
    n: int
    k: int
    dtype: str
    major_a: str = "K"
    major_b: str = "K"
    activation: str | None = None
    gated: bool = False
    keeps: bool = False

    @property
    def variant(self) -> tuple[str, str, str, str | None, bool, bool]:
        """Everything but the extents: what selects a kernel together with the tiling."""
        return (
            self.dtype, self.major_a, self.major_b, self.activation, self.gated, self.keeps
        )  # fmt: skip

    def at_rows(self, rows: int) -> Product:
        """The same product with another m; faster than `dataclasses.replace`."""
        product = object.__new__(Product)
        fields = product.__dict__
        fields.update(self.__dict__)
        fields.pop("swapped", None)
        fields["m"] = rows
        return product

    @cached_property
    def swapped(self) -> Product:
        """The product with its operands swapped, whose result is the transpose."""
        return replace(self, m=self.n, n=self.m, major_a=self.major_b, major_b=self.major_a)


@dataclass(frozen=True)
class Tiling:
    """The tile of a block, its warpgroups, and how the result is stored.

    consumers: consumer warpgroups.
    splits: blocks of a cluster that share the k steps of a tile.
    cluster: blocks of a cluster with vertically adjacent tiles, which share each tile of b.
    transposed: whether the weight is operand a and the tokens are the tile's columns.
    blocks_per_sm: resident blocks per SM; they divide its shared memory.
    overlapped: whether a tile is stored while the next tile's first k steps are computed.
    """

    tile_m: int
    tile_n: int
    consumers: int = 2
    splits: int = 1
    cluster: int = 1
    transposed: bool = False
    blocks_per_sm: int = 1
    overlapped: bool = False

    def __str__(self) -> str:
        name = f"{self.tile_m}x{self.tile_n}"
        name += f" split {self.splits}" if self.splits > 1 else ""
        name += f" cluster {self.cluster}" if self.cluster > 1 else ""
        name += f" x{self.blocks_per_sm}" if self.blocks_per_sm > 1 else ""
        name += " overlapped" if self.overlapped else ""
        return name + (" transposed" if self.transposed else "")

    @property
    def threads(self) -> int:
        """Threads per block: the producer warpgroup and the consumers."""
        return (self.consumers + 1) * _WARPGROUP

    def piece_columns(self, parts: int) -> int:
        """Columns of the result that one TMA store writes."""
        columns = self.tile_n // parts
        return next(width for width in (64, 32, 16) if columns % width == 0)

    def epilogue_bytes(self, parts: int) -> int:
        """Shared memory of the epilogue, which follows the stages."""
        if self.splits > 1:
            slice_columns = -(-self.tile_n // (8 * parts * self.splits)) * 8
            return (self.splits - 1) * self.tile_m * slice_columns * parts * 4
        if self.transposed:
            return self.consumers * self.tile_n * ROW_BYTES
        piece = self.piece_columns(parts)
        buffers = 2 if self.tile_n // parts > piece else 1
        return self.consumers * buffers * 64 * piece * ITEM_BYTES

    def stage_bytes(self, product: Product) -> int:
        """Shared memory of one stage: tiles of both operands, in rows of 128 bytes."""
        extents = (self.tile_m, product.major_a), (self.tile_n, product.major_b)
        rows = (e if major == "K" else -(-e // 64) * 64 for e, major in extents)
        return sum(rows) * ROW_BYTES

    def num_stages(self, product: Product, static_bytes: int = KIB) -> int:
        """The stages that fit into shared memory. static_bytes: for barriers and the like."""
        parts = 1 + product.gated
        limit = min(_SHARED_PER_BLOCK, _SHARED_PER_SM // self.blocks_per_sm - KIB) - static_bytes
        room = limit - self.epilogue_bytes(parts)
        return min(_MAX_STAGES, room // self.stage_bytes(product))

    def slots(self, num_sms: int) -> int:
        """Blocks that are resident at once.

        A cluster runs within one GPC, so larger clusters leave some SMs idle.
        """
        blocks = self.splits * self.cluster
        usable = num_sms * _SMS_OF_CLUSTERS.get(blocks, 120) // _SMS
        return usable // blocks * blocks * self.blocks_per_sm

    def tiles(self, product: Product) -> tuple[int, int]:
        """Tiles along each axis of the product; with `cluster`, tiles of a whole cluster."""
        columns = self.tile_n // (1 + product.gated)
        return -(-product.m // (self.tile_m * self.cluster)), -(-product.n // columns)


@dataclass(frozen=True)
class Sm90Config:
    """The launch configuration of one call on Hopper.

    product: the product as computed; for a transposed tiling, with its operands swapped.
    """

    product: Product
    tiling: Tiling
    num_blocks: int
    raster_group: int
    """Tile rows (cluster rows, with clusters) of a rasterisation group."""
    num_sms: int

    def at_rows(self, rows: int) -> Sm90Config:
        """The same tiling for another m with the same rounded_rows.

        rows: m before a transposed tiling swaps the operands.
        """
        product = self.product.swapped if self.tiling.transposed else self.product
        return configure(product.at_rows(rows), self.tiling, self.num_sms)

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        tiling, product = self.tiling, self.product
        stages = tiling.num_stages(product)
        parts = 1 + product.gated
        defines = (
            ("DTYPE", product.dtype),
            ("TILE_M", tiling.tile_m),
            ("TILE_N", tiling.tile_n),
            ("STAGES", stages),
            ("CONSUMERS", tiling.consumers),
            ("CLUSTER", tiling.cluster * tiling.splits),
            ("SPLITS", tiling.splits),
            ("BLOCKS_PER_SM", tiling.blocks_per_sm),
            ("THREADS", tiling.threads),
            ("MAJOR_A", product.major_a),
            ("MAJOR_B", product.major_b),
            ("TRANSPOSED", tiling.transposed),
            ("OVERLAPPED", tiling.overlapped),
            ("PARTS", parts),
            ("ACTIVATION", ACTIVATIONS[product.activation]),
            ("KEEPS", product.keeps),
        )
        shared = stages * tiling.stage_bytes(product) + tiling.epilogue_bytes(parts)
        entry = "linear_sm90"
        return KernelSpec(f"gemm/{entry}.cu", entry, defines, tiling.threads, shared)


def configure(product: Product, tiling: Tiling, num_sms: int) -> Sm90Config:
    """The grid and rasterisation order for a tiling.

    Rasterisation groups are sized so that the tiles in flight cover a nearly square part of the
    result, which needs the fewest rows of a and b.
    """
    if tiling.transposed:
        product = product.swapped
    tiles_m, tiles_n = tiling.tiles(product)
    tiles = tiles_m * tiles_n
    at_a_time = tiling.slots(num_sms) // (tiling.splits * tiling.cluster)
    in_flight = min(tiles, at_a_time)
    clusters = tiles if tiling.splits > 1 else in_flight
    blocks = clusters * tiling.splits * tiling.cluster
    rows = tiling.tile_m * tiling.cluster
    raster_group = round((in_flight * tiling.tile_n / (1 + product.gated) / rows) ** 0.5)
    return Sm90Config(product, tiling, blocks, max(1, min(raster_group, tiles_m)), num_sms)


CLUSTER_TILING = Tiling(128, 256, cluster=2)
"""Multicasts b to two blocks, which halves the loads of b but is never faster: an H200's L2 serves
separate loads just as quickly, and synchronising the two blocks costs 0.5 %
(profiling/notes/linear_sm90.md). No plan selects it."""


# ---- Cost model and selection ----

# Fitted to an H200 with a cold L2 (profiling/notes/linear_sm90.md).
_START_US = 5.5
_MEMORY_BYTES_PER_US = 3.86e6
_FIRST_BYTES_PER_US = 2.91e6
"""Bandwidth of the first `_FIRST_BYTES`, which is lower after a cold start."""
_FIRST_BYTES = 40e6
_MACS_PER_US = 4.43e6
"""Multiply-accumulates per SM and microsecond."""
_STEP_US = 0.089
"""Fixed time of a k step, in addition to its products."""
_LOAD_BYTES_PER_US = 269e3
"""Rate at which an SM loads the larger operand. Loads of the smaller one hit L2 and are hidden."""
_LATENCY_US = 0.87
_SPLIT_LATENCY_US = 1.27
"""Latency of a stage without and with a k split; a block has all its stages in flight."""
_NEIGHBOURS = 1.21
"""Factor on the latency where blocks that start together load the same columns of b."""
_STEP_NORM = 1.95
"""p of the norm that combines products, loads and latency, which overlap in part."""
_END_US = 6e-5
"""Epilogue time per element of a tile."""
_EXCHANGE_BYTES_PER_US = 27e3
"""Bandwidth between the blocks of a cluster."""
_SPLIT_US = 0.12
"""Fixed cost of a k split, fitted separately to products of about 10 us, where it matters."""
_CLUSTER_ROUND_US = 2.05
"""Cost of each further round of clusters: a cluster starts only when an earlier one has ended."""
_BOTH_NORM = 3.8
"""p of the norm that combines computation and memory traffic."""

_FEWEST_STAGES = 3
_WIDEST = Tiling(128, 256)
_OVERLAPPED = Tiling(128, 192, overlapped=True)
_OVERLAPPED_COLUMNS = 32  # stored during one k step
_WIDE = (
    _WIDEST,
    *(Tiling(128, tile_n) for tile_n in (224, 192, 160, 144, 128, 112, 96, 80, 64, 48)),
)
_SMALL = tuple(
    Tiling(64, tile_n, consumers=1, blocks_per_sm=blocks)
    for tile_n in (128, 96, 64, 48)
    for blocks in (1, 2)
)
_FEW_ROWS = 512
"""Most tokens for which transposed tilings are candidates."""
_FEW = tuple(
    Tiling(tile_m, tokens, consumers=tile_m // 64, transposed=True, blocks_per_sm=blocks)
    for tokens in (16, 32, 48, 64, 80, 96, 112, 128, 160, 192)
    for tile_m in (128, 64)
    for blocks in (1, 2)
    if (tokens <= 32 or blocks == 1 or tile_m == 64) and (tile_m == 128 or tokens <= 128)
)


@cache
def _with_splits(tiling: Tiling) -> tuple[Tiling, ...]:
    """A tiling with each k split that it may use."""
    if tiling.overlapped:
        most = 1
    elif tiling.transposed:
        most = 4
    else:
        most = 2 if tiling.tile_m == 128 else 3
    return tuple(replace(tiling, splits=splits) for splits in range(1, most + 1))


def _suits(tiling: Tiling, tokens: int) -> bool:
    """Whether a transposed tiling is a candidate: few tiles of tokens, none of them mostly empty.

    Each tile of tokens reads the whole weight.
    """
    columns = -(-tokens // tiling.tile_n)
    empty = columns * tiling.tile_n - tokens
    most = 1 if tokens <= 64 else 2 if tiling.tile_n < 80 else 4
    return tokens <= _FEW_ROWS and columns <= most and empty < max(16, tokens)


def candidates(product: Product) -> Iterator[Tiling]:
    """Every tiling that suits the product's layouts and gives each block at least one k step."""
    steps = -(-product.k // TILE_K)
    tilings = [*_WIDE, *_SMALL]
    if product.keeps and not product.gated:
        tilings.remove(_WIDEST)  # register-limited: both results are stored
    if not (product.keeps or product.gated) and steps >= _OVERLAPPED.tile_n // _OVERLAPPED_COLUMNS:
        tilings.append(_OVERLAPPED)
    if not product.gated and product.major_a == "K":
        tilings += _FEW
    for tiling in tilings:
        computed = product.swapped if tiling.transposed else product
        if tiling.tile_n % (64 if computed.major_b == "MN" else 32 if product.gated else 16):
            continue
        if tiling.transposed and not _suits(tiling, computed.n):
            continue
        for each in _with_splits(tiling):
            if each.splits <= steps and each.num_stages(computed) >= _FEWEST_STAGES:
                yield each


def _norm(power: float, *times: float) -> float:
    """The p-norm of times that overlap in part: between their maximum and their sum."""
    total: float = sum(time**power for time in times) ** (1 / power)
    return total


def _step_us(product: Product, tiling: Tiling, sharing: int) -> float:
    """Time of one k step while `sharing` blocks share an SM."""
    computed = product.swapped if tiling.transposed else product
    parts = 1 + product.gated
    products = sharing * tiling.tile_m * tiling.tile_n * TILE_K / _MACS_PER_US + _STEP_US
    rows, columns = min(tiling.tile_m, computed.m), min(tiling.tile_n, parts * computed.n)
    larger = rows if computed.m > parts * computed.n else columns
    loads = sharing * larger * ROW_BYTES / _LOAD_BYTES_PER_US
    latency = _LATENCY_US if tiling.splits == 1 else _SPLIT_LATENCY_US
    if tiling.splits > 1 and not tiling.transposed and product.m > tiling.tile_m:
        latency *= _NEIGHBOURS
    return _norm(_STEP_NORM, products, loads, latency / tiling.num_stages(computed))


def estimate_us(product: Product, tiling: Tiling, num_sms: int) -> float:
    """Estimated time of a product, from its rounds of tiles and its total memory traffic."""
    parts = 1 + product.gated
    computed = product.swapped if tiling.transposed else product
    tiles_m, tiles_n = tiling.tiles(computed)
    blocks = tiles_m * tiles_n * tiling.cluster * tiling.splits
    sharing = max(1, min(tiling.blocks_per_sm, -(-blocks // num_sms)))
    rounds = -(-blocks // (tiling.slots(num_sms) // tiling.blocks_per_sm * sharing))
    steps = -(-product.k // TILE_K) / tiling.splits
    multiply = rounds * steps * _step_us(product, tiling, sharing)
    if not (tiling.overlapped and rounds > 1):
        multiply += rounds * sharing * tiling.tile_m * tiling.tile_n * _END_US

    total = ITEM_BYTES * (product.k * (product.m + parts * product.n) + product.m * product.n)
    first = min(total, _FIRST_BYTES)
    memory = first / _FIRST_BYTES_PER_US + (total - first) / _MEMORY_BYTES_PER_US

    split = 0.0
    if tiling.splits > 1:
        split = _SPLIT_US + tiling.epilogue_bytes(parts) / _EXCHANGE_BYTES_PER_US
        split += (rounds - 1) * _CLUSTER_ROUND_US
    return _START_US + _norm(_BOTH_NORM, multiply, memory) + split


def rounded_rows(rows: int) -> int:
    """`rows`, rounded up to a multiple of 16 up to 512 and of 64 above.

    Numbers of tokens change from call to call, and comparing all tilings takes up to a millisecond:
    numbers that round to the same value share a tiling. They also need the same number of tiles,
    because tile extents along m are multiples of 64, or of 16 for few tokens (transposed tilings).
    """
    step = 16 if rows <= _FEW_ROWS else 64
    return -(-rows // step) * step


def plan_sm90(product: Product, num_sms: int) -> Sm90Config:
    """The configuration with the shortest estimated time, estimated for rounded_rows and whole k
    steps."""
    steps = -(-product.k // TILE_K)
    rounded = replace(product, m=rounded_rows(product.m), k=steps * TILE_K)
    return configure(product, _fastest_tiling(rounded, num_sms), num_sms)


@cache
def _fastest_tiling(product: Product, num_sms: int) -> Tiling:
    return min(candidates(product), key=lambda each: estimate_us(product, each, num_sms))


def representative_configs(product: Product, num_sms: int) -> list[Sm90Config]:
    """Wide, narrow and split tilings, and transposed ones where the product allows them."""
    widest = Tiling(128, 224) if product.keeps and not product.gated else _WIDEST
    tilings = [widest, Tiling(128, 64), Tiling(128, 128, splits=4)]
    if not product.gated and product.major_a == "K":
        tilings += [
            Tiling(128, 96, transposed=True),
            Tiling(64, 16, consumers=1, splits=2, transposed=True, blocks_per_sm=2),
        ]
    return [configure(product, tiling, num_sms) for tiling in tilings]


# ---- Other architectures ----

_STAGES_SM80 = 3


@dataclass(frozen=True)
class Sm80Config:
    """The launch configuration of the mma.sync kernel: square tiles, one per block, each computed
    by two rows of warps."""

    product: Product
    tile: int
    """Rows and columns of a tile."""
    aligned: bool
    """Whether rows of the operands can be copied 16 bytes at a time."""

    def at_rows(self, rows: int) -> Sm80Config:
        """The same tiles for another m with the same rounded_rows."""
        return replace(self, product=self.product.at_rows(rows))

    @property
    def _warps_n(self) -> int:
        return self.tile // 32

    @property
    def tiles_m(self) -> int:
        """Tiles along m."""
        return -(-self.product.m // self.tile)

    @property
    def tiles_n(self) -> int:
        """Tiles along n."""
        return -(-self.product.n // (self.tile // (1 + self.product.gated)))

    @property
    def num_blocks(self) -> int:
        """Blocks of the grid: one per tile."""
        return self.tiles_m * self.tiles_n

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 2 * self._warps_n * 32

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per block."""
        return _STAGES_SM80 * 2 * self.tile * TILE_K * ITEM_BYTES

    @property
    def defines(self) -> tuple[tuple[str, MacroValue], ...]:
        """Macros of kernels_cu/gemm/dense_tile_sm80.cuh."""
        product = self.product
        return (
            ("DTYPE", product.dtype),
            ("TILE_M", self.tile),
            ("TILE_N", self.tile),
            ("TILE_K", TILE_K),
            ("STAGES", _STAGES_SM80),
            ("WARPS_M", 2),
            ("WARPS_N", self._warps_n),
            ("THREADS", self.threads),
            ("MAJOR_A", product.major_a),
            ("MAJOR_B", product.major_b),
            ("ALIGNED", self.aligned),
            ("PARTS", 1 + product.gated),
            ("ACTIVATION", ACTIVATIONS[product.activation]),
            ("KEEPS", product.keeps),
        )

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        entry = "linear_sm80"
        return KernelSpec(f"gemm/{entry}.cu", entry, self.defines, self.threads, self.shared_bytes)


def plan_sm80(product: Product, aligned: bool, num_sms: int) -> Sm80Config:
    """Tiles of 128 x 128, or of 64 x 64 where the large ones would leave SMs idle."""
    large = Sm80Config(product, 128, aligned)
    return large if large.num_blocks >= num_sms else Sm80Config(product, 64, aligned)


_ROW_ELEMENTS = ACCESS_BYTES // ITEM_BYTES


def plan_linear(product: Product, aligned: bool, device: Device) -> Sm90Config | Sm80Config:
    """The kernel and its tiles. aligned: whether all arrays are 16-byte aligned.

    TMA needs strides that are multiples of 16 bytes; products with other extents run the sm80
    kernel on Hopper too.
    """
    strides = {
        product.k if product.major_a == "K" else product.m,
        product.k if product.major_b == "K" else product.n,
    }
    copies = aligned and not any(extent % _ROW_ELEMENTS for extent in strides)
    if device.arch == HOPPER and copies and product.n % _ROW_ELEMENTS == 0:
        return plan_sm90(product, device.num_sms)
    return plan_sm80(product, copies, device.num_sms)
