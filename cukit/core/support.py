"""The architectures for which each op has a kernel."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Hashable
from dataclasses import dataclass

from cukit.core.device import Device, current_device, parse_arch

OLDEST_ARCH = "sm_80"
"""Default minimum: the first architecture with mma.sync for bfloat16 and cp.async."""


@dataclass(frozen=True)
class Support:
    """A range of architectures.

    minimum_arch: oldest architecture with a kernel.
    maximum_arch: newest one, for kernels whose instructions later architectures dropped; None for
        no limit.
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
    """Declares the architectures of `op`; called by the registry, once per op."""
    _DECLARED[op] = support


@functools.cache
def kernel_runs_here(op: str, device_key: Hashable) -> bool:
    """Whether `op` has a kernel for the current device; if not, warns that the reference runs.

    device_key: device number or key of the active backend. The result is cached, so the warning is
    issued once per op and device.
    """
    device = current_device()
    reason = _DECLARED.get(op, ANY_KERNEL).reason_against(device)
    if reason is not None:
        warnings.warn(
            f"{op}: no kernel for {device.name} ({reason}); running the reference", stacklevel=4
        )
    return reason is None
