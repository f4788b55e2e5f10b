"""Launches of kernels_cu/gemm/linear_sm80.cu for arrays of one description."""

from __future__ import annotations

from dataclasses import dataclass

from cukit.core.arrays import Array
from cukit.core.compiler import MacroValue
from cukit.core.kernel import NULL, KernelSpec, Launch, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.gemm.linear_plan import ACTIVATIONS, ITEM_BYTES, Product

_PARAMETERS = parameter_structs("gemm/parameters.cuh")["DenseParameters"]
_TILE_K = 64
_STAGES = 3
_WARP_THREADS = 32


@dataclass(frozen=True)
class Sm80Config:
    """How one call runs: square tiles of the product, `warps_n` warps side by side on two rows."""

    product: Product
    tile: int
    aligned: bool
    """Whether rows of the operands can be copied 16 bytes at a time."""

    @property
    def _warps_n(self) -> int:
        return self.tile // 32

    @property
    def tiles_m(self) -> int:
        """Tiles below one another."""
        return -(-self.product.m // self.tile)

    @property
    def tiles_n(self) -> int:
        """Tiles side by side."""
        return -(-self.product.n // (self.tile // (1 + self.product.gated)))

    @property
    def num_blocks(self) -> int:
        """One for each tile."""
        return self.tiles_m * self.tiles_n

    @property
    def threads(self) -> int:
        """Of a block."""
        return 2 * self._warps_n * _WARP_THREADS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return _STAGES * 2 * self.tile * _TILE_K * ITEM_BYTES

    @property
    def defines(self) -> tuple[tuple[str, MacroValue], ...]:
        """Macros of kernels_cu/gemm/dense_tile_sm80.cuh."""
        product = self.product
        return (
            ("DTYPE", product.dtype),
            ("TILE_M", self.tile),
            ("TILE_N", self.tile),
            ("TILE_K", _TILE_K),
            ("STAGES", _STAGES),
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
    """Tiles of 128 x 128, or of 64 x 64 where the large ones would leave multiprocessors idle."""
    large = Sm80Config(product, 128, aligned)
    return large if large.num_blocks >= num_sms else Sm80Config(product, 64, aligned)


class LinearSm80:
    """A launch, for arrays that were checked before: call it with them."""

    __slots__ = ("_launch", "config")

    def __init__(self, config: Sm80Config) -> None:
        product = config.product
        parameters = _PARAMETERS.pack(m=product.m, n=product.n, k=product.k)
        self.config = config
        self._launch = Launch(load_kernel(config.spec()), (config.num_blocks,), (parameters,))

    def __call__(
        self,
        a: Array,
        b: Array,
        up: Array | None,
        bias: Array | None,
        out: Array,
        kept: Array | None,
    ) -> None:
        self._launch(
            a,
            b,
            NULL if up is None else up,
            NULL if bias is None else bias,
            out,
            NULL if kept is None else kept,
        )
