"""Runs the CUDA kernels on the CPU: the same sources, compiled by the host's C++ compiler.

`with cukit.backend("emulator"):` makes every op run its kernel on NumPy arrays, with bounds,
alignment, initialisation and data races checked. docs/emulator.md describes the model and its
limits.
"""

from cukit.emulator.backend import Emulator
from cukit.emulator.check import check_kernel
from cukit.emulator.choice import activate_from_environment, backend
from cukit.emulator.cupy_stand_in import emulate_cupy
from cukit.emulator.settings import Settings

__all__ = [
    "Emulator",
    "Settings",
    "activate_from_environment",
    "backend",
    "check_kernel",
    "emulate_cupy",
]
