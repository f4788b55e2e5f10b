"""Devices for analysing kernels without a GPU, and the theoretical peak rates of GPUs.

`cukit.core.device.TYPICAL_DEVICES` are the GPUs that cukit's own kernels are compiled for. Users'
kernels may target older or smaller ones, so ANALYSIS_DEVICES has one GPU per architecture since
Volta.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cukit.analyzer.schema import Ceilings
from cukit.core.device import KIB, MIB, TYPICAL_DEVICES, Device, parse_arch
from cukit.errors import ConfigError

ANALYSIS_DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.arch: device
        for device in sorted(
            (
                Device("V100", (7, 0), 80, 96 * KIB, 96 * KIB, 2048, 65536, 6 * MIB, 32 << 30),
                Device("Xavier", (7, 2), 8, 96 * KIB, 96 * KIB, 2048, 65536, MIB // 2, 32 << 30),
                Device("T4", (7, 5), 40, 64 * KIB, 64 * KIB, 1024, 65536, 4 * MIB, 16 << 30),
                Device("Orin", (8, 7), 16, 163 * KIB, 164 * KIB, 1536, 65536, 4 * MIB, 64 << 30),
                Device("Thor", (10, 1), 20, 227 * KIB, 228 * KIB, 1536, 65536, 32 * MIB, 128 << 30),
                Device(
                    "B300", (10, 3), 148, 227 * KIB, 228 * KIB, 2048, 65536, 126 * MIB, 288 << 30
                ),
                Device("GB10", (12, 1), 48, 99 * KIB, 100 * KIB, 1536, 65536, 24 * MIB, 128 << 30),
                *TYPICAL_DEVICES.values(),
            ),
            key=lambda device: device.compute_capability,
        )
    }
)


def analysis_device(arch: str) -> Device:
    """The device that represents `arch` (`"sm_90"`, `"sm_90a"`). ConfigError if unknown."""
    major, minor = parse_arch(arch)
    try:
        return ANALYSIS_DEVICES[f"sm_{major}{minor}"]
    except KeyError:
        known = ", ".join(ANALYSIS_DEVICES)
        raise ConfigError(f"arch: {arch!r} is not a known architecture; known: {known}") from None


@dataclass(frozen=True)
class Datasheet:
    """One GPU's SMs, its memory bandwidth, and the boost clocks that its datasheet's peak rates
    assume."""

    compute_capability: tuple[int, int]
    num_sms: int
    gbps: float
    tensor_clock_mhz: float
    vector_clock_mhz: float
    """The clock of the float32 rate without tensor cores; in some datasheets it is higher."""


# The keys are substrings of GPU names; of several matches, the longest is used.
_DATASHEETS: Mapping[str, Datasheet] = MappingProxyType(
    {
        "V100-SXM2": Datasheet((7, 0), 80, 900, 1530, 1530),
        "T4": Datasheet((7, 5), 40, 320, 1590, 1590),
        "A100": Datasheet((8, 0), 108, 1555, 1410, 1410),
        "A100-SXM4-80GB": Datasheet((8, 0), 108, 2039, 1410, 1410),
        "A100 80GB PCIe": Datasheet((8, 0), 108, 1935, 1410, 1410),
        "H100 80GB HBM3": Datasheet((9, 0), 132, 3350, 1830, 1980),
        "H200": Datasheet((9, 0), 132, 4800, 1830, 1980),
        "B200": Datasheet((10, 0), 148, 8000, 1850, 1965),
        "RTX 3090": Datasheet((8, 6), 82, 936, 1695, 1695),
        "RTX 4090": Datasheet((8, 9), 128, 1008, 2520, 2520),
        "RTX 5090": Datasheet((12, 0), 170, 1792, 2407, 2407),
    }
)

# Dense floating-point (or int8) operations per clock and SM, with float32 accumulation. A
# multiply-add counts as two.
_VECTOR_FP32 = {(7, 0): 128, (7, 2): 128, (7, 5): 128, (8, 0): 128}
_VECTOR_FP32_SINCE_SM_86 = 256
_TENSOR_HALF = {(7, 0): 1024, (7, 2): 1024, (7, 5): 1024, (8, 0): 2048, (8, 6): 512, (8, 7): 1024}
_TENSOR_HALF |= {(8, 9): 512, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192, (12, 0): 512}


def datasheet(gpu: str) -> Datasheet | None:
    """The datasheet of a GPU with this name, or None if it is not in the table."""
    others = "Ti|SUPER|D|Laptop|Max-Q"  # suffixes of other GPUs
    found = [n for n in _DATASHEETS if re.search(rf"\bG?{n}\b(?! ?({others})\b)", gpu)]
    return _DATASHEETS[max(found, key=len)] if found else None


def operations_per_clock(compute_capability: tuple[int, int]) -> dict[str, int]:
    """Operations per clock of one SM, for each pipe that the architecture has."""
    rates = {"fp32": _VECTOR_FP32.get(compute_capability, _VECTOR_FP32_SINCE_SM_86)}
    half = _TENSOR_HALF.get(compute_capability)
    if half is None:
        return rates
    rates["tensor_fp16"] = half
    if compute_capability >= (8, 0):
        rates |= {"tensor_bf16": half, "tensor_tf32": half // 2}
        # Consumer GPUs run FP16 with float32 accumulation at half rate, and int8 at full rate.
        consumer = compute_capability in ((8, 6), (8, 9), (12, 0))
        if compute_capability < (10, 3) or consumer:
            rates["tensor_int8"] = half * (4 if consumer else 2)
    if compute_capability >= (8, 9):
        rates["tensor_fp8"] = 2 * half
    return rates


def ceilings(device: Device, memory_gbps: float | None = None) -> Ceilings:
    """The theoretical ceilings of `device`.

    memory_gbps: computed from the GPU's memory clock and bus width; used for a GPU without a
        :class:`Datasheet`.
    """
    sheet = datasheet(device.name)
    if sheet is not None:
        return _ceilings(sheet, device.compute_capability, device.num_sms)
    per_mhz = _tflops_per_mhz(device.compute_capability, device.num_sms)
    return Ceilings(datasheet_gbps=memory_gbps, tflops_per_mhz=per_mhz)


def datasheet_ceilings(gpu: str) -> Ceilings:
    """The datasheet's ceilings of a GPU with this name; empty for an unknown GPU."""
    sheet = datasheet(gpu)
    if sheet is None:
        return Ceilings()
    return _ceilings(sheet, sheet.compute_capability, sheet.num_sms)


def _tflops_per_mhz(compute_capability: tuple[int, int], num_sms: int) -> dict[str, float]:
    rates = operations_per_clock(compute_capability)
    return {pipe: rate * num_sms / 1e6 for pipe, rate in rates.items()}


def _ceilings(sheet: Datasheet, compute_capability: tuple[int, int], num_sms: int) -> Ceilings:
    per_mhz = _tflops_per_mhz(compute_capability, num_sms)
    peaks = {
        pipe: rate * (sheet.vector_clock_mhz if pipe == "fp32" else sheet.tensor_clock_mhz)
        for pipe, rate in per_mhz.items()
    }
    return Ceilings(datasheet_gbps=sheet.gbps, datasheet_tflops=peaks, tflops_per_mhz=per_mhz)
