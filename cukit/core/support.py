"""Which architectures an op has a kernel for: asked by launchers, `cukit list` and warnings."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Hashable
from dataclasses import dataclass

from cukit.core.device import Device, current_device, parse_arch

OLDEST_ARCH = "sm_80"
"""What kernels need unless their op says otherwise: mma.sync, cp.async and bfloat16."""


@dataclass(frozen=True)
class Support:
    """A range of architectures.

    minimum_arch: oldest architecture with a kernel.
    maximum_arch: newest, where the kernel's instructions were dropped later; None for no end.
    """

    minimum_arch: str = OLDEST_ARCH
    maximum_arch: str | None = None

    def reason_against(self, device: Device) -> str | None:
        """Why the kernel cannot run on `device`: "sm_75 is older than sm_80". None if it can."""
        capability = device.compute_capability
        if capability < parse_arch(self.minimum_arch):
            return f"{device.arch} is older than {self.minimum_arch}"
        if self.maximum_arch is not None and capability > parse_arch(self.maximum_arch):
            return f"{device.arch} is newer than {self.maximum_arch}"
        return None


ANY_KERNEL = Support()
_DECLARED: dict[str, Support] = {}


def declare_support(op: str, support: Support) -> None:
    """Says what `op` has kernels for; the registry does, once for each op."""
    _DECLARED[op] = support


@functools.cache
def kernel_runs_here(op: str, device_key: Hashable) -> bool:
    """Whether the current device has a kernel for `op`; if not, warns that the reference runs.

    device_key: the device's number or the active backend's key; answered, and warned of, once each.
    """
    device = current_device()
    reason = _DECLARED.get(op, ANY_KERNEL).reason_against(device)
    if reason is not None:
        warnings.warn(
            f"{op}: no kernel for {device.name} ({reason}); running the reference", stacklevel=4
        )
    return reason is None
