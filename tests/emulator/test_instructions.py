"""The emulated instructions against what a GPU computed: vectors.npz, of make_vectors.py."""

from __future__ import annotations

import numpy as np
import pytest

import cukit
from tests.emulator.vectors import STORED, Case, cases

CASES = list(cases())

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    with np.load(STORED) as file:
        return dict(file)


@pytest.mark.emulator
@pytest.mark.parametrize("late", [False, True])
@every_case
def test_the_emulator_computes_what_the_gpu_did(case: Case, late: bool, stored):
    with cukit.backend("emulator", arch="sm_90", late=late, seed=int(late)):
        got = case.run(lambda array: array)
    np.testing.assert_array_equal(got.astype(np.int32), stored[case.name])


def test_every_case_is_stored(stored):
    assert set(stored) == {case.name for case in CASES}


@pytest.mark.gpu
@every_case
def test_the_gpu_still_computes_it(case: Case, stored):
    import cupy

    from cukit.core.device import current_device, parse_arch

    if current_device().compute_capability < parse_arch(case.arch):
        pytest.skip(f"needs {case.arch}")
    got = cupy.asnumpy(case.run(cupy.asarray))
    np.testing.assert_array_equal(got.astype(np.int32), stored[case.name])
