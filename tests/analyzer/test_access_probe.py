"""The access probe: sums in the emulator, access widths, and its table on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

import cukit
from cukit.analyzer.access_probe import (
    STRIDES,
    THREADS,
    WIDTHS_BYTES,
    launch,
    probe_spec,
    sector_fraction,
)
from cukit.analyzer.static import inspect
from cukit.core.device import cupy_module, typical_device


def expected_sums(words: np.ndarray, threads: int, width: int, stride: int) -> np.ndarray:
    loads = words.reshape(-1, width // 4)[::stride]
    loads = loads[: words.size * 4 // width // stride].sum(axis=1)
    padded = np.zeros(-(-len(loads) // threads) * threads, np.float32)
    padded[: len(loads)] = loads
    return padded.reshape(-1, threads).sum(axis=0)


@pytest.mark.emulator
@pytest.mark.parametrize("width", WIDTHS_BYTES)
@pytest.mark.parametrize("stride", [1, 3, 32])
def test_sums_equal_those_of_numpy(width: int, stride: int) -> None:
    words = np.arange(5000 * 4, dtype=np.float32) % 17
    sums = np.full(2 * THREADS, np.nan, np.float32)
    with cukit.backend("emulator"):
        launch(words, sums, width, stride)
    np.testing.assert_array_equal(sums, expected_sums(words, sums.size, width, stride))


@pytest.mark.skipif(cupy_module() is None, reason="compiling needs NVRTC")
@pytest.mark.parametrize("width", WIDTHS_BYTES)
def test_loads_have_the_requested_width(width: int) -> None:
    from cukit.core.compiler import compile_kernel

    compiled = compile_kernel(probe_spec(width), "sm_90a")
    access = (
        inspect(compiled.path, "sm_90", "access_probe")
        .launch(typical_device("sm_90"), None, (THREADS, 1, 1), 0)
        .memory_access
    )
    assert access is not None
    loads = {w.bits: w.instructions for w in access.widths if w.operation == "load"}
    assert set(loads) == {8 * width}
    assert loads[8 * width] >= 8, "too few loads in flight to saturate the memory bandwidth"


def test_sector_fraction_is_the_used_part_of_loaded_sectors() -> None:
    assert sector_fraction(4, 1) == 1
    assert sector_fraction(4, 2) == 0.5
    assert sector_fraction(4, 32) == 4 / 32
    assert sector_fraction(16, 1) == 1
    assert sector_fraction(16, 2) == 0.5
    assert sector_fraction(16, 32) == 0.5


@pytest.mark.gpu
@pytest.mark.timing
def test_efficiencies_of_this_gpu_are_plausible() -> None:
    from cukit.analyzer.kernel_analyzer import KernelAnalyzer

    analyzer = KernelAnalyzer(ceilings=False)
    points = analyzer.analyze_memory_patterns()
    assert len(points) == len(STRIDES) * len(WIDTHS_BYTES)
    by_pattern = {(p.access_bytes, p.stride): p for p in points}
    assert by_pattern[16, 1].efficiency > 0.9
    assert by_pattern[4, 32].efficiency < 0.3
    for point in points:
        assert point.efficiency <= 1.3 * point.sector_fraction
    assert analyzer.report().accesses == points
