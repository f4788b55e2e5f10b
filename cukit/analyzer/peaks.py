"""The peak rates of a machine in each precision, with which benchmark results are compared.

Peaks measured in the same run precede those of the datasheet. Needs no GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cukit.analyzer.devices import datasheet_ceilings

PIPES: Mapping[str, tuple[str, ...]] = {
    "fp8": ("tensor_fp8",),
    "int8": ("tensor_int8",),
    "fp16/bf16": ("tensor_bf16", "tensor_fp16"),
    "tf32": ("tensor_tf32",),
    "fp32": ("fp32",),
}
"""Precision -> the pipes that compute in it, the most common one first."""

_DTYPES = {
    "float8_e4m3": "fp8",
    "float8_e5m2": "fp8",
    "int8": "int8",
    "bfloat16": "fp16/bf16",
    "float16": "fp16/bf16",
    "tf32": "tf32",
    "float32": "fp32",
}
_WORDS = {"float8": "fp8", "int8": "int8", "bfloat16": "fp16/bf16", "tf32": "tf32"}


@dataclass(frozen=True)
class Peak:
    """The peak FLOP rate in one precision."""

    tflops: float
    measured: bool
    """Whether it was measured in the same run; if not, it is the datasheet's."""


def precision_of(dtype: str, case: str, impl: str = "") -> str | None:
    """The precision of a benchmark's arithmetic; None for a dtype without arithmetic.

    An implementation may compute in another dtype than its case names ("cukit-bfloat16"), and a
    case may name the dtype of its second operand ("int4 x float8").
    """
    by_impl = _WORDS.get(impl.rpartition("-")[2])
    by_case = _WORDS.get(case.rpartition(" x ")[2].split(" ")[0]) if " x " in case else None
    return by_impl or by_case or _DTYPES.get(dtype)


def peaks(environment: Mapping[str, Any]) -> dict[str, tuple[Peak, ...]]:
    """Every known peak of each precision, the measured one first.

    environment: from a results file. Precisions without a known peak are absent.
    """
    found = environment.get("ceilings") or {}
    measured: dict[str, float] = dict(found.get("measured_tflops") or {})
    if found.get("bf16_gemm_tflops"):
        measured.setdefault("tensor_bf16", float(found["bf16_gemm_tflops"]))
    sheet = datasheet_ceilings(str(environment.get("gpu")))
    result: dict[str, tuple[Peak, ...]] = {}
    for precision, pipes in PIPES.items():
        rates = [
            Peak(float(table[pipe]), table is measured)
            for table in (measured, sheet.datasheet_tflops)
            for pipe in [next((pipe for pipe in pipes if pipe in table), None)]
            if pipe is not None
        ]
        if rates:
            result[precision] = tuple(rates)
    return result


def floor_us(
    environment: Mapping[str, Any], precision: str | None, *, flops: float, bytes_moved: float
) -> float | None:
    """A lower bound on the time: bytes over the measured bandwidth, FLOPs over the peak rate.

    The peak is that of `precision`, measured if known; for float32, that of the tensor cores.

    None if no bandwidth was measured, if there are neither FLOPs nor bytes, or if there are FLOPs
    and no peak is known for them.
    """
    copy_gbps = (environment.get("ceilings") or {}).get("copy_gbps")
    if not copy_gbps or not (flops or bytes_moved):
        return None
    memory_us = float(bytes_moved / copy_gbps / 1e3)
    if not flops:
        return memory_us
    known = peaks(environment)
    # float32 products may run on the tensor cores; and if the peak of a slow precision is not
    # known, the peak of a faster one is still a bound.
    order = {"fp8": ("fp8",), "int8": ("int8",), "fp16/bf16": ("fp16/bf16",)}
    usable = [
        known[name] for name in order.get(precision or "", ("tf32", "fp16/bf16")) if name in known
    ]
    return max(memory_us, flops / usable[0][0].tflops / 1e6) if usable else None
