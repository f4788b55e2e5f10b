"""Cases of `cukit.quantization`: quantisation and dequantisation.

The floor counts every value as read once; with one scale per tensor, values are read twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from cukit.array_api import NarrowDtype, float8_e4m3, int4, int8
from cukit.core.quantized_array import block_shape
from cukit.quantization import dequantize, quantize
from cukit.reference import quantize as reference
from profiling import peers
from profiling.case import Case, PeerMissing, Workload, itemsize
from profiling.data import normal
from profiling.standard_impls import forward_impls

FAMILY = "quantization"
VALUES = "bfloat16"

# Granularities by name: `axis` and `group_size` of quantize.
ROW: dict[str, Any] = {}
TENSOR: dict[str, Any] = {"axis": None}
COLUMN: dict[str, Any] = {"axis": -2}
GROUP_128: dict[str, Any] = {"group_size": 128}
GROUP_32: dict[str, Any] = {"group_size": 32}
TILE: dict[str, Any] = {"axis": (-2, -1), "group_size": 128}


def cases(small: bool = False) -> list[Case]:
    """Scales per token and per 1x128 block for activations; per row, group and tile for weights;
    per tensor and per column."""
    large = (256, 256) if small else (16384, 8192)
    return [
        quantize_case(*large, int8, "row", ROW),
        quantize_case(*large, int8, "column", COLUMN),
        quantize_case(*large, int4, "group 128", GROUP_128),
        quantize_case(*large, int4, "group 32 zero points", {**GROUP_32, "zero_points": True}),
        quantize_case(*large, int4, "group 128 mse", {**GROUP_128, "clip": "mse"}),
        quantize_case(*large, float8_e4m3, "tensor", TENSOR),
        quantize_case(*large, float8_e4m3, "row", ROW),
        quantize_case(*large, float8_e4m3, "1x128", {**GROUP_128, "scale_layout": "column"}),
        quantize_case(*large, float8_e4m3, "128x128", TILE),
        quantize_case(128, large[1], float8_e4m3, "1x128", {**GROUP_128, "scale_layout": "column"}),
        dequantize_case(*large, int8, "row", ROW),
        dequantize_case(*large, int4, "group 128 zero points", {**GROUP_128, "zero_points": True}),
        dequantize_case(*large, float8_e4m3, "128x128", TILE),
    ]


def _codes_bytes(rows: int, cols: int, narrow: NarrowDtype, options: dict[str, Any]) -> float:
    """Bytes of the codes, scales and zero points."""
    down, across = block_shape((rows, cols), options.get("axis", -1), options.get("group_size"))
    factors = -(-rows // down) * -(-cols // across)
    return rows * cols * narrow.bits / 8 + factors * (5 if options.get("zero_points") else 4)


def quantize_case(
    rows: int, cols: int, narrow: NarrowDtype, name: str, options: dict[str, Any]
) -> Case:
    """Reads values, writes codes and scales."""

    def build() -> Workload:
        x = normal((rows, cols), VALUES)
        axis, group_size = options.get("axis", -1), options.get("group_size")
        block = block_shape(x.shape, axis, group_size)
        rounding = {key: options[key] for key in ("zero_points", "clip") if key in options}

        def ours() -> Any:
            array = quantize(x, narrow, **options)
            return array.storage, array.scales

        def expected() -> Any:
            codes, scales, _ = reference.quantize(x, narrow.name, block, **rounding)
            return codes, scales

        impls = {"cukit": lambda: ours}
        if options.get("clip") != "mse":
            torch_function = partial(_torch_quantize, narrow, block, "zero_points" in options)
            impls = forward_impls(ours, torch_function, x)
        if narrow == float8_e4m3 and block in ((1, 128), (128, 128)):
            impls["torchao"] = lambda: peers.forward(_torchao_quantize(block), x)
        return Workload(impls=impls, expected=expected, tolerance=2e-2)

    return Case(
        FAMILY,
        "quantize",
        f"{rows}x{cols} {name}",
        narrow.name,
        build,
        bytes=_codes_bytes(rows, cols, narrow, options) + rows * cols * itemsize(VALUES),
    )


def dequantize_case(
    rows: int, cols: int, narrow: NarrowDtype, name: str, options: dict[str, Any]
) -> Case:
    """Reads codes and scales, writes values."""

    def build() -> Workload:
        array = quantize(normal((rows, cols), VALUES), narrow, **options)
        factors = [array.scales, *([array.zero_points] if array.zero_points is not None else [])]
        assert array.block_shape is not None
        return Workload(
            impls=forward_impls(
                partial(dequantize, array, VALUES),
                partial(_torch_dequantize, narrow, array.block_shape),
                array.storage,
                *factors,
            ),
            expected=lambda: reference.dequantize(
                array.storage,
                narrow.name,
                cols,
                array.scales,
                array.zero_points,
                array.block_shape or (),
            ),
        )

    return Case(
        FAMILY,
        "dequantize",
        f"{rows}x{cols} {name}",
        narrow.name,
        build,
        bytes=_codes_bytes(rows, cols, narrow, options) + rows * cols * itemsize(VALUES),
    )


def _torch_quantize(
    narrow: NarrowDtype, block: tuple[int, ...], zero_points: bool, torch: ModuleType
) -> Callable[..., Any]:
    most = narrow.most

    def codes_of(scaled: Any) -> Any:
        if not narrow.integer:
            return scaled.clamp(-most, most).to(torch.float8_e4m3fn).view(torch.uint8)
        codes = scaled.round().clamp(-most - 1, most).to(torch.int8)
        if narrow.bits == 8:
            return codes
        low, high = codes.view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
        return (low & 15) | (high << 4)

    def run(x: Any) -> Any:
        rows, cols = x.shape
        split = (rows // block[0], block[0], cols // block[1], block[1])
        blocks = x.float().reshape(split)
        if zero_points:
            low = blocks.amin((1, 3), keepdim=True).clamp(max=0)
            high = blocks.amax((1, 3), keepdim=True).clamp(min=0)
            scales = (high - low) / (2 * most + 1)
            zeros = (-low / scales).round() - most - 1
            scaled = blocks / scales + zeros
        else:
            scales = blocks.abs().amax((1, 3), keepdim=True) / most
            scaled = blocks / scales
        return codes_of(scaled.reshape(rows, cols)), scales[:, 0, :, 0]

    return run


def _torchao_quantize(block: tuple[int, ...]) -> Callable[..., Any]:
    kernels = peers.optional("torchao.kernel.blockwise_quantization")
    try:
        name = "fp8_blockwise_act_quant" if block[0] == 1 else "fp8_blockwise_weight_quant"
        function = getattr(kernels, name)
    except AttributeError as error:
        raise PeerMissing(f"torchao: {error}") from None
    uint8 = peers.torch().uint8

    def run(x: Any) -> Any:
        codes, scales = function(x)
        return codes.view(uint8), scales

    return run


def _torch_dequantize(
    narrow: NarrowDtype, block: tuple[int, ...], torch: ModuleType
) -> Callable[..., Any]:
    dtype = getattr(torch, VALUES)

    def run(storage: Any, scales: Any, zero_points: Any = None) -> Any:
        if not narrow.integer:
            codes = storage.view(torch.float8_e4m3fn).float()
        elif narrow.bits == 8:
            codes = storage.float()
        else:
            pairs = torch.stack((storage & 15, storage >> 4), dim=-1).view(torch.int8)
            codes = ((pairs ^ 8) - 8).flatten(-2).float()
        rows, cols = codes.shape
        blocks = codes.reshape(rows // block[0], block[0], cols // block[1], block[1])
        if zero_points is not None:
            blocks = blocks - zero_points[:, None, :, None].float()
        return (blocks * scales[:, None, :, None]).reshape(rows, cols).to(dtype)

    return run
