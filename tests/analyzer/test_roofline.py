"""Rooflines compared with hand-computed values, and peaks with datasheets."""

from __future__ import annotations

import dataclasses

import pytest

from cukit.analyzer.devices import analysis_device, ceilings, datasheet, operations_per_clock
from cukit.analyzer.roofline import roofline, throughput
from cukit.analyzer.schema import Ceilings
from cukit.core.device import typical_device

MACHINE = Ceilings(
    datasheet_gbps=1000.0,
    datasheet_tflops={"fp32": 10.0},
    tflops_per_mhz={"fp32": 0.01},
    measured_copy_gbps=900.0,
)


def test_a_memory_bound_kernel_equals_hand_computed_values() -> None:
    work = throughput(bytes_moved=1e6, flops=1e6, time_us=2.0)
    assert (work.gbps, work.tflops) == (500.0, 0.5)
    datasheet_point, held = roofline(work, MACHINE, median_us=2.0, held_clock_mhz=500.0)
    assert datasheet_point.intensity == 1.0
    assert datasheet_point.bound == "memory"
    assert datasheet_point.attainable_us == pytest.approx(1.0)
    assert datasheet_point.fraction == pytest.approx(0.5)
    assert held.compute_tflops == pytest.approx(5.0)


def test_a_compute_bound_kernel_equals_hand_computed_values() -> None:
    work = throughput(bytes_moved=1e3, flops=1e8, time_us=20.0)
    (point,) = roofline(work, MACHINE, median_us=20.0)
    assert point.bound == "compute"
    assert point.attainable_us == pytest.approx(10.0)


def test_bytes_without_flops_need_no_compute_roof() -> None:
    work = throughput(bytes_moved=9e5, flops=None, time_us=2.0)
    by_roof = {point.roof: point for point in roofline(work, MACHINE, median_us=2.0)}
    assert by_roof["measured"].fraction == pytest.approx(0.5)
    assert by_roof["measured"].compute_tflops is None


def test_without_declared_work_there_is_no_point() -> None:
    nothing = throughput(bytes_moved=None, flops=None, time_us=2.0)
    assert (nothing.gbps, nothing.tflops) == (None, None)
    assert roofline(nothing, MACHINE, median_us=2.0) == ()


@pytest.mark.parametrize(
    ("arch", "name", "pipe", "tflops"),
    [
        ("sm_70", "Tesla V100-SXM2-32GB", "tensor_fp16", 125),
        ("sm_75", "Tesla T4", "tensor_fp16", 65),
        ("sm_80", "NVIDIA A100-SXM4-80GB", "tensor_bf16", 312),
        ("sm_80", "NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("sm_80", "NVIDIA A100-SXM4-80GB", "tensor_tf32", 156),
        ("sm_86", "NVIDIA GeForce RTX 3090", "tensor_fp16", 71),
        ("sm_89", "NVIDIA GeForce RTX 4090", "tensor_int8", 660.6),
        ("sm_90", "NVIDIA H200", "tensor_bf16", 989.4),
        ("sm_90", "NVIDIA H200", "tensor_fp8", 1978.9),
        ("sm_90", "NVIDIA H200", "fp32", 66.9),
        ("sm_120", "NVIDIA GeForce RTX 5090", "tensor_fp16", 209.5),
    ],
)
def test_peaks_equal_the_datasheets(arch: str, name: str, pipe: str, tflops: float) -> None:
    device = dataclasses.replace(analysis_device(arch), name=name)
    assert ceilings(device).datasheet_tflops[pipe] == pytest.approx(tflops, rel=0.01)


def test_the_longest_matching_name_is_used() -> None:
    large, small = datasheet("NVIDIA A100-SXM4-80GB"), datasheet("NVIDIA A100-SXM4-40GB")
    assert large is not None
    assert small is not None
    assert (large.gbps, small.gbps) == (2039, 1555)


def test_an_unknown_gpu_has_no_datasheet_peaks() -> None:
    device = dataclasses.replace(typical_device("sm_90"), name="NVIDIA Something New")
    unknown = ceilings(device, memory_gbps=1234.0)
    assert unknown.datasheet_gbps == 1234.0
    assert unknown.datasheet_tflops == {}
    assert unknown.tflops_per_mhz["tensor_bf16"] > 0
    assert set(operations_per_clock((12, 1))) == {"fp32"}
