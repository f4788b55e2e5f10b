"""Cases of 8-bit products in `cukit.gemm`: int8, and FP8 with scales per tensor, row and block. The
peer is torch (cuBLASLt)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from cukit.core.narrow_dtype import float8_e4m3, int8
from cukit.core.quantized_array import QuantizedArray
from cukit.gemm import matmul_fp8, matmul_int8
from cukit.reference import gemm_8bit as reference
from profiling import peers
from profiling.case import Call, Case, Workload
from profiling.data import array_module, integers, normal

BLOCK_SHAPES = ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168))
"""(n, k) of the linear layers of DeepSeek-V3, as in DeepGEMM's published times."""


def cases(small: bool = False) -> list[Case]:
    """Compute-bound square products, and linear layers with few tokens."""
    if small:
        return [
            int8_case(48, 32, 64, scaled=False),
            int8_case(48, 32, 64, scaled=True),
            *(float8_case(48, 144, 256, kind) for kind in ("tensor", "row", "blocks")),
            float8_case(48, 144, 256, "row", fast=True),
        ]
    return [
        int8_case(8192, 8192, 8192, scaled=False),
        *(
            int8_case(m, n, k, scaled=True)
            for m, n, k in ((8192, 8192, 8192), (128, 4096, 4096), (128, 16384, 4096))
        ),
        *(
            float8_case(size, size, size, kind, fast=fast)
            for size in (4096, 8192)
            for kind in ("tensor", "row", "blocks")
            for fast in ((False,) if kind == "blocks" else (False, True))
        ),
        *(float8_case(m, n, k, "blocks") for n, k in BLOCK_SHAPES for m in (64, 128, 4096)),
    ]


def int8_case(m: int, n: int, k: int, *, scaled: bool) -> Case:
    """a [m, k] times the transpose of b [n, k]: int32, or bfloat16 with scales per row."""

    def build() -> Workload:
        xp = array_module()
        codes = [integers(-127, 128, (rows, k), "int8") for rows in (m, n)]
        scales = [xp.full((rows, 1), 2.0**-7, xp.float32) for rows in (m, n)]
        a, b = (
            QuantizedArray(each, int8, each.shape, factors, None, 1)
            if scaled
            else QuantizedArray(each, int8, each.shape)
            for each, factors in zip(codes, scales, strict=True)
        )

        def torch_product(torch: ModuleType) -> Callable[..., Any]:
            def product(x: Any, w: Any, x_scales: Any, w_scales: Any) -> Any:
                sums = torch._int_mm(x, w.T)
                return (sums * x_scales * w_scales.T).to(torch.bfloat16) if scaled else sums

            return product

        def peer(compiled: bool) -> Call:
            function = torch_product(peers.torch())
            return peers.forward(function, *codes, *scales, compiled=compiled)

        impls = {"cukit": lambda: partial(matmul_int8, a, b), "torch-eager": partial(peer, False)}
        if scaled:
            impls["torch-compile"] = partial(peer, True)
        return Workload(
            impls=impls, expected=lambda: reference.matmul_int8(a, b, out_dtype=xp.float32)
        )

    return Case(
        family="gemm",
        op="matmul_int8",
        name=f"{m}x{n}x{k}" + (" scaled" if scaled else ""),
        dtype="int8",
        build=build,
        flops=2 * m * n * k,
        bytes=(m + n) * k + m * n * (2 if scaled else 4),
    )


def float8_case(m: int, n: int, k: int, kind: str, fast: bool = False) -> Case:
    """a [m, k] times the transpose of b [n, k], to bfloat16.

    kind: granularity of scales: "tensor", "row" or "blocks".
    fast: accumulate in the tensor cores only.
    """

    def build() -> Workload:
        a, b = _float8_operand(m, k, kind), _float8_operand(n, k, kind, weight=True)

        def peer() -> Call:
            torch = peers.torch()
            x, w = (peers.to_torch(each.storage).view(torch.float8_e4m3fn) for each in (a, b))
            x_scales, w_scales = (peers.to_torch(each.scales) for each in (a, b))
            return lambda: torch._scaled_mm(
                x, w.T, x_scales, w_scales.T, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        impls: dict[str, Callable[[], Call]] = {
            "cukit": lambda: partial(matmul_fp8, a, b, fast_accumulation=fast),
            "torch-eager": peer,
        }
        return Workload(impls=impls, expected=partial(_expected, a, b), tolerance=2e-2)

    return Case(
        family="gemm",
        op="matmul_fp8",
        name=f"{m}x{n}x{k} {kind}{' fast' if fast else ''}",
        dtype="float8_e4m3",
        build=build,
        flops=2 * m * n * k,
        bytes=(m + n) * k + 2 * m * n,
    )


def _float8_operand(rows: int, k: int, kind: str, weight: bool = False) -> QuantizedArray:
    """Normally distributed values with scales near 1."""
    xp = array_module()
    codes = QuantizedArray.encode(normal((rows, k), "float32"), float8_e4m3).storage
    steps = -(-k // 128)
    if kind == "tensor":
        return QuantizedArray(codes, float8_e4m3, (rows, k), xp.ones((1, 1), xp.float32))
    if kind == "row":
        scales = xp.abs(normal((rows, 1), "float32")) + 0.5
        return QuantizedArray(codes, float8_e4m3, (rows, k), scales, None, 1)
    if weight:
        scales = xp.abs(normal((-(-rows // 128), steps), "float32")) + 0.5
        return QuantizedArray(codes, float8_e4m3, (rows, k), scales, None, (0, 1), 128)
    columns = xp.abs(normal((steps, -(-rows // 4) * 4), "float32")) + 0.5
    return QuantizedArray(codes, float8_e4m3, (rows, k), columns[:, :rows].T, None, 1, 128)


def _expected(a: QuantizedArray, b: QuantizedArray) -> Any:
    """The product of the decoded operands in float32."""
    return a.decode() @ b.decode().T
