"""Where kernels run: on CuPy's GPU, or on something that stands in for it.

core knows only this interface. While `active` is set, NumPy arrays run kernels on it instead of the
reference; CuPy arrays have no place there. The choice belongs to the process, not to a thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from cukit.core.compiler import KernelSpec
    from cukit.core.device import Device
    from cukit.core.kernel import Kernel
    from cukit.core.tensor_map import TensorView


class Backend(Protocol):
    """Runs kernels on NumPy arrays."""

    @property
    def device(self) -> Device:
        """Facts that plans are made for."""

    @property
    def key(self) -> Hashable:
        """Plans and kernels made for one key serve every backend with the same."""

    def poison(self, array: np.ndarray[Any, Any]) -> None:
        """Fills a new array so that an element that a kernel forgets to write is noticed."""

    def load_kernel(self, spec: KernelSpec) -> Kernel:
        """The kernel, ready to be called with NumPy arrays and scalars."""

    def encode_tensor_map(
        self, view: TensorView, box: Sequence[int], swizzle_bytes: int
    ) -> np.ndarray[Any, Any]:
        """See :func:`cukit.core.tensor_map.encode_tensor_map`, whose checks have passed."""


active: Backend | None = None


def activate(backend: Backend | None) -> Backend | None:
    """Makes `backend` the active one (None: the GPU). Returns the one before."""
    global active
    before, active = active, backend
    return before
