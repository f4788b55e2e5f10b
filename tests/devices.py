"""The devices of a test, with their marks: "cpu" runs the reference, the others the kernel."""

from __future__ import annotations

import pytest

EMULATOR = pytest.param("emulator", marks=pytest.mark.emulator)
GPU = pytest.param("gpu", marks=pytest.mark.gpu)
EMULATOR_SM80 = pytest.param("emulator sm80", marks=pytest.mark.emulator)
GPU_SM80 = pytest.param("gpu sm80", marks=pytest.mark.gpu)

kernels_only = pytest.mark.parametrize("device", [EMULATOR, GPU], indirect=True)
"""For tests without a reference: omits the CPU from the fixture `device`."""
