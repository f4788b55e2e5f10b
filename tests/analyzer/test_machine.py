"""Facts of the machine: known values without a GPU, plausible measured ceilings with one."""

from __future__ import annotations

import re

import pytest

from cukit.analyzer.devices import analysis_device
from cukit.analyzer.machine import environment, package_versions, results_environment
from cukit.analyzer.timing import GpuTimer, HostTimer
from cukit.core.device import current_device, gpu_available


def test_only_installed_packages_have_versions() -> None:
    versions = package_versions(("numpy", "no-such-package-anywhere"))
    assert set(versions) == {"python", "numpy"}
    assert re.match(r"\d+\.\d+", versions["numpy"])


def test_a_static_environment_measures_nothing() -> None:
    found = environment(analysis_device("sm_80"), static=True)
    assert (found.gpu, found.arch, found.num_sms) == (None, "sm_80", 108)
    assert found.ceilings.measured_copy_gbps is None
    assert found.ceilings.measured_tflops == {}
    assert found.ceilings.datasheet_tflops["tensor_fp16"] == pytest.approx(312, rel=0.01)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found.date)


@pytest.mark.skipif(gpu_available(), reason="for machines without a GPU")
def test_results_of_a_cpu_have_no_ceilings() -> None:
    found = results_environment(HostTimer())
    assert found["ceilings"] == {}
    assert found["driver"] is None
    assert found["gpu"]


@pytest.mark.gpu
@pytest.mark.timing
def test_ceilings_of_this_gpu_are_plausible() -> None:
    found = environment(current_device(), static=False, timer=GpuTimer()).ceilings
    assert found.measured_copy_gbps is not None
    assert found.datasheet_gbps is not None
    assert 0.6 < found.measured_copy_gbps / found.datasheet_gbps < 1.02
    assert set(found.measured_tflops) == {"fp32", "tensor_bf16", "tensor_fp16"}
    for pipe, measured in found.measured_tflops.items():
        if pipe in found.datasheet_tflops:
            assert 0.3 < measured / found.datasheet_tflops[pipe] < 1.15
