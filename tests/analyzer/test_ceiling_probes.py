"""The kernels that measure ceilings: results in the emulator, and instruction counts."""

from __future__ import annotations

import numpy as np
import pytest

import cukit
from cukit.analyzer.ceiling_probes import (
    COPY_LOADS,
    COPY_SPEC,
    FMA_CHAINS,
    FMA_SPEC,
    FMA_STEPS,
    WORD_BYTES,
    copy_grid,
    launch_copy,
    launch_fma,
)
from cukit.analyzer.kernel_analyzer import KernelAnalyzer
from cukit.analyzer.static import inspect
from cukit.core.device import cupy_module, typical_device


@pytest.mark.emulator
@pytest.mark.parametrize("words", [1, 512, 1024, 2500])
def test_a_copy_copies_exactly_its_range(words: int) -> None:
    source = np.arange(4 * words, dtype=np.float32)
    target = np.full(4 * words + 4, np.nan, np.float32)
    with cukit.backend("emulator"):
        launch_copy(target, source)
    np.testing.assert_array_equal(target[: 4 * words], source)
    assert np.isnan(target[4 * words :]).all()


@pytest.mark.emulator
@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_multiply_adds_equal_those_of_numpy(rounds: int) -> None:
    out = np.full(2 * FMA_SPEC.threads, np.nan, np.float32)
    with cukit.backend("emulator"):
        flops = launch_fma(out, rounds)
    assert flops == 2 * FMA_STEPS * rounds * FMA_CHAINS * out.size
    x = np.arange(out.size)[:, None] / 1024 + np.arange(FMA_CHAINS)
    for _ in range(FMA_STEPS * rounds):
        x = x * np.float32(0.99) + 0.5
    np.testing.assert_allclose(out, x.sum(axis=1), rtol=1e-5)


def test_a_grid_covers_every_word() -> None:
    per_block = COPY_SPEC.threads * COPY_LOADS * WORD_BYTES
    assert [copy_grid(n * WORD_BYTES) for n in (1, per_block // WORD_BYTES)] == [(1,), (1,)]
    assert copy_grid(per_block + WORD_BYTES) == (2,)


@pytest.mark.skipif(cupy_module() is None, reason="compiling needs NVRTC")
def test_the_copy_uses_the_widest_accesses() -> None:
    from cukit.core.compiler import compile_kernel

    compiled = compile_kernel(COPY_SPEC, "sm_90a")
    launch = inspect(compiled.path, "sm_90", "copy").launch(
        typical_device("sm_90"), None, (COPY_SPEC.threads, 1, 1), 0
    )
    assert launch.memory_access is not None
    widths = {(w.operation, w.bits): w.instructions for w in launch.memory_access.widths}
    assert widths == {("load", 128): COPY_LOADS, ("store", 128): COPY_LOADS}
    assert launch.occupancy is not None
    assert launch.occupancy.fraction == 1.0


@pytest.mark.skipif(cupy_module() is None, reason="compiling needs NVRTC")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_multiply_adds_fill_a_multiprocessor(arch: str) -> None:
    analysis = KernelAnalyzer(arch=arch).analyze(FMA_SPEC)
    (launch,) = analysis.launches
    assert launch.resources is not None
    assert launch.resources.spill_store_bytes == 0
    assert launch.occupancy is not None
    assert launch.occupancy.fraction == 1.0
