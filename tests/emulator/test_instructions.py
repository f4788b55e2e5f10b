"""Emulated instructions compared with a GPU's results: vectors.npz, written by make_vectors.py."""

from __future__ import annotations

import numpy as np
import pytest

import cukit
from cukit.core.device import current_device, parse_arch
from tests.contract import to_device, to_host
from tests.devices import kernels_only
from tests.emulator.vectors import STORED, Case, bulk_copy, cases, multicast

CASES = list(cases())

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    with np.load(STORED) as file:
        return dict(file)


def run_on(device: str, case: Case) -> np.ndarray:
    """The case's result; skips a GPU that lacks the instruction."""
    if current_device().compute_capability < parse_arch(case.arch):
        pytest.skip(f"needs {case.arch}")
    return to_host(case.run(lambda array: to_device(device, array)[0]))


@pytest.mark.emulator
@pytest.mark.parametrize("late", [False, True])
@every_case
def test_the_emulator_reproduces_the_results_of_the_gpu(case: Case, late: bool, stored):
    with cukit.backend("emulator", arch="sm_90", late=late, seed=int(late)):
        got = case.run(lambda array: array)
    np.testing.assert_array_equal(got.astype(np.int32), stored[case.name])


@kernels_only
def test_bulk_copies_move_every_byte(device):
    got = run_on(device, bulk_copy())
    np.testing.assert_array_equal(got, np.arange(1024))


@kernels_only
def test_a_multicast_reaches_both_blocks(device):
    got = run_on(device, multicast())
    chunks = np.arange(32 * 64).reshape(32, 8, 8)
    swizzled = np.stack([row[np.arange(8) ^ i % 8] for i, row in enumerate(chunks)])
    np.testing.assert_array_equal(got, np.stack([swizzled.reshape(-1)] * 2))


def test_every_case_is_stored(stored):
    assert set(stored) == {case.name for case in CASES}


@pytest.mark.gpu
@every_case
def test_the_gpu_reproduces_the_stored_results(case: Case, stored):
    got = run_on("gpu", case)
    np.testing.assert_array_equal(got.astype(np.int32), stored[case.name])
