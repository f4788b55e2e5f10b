"""The backend that runs kernels in place of the GPU, such as the emulator.

core depends on this interface only. While `active` is set, ops on NumPy arrays run their kernels on
the backend instead of the reference, and CuPy arrays are rejected. The setting is process-wide, not
per thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from cukit.core.compiler import KernelSpec
from cukit.core.device import Device, set_device_source


class TensorView(NamedTuple):
    """The tensor that a tensor map describes: elements at `address` plus index times `strides`
    bytes, within the memory of `array`."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    array: Any


class Backend(Protocol):
    """Runs kernels on NumPy arrays."""

    @property
    def device(self) -> Device:
        """The device that plans are made for."""

    @property
    def key(self) -> Hashable:
        """Backends with equal keys share plans and compiled kernels."""

    def poison(self, array: np.ndarray[Any, Any]) -> None:
        """Fills a new array so that elements a kernel fails to write are detected."""

    def load_kernel(self, spec: KernelSpec) -> Any:
        """A :class:`cukit.core.kernel.Kernel` that takes NumPy arrays and scalars."""

    def encode_tensor_map(
        self, view: TensorView, box: Sequence[int], swizzle_bytes: int
    ) -> np.ndarray[Any, Any]:
        """The tensor map of `view`, whose shape, strides and box have already been checked by
        :func:`cukit.core.tensor_map.encode_tensor_map`."""


active: Backend | None = None


def activate(backend: Backend | None) -> Backend | None:
    """Sets the active backend (None: the GPU) and returns the previous one."""
    global active
    previous, active = active, backend
    set_device_source(backend)
    return previous
