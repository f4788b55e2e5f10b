"""The machine of an analysis: its name, versions, and measured ceilings."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from cukit.analyzer import devices
from cukit.analyzer.ceiling_probes import fma_threads, launch_copy, launch_fma
from cukit.analyzer.schema import Environment
from cukit.analyzer.timing import Timer, measure
from cukit.core.device import Device, current_device, gpu_available, require_cupy
from cukit.registry import get_kernel

PACKAGES = ("numpy", "cupy-cuda12x", "cupy-cuda13x", "torch", "triton", "liger-kernel")

COPY_BYTES = 1 << 31
GEMM_SIZE = 8192
FMA_ROUNDS = 512
"""Rounds of the multiply-add kernel: about half a millisecond."""

_GEMM_PIPES = {"tensor_bf16": "bfloat16", "tensor_fp16": "float16"}


def environment(device: Device, *, static: bool, timer: Timer | None = None) -> Environment:
    """The machine and its software, reported with the figures of `device`.

    static: the figures were computed for `device`, which need not be present.
    timer: measures the ceilings, in about two seconds; None skips them.
    """
    on_paper = devices.ceilings(device, None if static else _memory_gbps())
    measured = on_paper
    if timer is not None and not static:
        rates = {"fp32": fma_tflops(timer), **gemm_tflops(timer)}
        measured = replace(on_paper, measured_copy_gbps=copy_gbps(timer), measured_tflops=rates)
    return Environment(
        gpu=None if static else device.name,
        arch=device.arch,
        num_sms=device.num_sms,
        l2_bytes=device.l2_bytes,
        memory_bytes=device.memory_bytes,
        driver=driver_version() if gpu_available() else None,
        cuda=cuda_version(),
        versions=package_versions(PACKAGES),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ceilings=measured,
    )


def results_environment(timer: Timer) -> dict[str, Any]:
    """The environment of a results file: this machine and its measured ceilings.

    Takes about two seconds on a GPU; without one there are no ceilings. `measured_tflops` holds
    rates by pipe, as in an analysis; `bf16_gemm_tflops` repeats the rate of `tensor_bf16`, the only
    rate in older files.
    """
    found: dict[str, Any] = {
        "gpu": platform.processor() or platform.machine(),
        "driver": None,
        "cuda": None,
        "versions": package_versions(PACKAGES),
        "clocks": {},
        "ceilings": {},
        "commit": None,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }
    if not gpu_available():
        return found
    rates = {"fp32": fma_tflops(timer), **gemm_tflops(timer)}
    return found | {
        "gpu": current_device().name,
        "driver": driver_version(),
        "cuda": cuda_version(),
        "ceilings": {
            "copy_gbps": copy_gbps(timer),
            "bf16_gemm_tflops": rates["tensor_bf16"],
            "measured_tflops": rates,
        },
    }


def package_versions(names: tuple[str, ...]) -> dict[str, str]:
    """The versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def driver_version() -> str | None:
    """The version of the NVIDIA driver; None if nvidia-smi does not report it."""
    command = ["nvidia-smi", "--id=0", "--format=csv,noheader", "--query-gpu=driver_version"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def cuda_version() -> str | None:
    """The version of the CUDA runtime that CuPy uses, e.g. "12.9"; None without CuPy."""
    try:
        version = int(require_cupy("the CUDA version").cuda.runtime.runtimeGetVersion())
    except ImportError:
        return None
    return f"{version // 1000}.{version % 1000 // 10}"


def copy_gbps(timer: Timer) -> float:
    """Bytes read plus bytes written per second of a large copy within the GPU's memory.

    The faster of cudaMemcpy and a kernel: which one is faster depends on the GPU.
    """
    cupy = require_cupy("measuring a copy")
    source = _noise(COPY_BYTES // 4)
    target = cupy.empty_like(source)
    impls = {
        "memcpy": lambda: cupy.copyto(target, source),
        "kernel": lambda: launch_copy(target, source),
    }
    fastest_us = min(timing.median_us for timing in measure(impls, timer).values())
    return round(2 * COPY_BYTES / fastest_us / 1e3, 1)


def fma_tflops(timer: Timer) -> float:
    """The rate of the vector units in float32 multiply-adds."""
    cupy = require_cupy("measuring multiply-adds")
    out = cupy.empty(fma_threads(current_device()), cupy.float32)
    flops = launch_fma(out, FMA_ROUNDS)
    timing = measure({"fma": lambda: launch_fma(out, FMA_ROUNDS)}, timer)["fma"]
    return round(flops / timing.median_us / 1e6, 1)


def gemm_tflops(timer: Timer, pipes: Iterable[str] = tuple(_GEMM_PIPES)) -> dict[str, float]:
    """The rate of cuBLAS for a large square product, by pipe."""
    matmul: Callable[..., Any] = get_kernel("matmul")
    rates = {}
    for pipe in pipes:
        a, b = (_matrix(_GEMM_PIPES[pipe]) for _ in range(2))
        out = a.copy()

        def product(a: Any = a, b: Any = b, out: Any = out) -> None:
            matmul(a, b, out=out)

        timing = measure({"product": product}, timer)["product"]
        rates[pipe] = round(2 * GEMM_SIZE**3 / timing.median_us / 1e6, 1)
    return rates


def _noise(count: int) -> Any:
    """Numbers with varied bits: constant data draw less power and run faster."""
    cupy = require_cupy("measuring ceilings")
    return cupy.arange(count, dtype=cupy.uint32) * cupy.uint32(2654435761)


def _matrix(dtype: str) -> Any:
    cupy = require_cupy("measuring ceilings")
    import ml_dtypes
    import numpy as np

    bits = _noise(GEMM_SIZE * GEMM_SIZE)
    values = bits.astype(cupy.float32) * np.float32(2.0**-31) - np.float32(1)
    target = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    return values.astype(target).reshape(GEMM_SIZE, GEMM_SIZE)


def _memory_gbps() -> float | None:
    """The theoretical bandwidth of the memory: two transfers per clock and data line."""
    attributes = require_cupy("the memory's clock").cuda.Device().attributes
    clock_khz, bus_bits = attributes.get("MemoryClockRate"), attributes.get("GlobalMemoryBusWidth")
    return 2 * clock_khz * bus_bits / 8 / 1e6 if clock_khz and bus_bits else None
