"""Matrix products with few rows or columns, bound by the memory traffic of the large operand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cukit.core.arrays import (
    ACCESS_BYTES,
    Array,
    address_of,
    adopt,
    bfloat16,
    empty,
    float16,
    runs_kernel,
)
from cukit.core.device import KIB, Device, current_device
from cukit.core.kernel import KernelSpec, Launch, launch_plan, load_kernel
from cukit.core.parameters import parameter_structs
from cukit.errors import ArrayDtypeError, ArrayShapeError
from cukit.gemm.dense._dense import check_call, plan_product
from cukit.gemm.dense.cublas import Matrix
from cukit.reference import gemm as reference
from cukit.registry import register

MAX_TOKENS = 16
DTYPES = (float16, bfloat16)
_VECTOR = 8
_WARPS = 8
_MAX_CLUSTER = 8
_CLUSTER_ARCH = (9, 0)
_STAGES_BYTES = 104 * KIB
"""Shared memory for the stages of a block: two blocks fit on an H200's SM, with room for L1."""
_MAX_STAGES = 8


def gemv(
    a: Array,
    b: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: Array | None = None,
    out_dtype: Any = None,
) -> Array:
    """The matrix product `op(a) @ op(b)` with at most 16 rows or at most 16 columns.

    Args:
        a: float16|bfloat16 [..., k]; [..., m] with `transpose_a`, with k rows. Leading axes are
            flattened to rows, as in :func:`matmul`.
        b: dtype of `a`, [k, n]; [n, k] with `transpose_b`.
        transpose_a, transpose_b: multiply by the transpose.
        out: written in place; dtype of `a`, or float32. Must not overlap an operand.
        out_dtype: of the result if `out` is not given: the dtype of `a` (default) or float32.

    Returns:
        `out` or a new array [..., n]; [m, n] with `transpose_a`.

    Raises:
        ArrayError: dtype, shape, layout or device of an argument; more than 16 rows and columns.

    One kernel, kernels_cu/gemm/gemv.cu, handles every layout; it is fastest where rows of the large
    operand are 16-byte aligned and the small operand is contiguous along k. Accumulates in float32
    in a fixed order: deterministic. Runs on CuPy's current stream and can be captured in a graph.
    `matmul(precision="auto")` chooses it where it is the fastest.

    >>> import numpy as np, cukit as ck
    >>> ck.gemv(np.ones((1, 8), np.float16), np.ones((3, 8), np.float16), transpose_b=True)
    array([[8., 8., 8.]], dtype=float16)
    """
    a, b, out = adopt("gemv", a, b, out)
    check_call("gemv", a, b, out, transpose_a=transpose_a, transpose_b=transpose_b)
    if not runs_kernel("gemv", a, b, out):
        product = plan_product("gemv", a, b, out, transpose_a, transpose_b, False, out_dtype)
        operands_of(product.layouts)
        _check_dtype(a)
        return reference.matmul(
            a, b, transpose_a=transpose_a, transpose_b=transpose_b, out=out, out_dtype=product.dtype
        )
    return prepare_gemv(a, b, out, transpose_a, transpose_b, out_dtype)(a, b, out)


class Operands(NamedTuple):
    """The product that the kernel computes: tokens of x times columns of w. Strides in elements."""

    tokens: int
    columns: int
    depth: int
    x_token: int
    x_depth: int
    w_leading: int
    along_columns: bool
    """Whether w is contiguous along its columns rather than along the depth."""
    out_token: int
    out_column: int
    swapped: bool
    """Whether x is `b` and w is `a`."""


def operands_of(layouts: tuple[Matrix, Matrix, Matrix]) -> Operands:
    """Assigns the operand with fewer rows or columns to x; raises ArrayShapeError above 16."""
    left, right, target = layouts
    m, n = target.rows, target.columns
    k = left.rows if left.transposed else left.columns
    if min(m, n) > MAX_TOKENS:
        raise ArrayShapeError(
            f"gemv: the product must have at most {MAX_TOKENS} rows or columns, got [{m}, {n}]"
        )
    if m <= n:
        x_token, x_depth = (1, left.leading) if left.transposed else (left.leading, 1)
        return Operands(
            m, n, k, x_token, x_depth, right.leading, not right.transposed, target.leading, 1, False
        )
    x_depth, x_token = (1, right.leading) if right.transposed else (right.leading, 1)
    return Operands(
        n, m, k, x_token, x_depth, left.leading, left.transposed, 1, target.leading, True
    )


@dataclass(frozen=True)
class GemvConfig:
    """The configuration of a call.

    major: 0 if w is contiguous along the depth, 1 if along the columns.
    tokens: rows of x that the kernel has registers for.
    tiles: tiles of 8 columns per thread block, with major 0.
    stages: pipeline stages of each warp.
    cluster: thread blocks per cluster, which split the depth.
    aligned: whether both operands allow loads of 16 bytes.
    """

    dtype: str
    out: str
    major: int
    tokens: int
    tiles: int
    stages: int
    cluster: int
    aligned: bool
    num_blocks: int

    def spec(self) -> KernelSpec:
        """The kernel variant that this configuration launches."""
        defines = (
            ("DTYPE", self.dtype),
            ("OUT", self.out),
            ("MAJOR", self.major),
            ("TOKENS", self.tokens),
            ("TILES", self.tiles),
            ("STAGES", self.stages),
            ("WARPS", _WARPS),
            ("CLUSTER", self.cluster),
            ("ALIGNED", int(self.aligned)),
        )
        return KernelSpec("gemm/gemv.cu", "gemv", defines, 32 * _WARPS, self.shared_bytes)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the stages, reused for the warps' accumulators at the end."""
        columns = 64 if self.major else 8 * self.tiles
        accumulators = 4 * _WARPS * self.tokens * columns
        return max(accumulators, self.stages * _stage_bytes(self) if self.aligned else 0)


def _stage_bytes(config: GemvConfig) -> int:
    pieces = (4 if config.major else config.tiles) + config.tokens // 8
    return _WARPS * 32 * ACCESS_BYTES * pieces


@lru_cache(maxsize=1024)
def plan_gemv(
    operands: Operands, dtype: str, out: str, device: Device, *, aligned: bool = True
) -> GemvConfig:
    """Assigns strips of columns to thread blocks; where strips are few, clusters split the depth.

    aligned: whether both operands allow loads of 16 bytes.
    """
    tokens = 8 if operands.tokens <= 8 else MAX_TOKENS
    major = int(operands.along_columns)
    tiles = 1
    if not major:
        # More tiles per block reuse the loads of x; fewer give more blocks.
        while tiles < 4 and operands.columns >= 16 * tiles * (device.num_sms - 8):
            tiles *= 2
    strips = -(-operands.columns // (64 if major else 8 * tiles))
    cluster = 1
    if device.compute_capability >= _CLUSTER_ARCH:
        steps = operands.depth // ((16 if major else 32) * _WARPS)  # per warp, without a cluster
        while (
            cluster < _MAX_CLUSTER
            and strips * cluster * 4 < device.num_sms * 3
            and steps >= 8 * cluster
        ):
            cluster *= 2
    config = GemvConfig(dtype, out, major, tokens, tiles, 1, cluster, aligned, strips * cluster)
    room = min(_STAGES_BYTES, device.shared_bytes_per_block - 8 * KIB)
    return replace(config, stages=min(_MAX_STAGES, room // _stage_bytes(config)))


class PreparedGemv(NamedTuple):
    """A checked call, reusable for arrays with the same dtypes, shapes, strides and alignment."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    swapped: bool
    launch: Launch

    def __call__(self, a: Array, b: Array, out: Array | None) -> Array:
        """Launches the kernel; returns `out` or a new array."""
        if out is None:
            out = empty(a, self.shape, self.dtype)
        if out.size:
            if self.swapped:
                self.launch(b, a, out)
            else:
                self.launch(a, b, out)
        return out


@launch_plan
def prepare_gemv(
    a: Array, b: Array, out: Array | None, transpose_a: bool, transpose_b: bool, out_dtype: Any
) -> PreparedGemv:
    """Checks a call, plans it and loads its kernel."""
    product = plan_product("gemv", a, b, out, transpose_a, transpose_b, False, out_dtype)
    operands = operands_of(product.layouts)
    _check_dtype(a)
    lengths: tuple[int, ...] = (operands.depth, operands.w_leading, operands.x_token)
    if operands.along_columns:
        lengths = (*lengths, operands.columns)
    aligned = (
        operands.x_depth == 1
        and all(length % _VECTOR == 0 for length in lengths)
        and all(address_of(array) % ACCESS_BYTES == 0 for array in (a, b))
    )
    config = plan_gemv(
        operands, a.dtype.name, product.dtype.name, current_device(), aligned=aligned
    )
    parameters = parameter_structs("gemm/parameters.cuh")["GemvParameters"].pack(
        x_token=operands.x_token, x_depth=operands.x_depth, w_leading=operands.w_leading,
        out_token=operands.out_token, out_column=operands.out_column,
        tokens=operands.tokens, columns=operands.columns, depth=operands.depth,
    )  # fmt: skip
    launch = Launch(load_kernel(config.spec()), (config.num_blocks,), (parameters,))
    return PreparedGemv(product.shape, product.dtype, operands.swapped, launch)


def _check_dtype(a: Array) -> None:
    if a.dtype not in DTYPES:
        names = ", ".join(dtype.name for dtype in DTYPES)
        raise ArrayDtypeError(f"gemv: a must be {names}, got {a.dtype.name}")


def _specs(device: Device) -> list[KernelSpec]:
    """Both layouts, few and many columns, 8 and 16 tokens, aligned and unaligned."""

    def spec(
        tokens: int, columns: int, along: bool, out: str = "bfloat16", *, dtype: str = "bfloat16",
        **options: Any,
    ) -> Any:  # fmt: skip
        operands = Operands(
            tokens, columns, 8192, 8192, 1, columns if along else 8192, along, columns, 1, False
        )
        return plan_gemv(operands, dtype, out, device, **options).spec()

    return [
        spec(1, 8192, False),
        spec(1, 8192, False, "float16", dtype="float16"),
        spec(1, 1024, False),
        spec(16, 8192, False),
        spec(1, 8192, True),
        spec(16, 1024, True, "float32"),
        spec(8, 8192, False, aligned=False),
        spec(8, 8192, True, aligned=False),
    ]


register(name="gemv", family="gemm", function=gemv, reference=reference.matmul, specs=_specs)
