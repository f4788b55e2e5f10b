"""Every op's kernels: the emulator compared with the reference, and the GPU with the emulator."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cukit
from cukit.errors import ArrayLayoutError
from cukit.registry import Op, ops
from tests.contract import assert_close, offset_by
from tests.emulator.samples import SAMPLES, run
from tests.tolerances import ATOL

KERNEL_OPS = [op for op in ops() if op.has_kernel]

every_op = pytest.mark.parametrize("op", KERNEL_OPS, ids=lambda op: op.name)

# Sums in another order and approximate functions: a few units in the last place of the largest
# value.
AGREEMENT = 4

# Hopper's tensor cores keep 14 bits of sums of float8 products; the emulator's are exact.
SHORT_SUMS = {"matmul_fp8": 2.0**-10}

# Ops with float32 results whose terms are rounded to bfloat16: gated_scan multiplies its decayed
# terms on tensor cores; indexer_kl_backward stores the gradients of the indexer's scores.
ROUNDED_TERMS = {
    "gated_scan": "bfloat16",
    "gated_scan_backward": "bfloat16",
    "indexer_kl_backward": "bfloat16",
}


def copied(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.copy()


def test_every_op_has_a_sample():
    assert {op.name for op in KERNEL_OPS} == set(SAMPLES)


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@every_op
def test_the_emulator_agrees_with_the_reference_in_any_thread_order(op: Op, arch: str):
    wide = run(op, copied, reference=True, wide=True)
    low = run(op, copied, reference=True)
    first: list[np.ndarray[Any, Any]] = []
    for options in ({"seed": 0}, {"seed": 11, "late": True, "global_races": True}):
        with cukit.backend("emulator", arch=arch, **options):
            got = run(op, copied)
        for i, (result, plain, exact) in enumerate(zip(got, low, wide, strict=True)):
            atol = ATOL[ROUNDED_TERMS[op.name]] if op.name in ROUNDED_TERMS else None
            assert_close(f"{op.name} result {i}", result, plain, exact, atol)
        for result, before in zip(got, first or got, strict=True):
            assert result.tobytes() == before.tobytes(), f"{op.name}: {options} changes bits"
        first = got


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize("shifted", [0, 1], ids=["even arrays", "odd arrays"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@every_op
def test_every_second_array_one_element_after_an_aligned_address(op: Op, arch: str, shifted: int):
    """A vector access is as narrow as the least aligned of its arrays requires."""
    number = itertools.count(shifted)

    def place(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return offset_by(array, array.itemsize * (next(number) % 2 == 0))

    wide = run(op, copied, reference=True, wide=True)
    low = run(op, copied, reference=True)
    with cukit.backend("emulator", arch=arch):
        try:
            got = run(op, place)
        except ArrayLayoutError:
            pytest.skip("the kernel requires aligned arrays")
    for i, (result, plain, exact) in enumerate(zip(got, low, wide, strict=True)):
        atol = ATOL[ROUNDED_TERMS[op.name]] if op.name in ROUNDED_TERMS else None
        assert_close(f"{op.name} result {i}", result, plain, exact, atol)


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("op", KERNEL_OPS[::8], ids=lambda op: op.name)
def test_the_compilers_checks_find_nothing(op: Op, arch: str):
    """Checks that other tests omit, because they take long to compile; for every eighth op."""
    with cukit.backend("emulator", arch=arch, all_checks=True):
        run(op, copied)


@pytest.mark.gpu
@every_op
def test_the_gpu_agrees_with_the_emulator(op: Op):
    import cupy

    from cukit.core.device import current_device

    arch = current_device().arch
    with cukit.backend("emulator", arch=arch):
        emulated = run(op, copied)
    for i, (gpu, cpu) in enumerate(zip(run(op, cupy.asarray), emulated, strict=True)):
        assert gpu.dtype == cpu.dtype
        scale = max(1.0, float(np.abs(cpu.astype(np.float64)).max(initial=0.0)))
        allowed = max(AGREEMENT * ATOL.get(cpu.dtype.name, 0.0), SHORT_SUMS.get(op.name, 0.0))
        atol = allowed * scale
        np.testing.assert_allclose(
            gpu.astype(np.float64), cpu.astype(np.float64), rtol=0, atol=atol, err_msg=f"result {i}"
        )
