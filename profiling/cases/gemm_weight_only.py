"""Cases of `cukit.gemm.quantized_linear`: a linear layer with an int4 or int8 weight.

The peers are the layer with the dequantised weight (cuBLAS), torch's int4 product (tinygemm), and
GemLite for the shape for which it ships configurations tuned on an H100.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import cukit as ck
from cukit.core.arrays import bfloat16
from cukit.gemm import pack_weight, quantized_linear
from cukit.reference import weight_only as reference
from profiling import peers
from profiling.case import Call, Case, Workload
from profiling.data import array_module, integers, normal

GROUP = 128
# With more tokens, torch's int4 product takes milliseconds.
_TINYGEMM_TOKENS = 16
# For other shapes GemLite autotunes, which takes minutes.
_GEMLITE_SHAPE = (4096, 4096)


def cases(small: bool = False) -> list[Case]:
    """Layers of an 8B and a 70B Llama, and a square layer, with 1 to 8192 tokens."""
    if small:
        return [
            weight_only_case(5, 64, 256, "int4"),
            weight_only_case(5, 64, 256, "int8"),
            weight_only_case(5, 64, 256, "int4 x float8"),
        ]
    square, wide = (8192, 8192), (28672, 8192)
    return [
        *(weight_only_case(m, 4096, 4096, "int4") for m in (1, 16, 64)),
        *(
            weight_only_case(m, *square, "int4")
            for m in (1, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192)
        ),
        *(weight_only_case(m, *wide, "int4") for m in (1, 16, 32, 64, 128)),
        *(weight_only_case(m, *wide, "int8") for m in (1, 64)),
        *(weight_only_case(m, *square, "int4 x float8") for m in (64, 128, 256, 4096, 8192)),
    ]


def weight_only_case(m: int, n: int, k: int, form: str) -> Case:
    """x [m, k] times a weight [n, k]: int4 in groups of 128 (with zero points for FP8), or int8
    with a scale per row."""
    float8 = form == "int4 x float8"
    int8 = form == "int8"

    def build() -> Workload:
        weight = _int8(n, k) if int8 else _int4(n, k, zero_points=float8)
        packed = pack_weight(weight, x_dtype=ck.float8_e4m3 if float8 else None)
        x: Any = normal((m, k), "bfloat16")
        if float8:
            scales = array_module().full((m, 1), 0.01, np.float32)
            x = ck.QuantizedArray.encode(x, ck.float8_e4m3, scales=scales, axis=1)
        impls: dict[str, Callable[[], Call]] = {
            "cukit": lambda: lambda: quantized_linear(x, packed)
        }
        if not float8:
            impls["torch-eager"] = lambda: _dense_layer(x, weight)
        if not int8 and not float8 and m <= _TINYGEMM_TOKENS:
            impls["torch-tinygemm"] = lambda: _tinygemm(x, weight)
        if not int8 and not float8 and (n, k) == _GEMLITE_SHAPE:
            impls["gemlite"] = lambda: _gemlite(x, weight)
        return Workload(impls=impls, expected=lambda: reference.quantized_linear(x, weight))

    code_bytes = n * k if int8 else n * k // 2 + 2 * n * k // GROUP
    return Case(
        family="gemm",
        op="quantized_linear",
        name=f"{m}x{n}x{k} {form}",
        dtype="bfloat16",
        build=build,
        flops=2 * m * n * k,
        bytes=code_bytes + m * k * (1 if float8 else 2) + 2 * m * n,
    )


def _int4(n: int, k: int, *, zero_points: bool) -> ck.QuantizedArray:
    storage = integers(0, 256, (n, k // 2), "uint8")
    scales = (abs(normal((n, k // GROUP), "float32")) + 0.5) * (0.2 * k**-0.5)
    zeros = integers(-8, 8, (n, k // GROUP), "int8") if zero_points else None
    return ck.QuantizedArray(
        storage, ck.int4, (n, k), scales.astype(bfloat16), zeros, axis=1, group_size=GROUP
    )


def _int8(n: int, k: int) -> ck.QuantizedArray:
    scales = (abs(normal((n, 1), "float32")) + 0.5) * (0.01 * k**-0.5)
    codes = integers(-127, 128, (n, k), "int8")
    return ck.QuantizedArray(codes, ck.int8, (n, k), scales.astype(bfloat16), axis=1)


def _dense_layer(x: Any, weight: ck.QuantizedArray) -> Call:
    """The layer with the weight in the dtype of x."""
    linear = peers.torch().nn.functional.linear
    return peers.forward(linear, x, weight.decode(x.dtype))


def _tinygemm(x: Any, weight: ck.QuantizedArray) -> Call:
    """torch's int4 product, which takes codes + 8, the first in the upper half of a byte."""
    torch: ModuleType = peers.torch()
    unsigned = weight.storage ^ 0x88
    codes = peers.to_torch((unsigned << 4) | (unsigned >> 4))
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = peers.to_torch(weight.scales).T
    factors = torch.stack((scales, torch.zeros_like(scales)), dim=-1).contiguous()
    tokens = peers.to_torch(x)
    return lambda: torch.ops.aten._weight_int4pack_mm(tokens, packed, GROUP, factors)


def _gemlite(x: Any, weight: ck.QuantizedArray) -> Call:
    """GemLite's Triton kernels, which take codes + 8 with a zero point of 8."""
    gemlite = peers.optional("gemlite")
    helper = peers.optional("gemlite.helper")
    assert gemlite.__file__ is not None
    gemlite.load_config(str(Path(gemlite.__file__).parent / "configs" / "h100.json"))
    torch: ModuleType = peers.torch()
    pairs = peers.to_torch(weight.storage ^ 0x88)
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).reshape(weight.shape)
    scales = peers.to_torch(weight.scales).reshape(-1, 1)
    zeros = torch.full_like(scales, 8)
    maker = helper.A16W4_HQQ_INT(device="cuda:0", dtype=scales.dtype)
    return peers.forward(maker.from_weights(codes, scales, zeros), x)
