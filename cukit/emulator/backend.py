"""The emulator as a backend of :mod:`cukit.core`."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from cukit.core.backend import TensorView
from cukit.core.compiler import KernelSpec
from cukit.core.device import Device, typical_device
from cukit.core.kernel import Kernel
from cukit.emulator.builder import build_kernel
from cukit.emulator.kernel import EmulatedKernel
from cukit.emulator.poison import poison
from cukit.emulator.settings import Settings
from cukit.emulator.tensor_map import pack_tensor_map


class Emulator:
    """Runs kernels on the CPU, emulating a GPU of the architecture `settings.arch`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @property
    def device(self) -> Device:
        """A typical device of the architecture."""
        return typical_device(self.settings.arch)

    @property
    def key(self) -> Hashable:
        """The settings on which plans and compiled kernels depend."""
        settings = self.settings
        return (
            "emulator",
            self.device.arch,
            settings.checked,
            settings.debug,
            settings.all_checks,
        )

    def poison(self, array: np.ndarray[Any, Any]) -> None:
        """See :func:`cukit.emulator.poison.poison`."""
        poison(array)

    def load_kernel(self, spec: KernelSpec) -> Kernel:
        """The compiled kernel: compiled on first use, then taken from memory or disk."""
        settings = self.settings
        return _load(spec, self.device.arch, settings.checked, settings.debug, settings.all_checks)

    def encode_tensor_map(
        self, view: TensorView, box: Sequence[int], swizzle_bytes: int
    ) -> np.ndarray[Any, Any]:
        """A tensor map for the emulated TMA, in place of the driver's."""
        return pack_tensor_map(view, box, swizzle_bytes)


@functools.cache
def _load(spec: KernelSpec, arch: str, checked: bool, debug: bool, all_checks: bool) -> Kernel:
    build = build_kernel(spec, arch, checked, debug, all_checks)
    return EmulatedKernel(build, Settings(arch=arch, checked=checked, debug=debug))
