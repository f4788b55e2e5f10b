"""One query reports which kernels an op has for its arguments, and the reason if none."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import cukit
from cukit.core.device import typical_device
from cukit.core.support import Support, declare_support, kernel_runs_here


@pytest.mark.parametrize(
    ("support", "arch", "reason"),
    [
        (Support(), "sm_80", None),
        (Support(), "sm_120", None),
        (Support("sm_90"), "sm_89", "sm_89 is older than sm_90"),
        (Support("sm_90", "sm_90"), "sm_90", None),
        (Support("sm_90", "sm_90"), "sm_100", "sm_100 is newer than sm_90"),
    ],
)
def test_the_reason_names_both_architectures(support, arch, reason):
    assert support.reason_against(typical_device(arch)) == reason


def test_the_reference_runs_with_one_warning_where_there_is_no_kernel(monkeypatch):
    device = typical_device("sm_100")
    monkeypatch.setattr("cukit.core.support.current_device", lambda: device)
    declare_support("an_op_of_hopper", Support("sm_90", "sm_90"))
    with pytest.warns(UserWarning, match=r"an_op_of_hopper: no kernel for B200 \(sm_100 is newer"):
        assert not kernel_runs_here("an_op_of_hopper", "test")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not kernel_runs_here("an_op_of_hopper", "test")
        assert kernel_runs_here("an_op_that_declares_nothing", "test")


def test_an_op_of_one_architecture_runs_its_reference_on_others():
    a, b = np.ones((2, 8), np.float16), np.ones((3, 8), np.float16)
    with cukit.backend("emulator", arch="sm_80"):
        kernel_runs_here.cache_clear()
        with pytest.warns(UserWarning, match=r"matmul_tma: .* \(sm_80 is older than sm_90\)"):
            assert (cukit.matmul_tma(a, b) == 8).all()
