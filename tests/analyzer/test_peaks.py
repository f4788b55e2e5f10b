"""The precision of a benchmark's arithmetic, and the machine's peak rate at that precision."""

from __future__ import annotations

from typing import Any

import pytest

from cukit.analyzer.devices import datasheet, datasheet_ceilings
from cukit.analyzer.peaks import Peak, floor_us, peaks, precision_of

H200: dict[str, Any] = {
    "gpu": "NVIDIA H200",
    "ceilings": {"copy_gbps": 4000.0, "bf16_gemm_tflops": 800.0},
}


@pytest.mark.parametrize(
    ("dtype", "case", "impl", "precision"),
    [
        ("bfloat16", "4096x4096", "cukit", "fp16/bf16"),
        ("float16", "d128 causal", "torch-cudnn", "fp16/bf16"),
        ("float8_e4m3", "4096 blocks", "cukit-precise", "fp8"),
        ("float8_e4m3", "d256 4x8x4096", "cukit-bfloat16", "fp16/bf16"),
        ("bfloat16", "4096x8192x8192 int4", "cukit", "fp16/bf16"),
        ("bfloat16", "4096x8192x8192 int4 x float8", "cukit", "fp8"),
        ("bfloat16", "4 x 8192, 6144x7168", "torch-loop", "fp16/bf16"),
        ("int8", "8192 scaled", "cukit", "int8"),
        ("float32", "4096", "cukit", "fp32"),
        ("uint8", "moves", "cukit", None),
    ],
)
def test_the_precision_follows_from_dtype_case_and_implementation(
    dtype: str, case: str, impl: str, precision: str | None
) -> None:
    assert precision_of(dtype, case, impl) == precision


def test_measured_peaks_precede_those_of_the_datasheet() -> None:
    found = peaks(H200)
    assert found["fp16/bf16"][0] == Peak(800.0, measured=True)
    assert found["fp16/bf16"][1].tflops == pytest.approx(989, rel=0.01)
    assert [peak.measured for peak in found["fp8"]] == [False]
    assert set(found) == {"fp8", "int8", "fp16/bf16", "tf32", "fp32"}
    more = H200 | {"ceilings": {**H200["ceilings"], "measured_tflops": {"fp32": 60.0}}}
    assert peaks(more)["fp32"][0] == Peak(60.0, measured=True)


@pytest.mark.parametrize(
    ("gpu", "gbps"),
    [
        ("NVIDIA H200", 4800),
        ("NVIDIA A100-SXM4-40GB", 1555),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA A100 80GB PCIe", 1935),
        ("NVIDIA GB200", 8000),
        ("Tesla T4", 320),
        ("NVIDIA T400", None),
        ("NVIDIA GeForce RTX 4090", 1008),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
    ],
)
def test_datasheets_of_gpus_with_similar_names(gpu: str, gbps: float | None) -> None:
    found = datasheet(gpu)
    assert (found and found.gbps) == gbps


@pytest.mark.parametrize(
    ("gpu", "gbps", "bf16"),
    [
        ("NVIDIA A100-SXM4-80GB", 2039, 312),
        ("NVIDIA H100 80GB HBM3", 3350, 989),
        ("NVIDIA H200", 4800, 989),
        ("Tesla V100-SXM2-32GB", 900, None),
        ("NVIDIA GeForce RTX 4090", 1008, 165),
    ],
)
def test_ceilings_by_the_name_of_a_gpu(gpu: str, gbps: float, bf16: float | None) -> None:
    found = datasheet_ceilings(gpu)
    assert found.datasheet_gbps == gbps
    assert found.datasheet_tflops.get("tensor_bf16") == (bf16 and pytest.approx(bf16, rel=2e-3))


def test_an_unknown_gpu_has_only_measured_peaks() -> None:
    assert datasheet_ceilings("NVIDIA Something").datasheet_gbps is None
    assert set(peaks({**H200, "gpu": "NVIDIA Something"})) == {"fp16/bf16"}
    assert peaks({}) == {}


def test_floors_use_the_measured_peak_or_that_of_the_datasheet() -> None:
    work = {"flops": 8e12, "bytes_moved": 4e9}  # 1 ms of copying
    assert floor_us(H200, "fp16/bf16", **work) == pytest.approx(1e4)
    assert floor_us(H200, "fp8", **work) == pytest.approx(8e6 / 1979, rel=1e-3)
    # float32 matrix products may use TF32, which has a higher peak than the float32 units.
    assert floor_us(H200, "fp32", **work) == pytest.approx(8e6 / 494.7, rel=1e-3)
    assert floor_us(H200, None, flops=0.0, bytes_moved=4e9) == pytest.approx(1e3)
    unknown = {**H200, "gpu": "NVIDIA Something"}
    assert floor_us(unknown, "fp8", **work) is None, (
        "a bfloat16 ceiling does not bound 8-bit arithmetic"
    )
    assert floor_us(unknown, "fp32", **work) == pytest.approx(1e4)
    assert floor_us({}, "fp8", **work) is None
    assert floor_us(H200, "fp8", flops=0.0, bytes_moved=0.0) is None
