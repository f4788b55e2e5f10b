"""Properties of GPUs: of the one in this machine, and of typical ones for compiling without a GPU.

A plan (`plan_<op>`) is a pure function of shapes and of a :class:`Device`, so that it can be
computed, printed and tested on a machine without a GPU.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

from cukit.errors import ConfigError, MissingDependencyError, UnsupportedDeviceError

KIB = 1024
MIB = 1024 * KIB
MAX_GRID_YZ = 65535
"""CUDA's limit on the blocks of a grid along y and along z."""

INSTALL_GPU_EXTRA = "pip install 'cukit[cuda12]'   (or 'cukit[cuda13]' for a CUDA 13 driver)"


@dataclass(frozen=True)
class Device:
    """The properties of a GPU that plans depend on. Sizes in bytes."""

    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    shared_bytes_per_block: int
    """Maximum shared memory per block, with opt-in."""
    shared_bytes_per_sm: int
    max_threads_per_sm: int
    registers_per_sm: int
    l2_bytes: int
    memory_bytes: int

    @property
    def arch(self) -> str:
        """`"sm_90"` for compute capability 9.0."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"

    @property
    def compile_arch(self) -> str:
        """The target for NVRTC, with the `a` suffix since Hopper.

        wgmma, setmaxnreg and their successors exist only in architecture-specific targets. The
        suffix costs nothing, because cubins are compiled for the GPU they run on.
        """
        return self.arch + ("a" if self.compute_capability >= (9, 0) else "")


# One typical GPU per architecture: `cukit compile` plans for it if the machine has no such GPU.
TYPICAL_DEVICES: dict[str, Device] = {
    device.arch: device
    for device in (
        Device("A100", (8, 0), 108, 163 * KIB, 164 * KIB, 2048, 65536, 40 * MIB, 40 << 30),
        Device("RTX 3090", (8, 6), 82, 99 * KIB, 100 * KIB, 1536, 65536, 6 * MIB, 24 << 30),
        Device("RTX 4090", (8, 9), 128, 99 * KIB, 100 * KIB, 1536, 65536, 72 * MIB, 24 << 30),
        Device("H200", (9, 0), 132, 227 * KIB, 228 * KIB, 2048, 65536, 60 * MIB, 141 << 30),
        Device("B200", (10, 0), 148, 227 * KIB, 228 * KIB, 2048, 65536, 126 * MIB, 180 << 30),
        Device("RTX 5090", (12, 0), 170, 99 * KIB, 100 * KIB, 1536, 65536, 96 * MIB, 32 << 30),
    )
}


def parse_arch(arch: str) -> tuple[int, int]:
    """`"sm_90a"` -> `(9, 0)`. Raises ConfigError for anything but an sm_XY name."""
    digits = arch.removeprefix("sm_").rstrip("af")
    if not arch.startswith("sm_") or not digits.isdigit() or len(digits) < 2:
        raise ConfigError(f"arch: expected a name such as sm_80 or sm_90a, got {arch!r}")
    return int(digits[:-1]), int(digits[-1])


def typical_device(arch: str) -> Device:
    """The typical device of `arch`, for machines without one (`"sm_90"` and `"sm_90a"` alike)."""
    major, minor = parse_arch(arch)
    try:
        return TYPICAL_DEVICES[f"sm_{major}{minor}"]
    except KeyError:
        known = ", ".join(sorted(TYPICAL_DEVICES))
        raise ConfigError(f"arch: unknown architecture {arch!r}; known: {known}") from None


@functools.cache
def cupy_module() -> ModuleType | None:
    """CuPy, or None if it is not installed. Imported on first use."""
    if "CUPY_CACHE_DIR" not in os.environ and not _home_is_writable():
        # CuPy creates its cache folder on import and raises if it cannot.
        os.environ["CUPY_CACHE_DIR"] = str(Path(os.environ.get("TMPDIR", "/tmp")) / "cukit-cupy")
    try:
        import cupy
    except ImportError:
        return None
    return cupy  # type: ignore[no-any-return]


def _home_is_writable() -> bool:
    home = Path(os.path.expanduser("~"))
    return home.is_dir() and os.access(home, os.W_OK)


def require_cupy(purpose: str) -> ModuleType:
    """CuPy. Raises MissingDependencyError, which states the purpose and how to install CuPy."""
    module = cupy_module()
    if module is None:
        raise MissingDependencyError(f"{purpose} needs CuPy: {INSTALL_GPU_EXTRA}")
    return module


@functools.cache
def gpu_available() -> bool:
    """True if CuPy is installed and finds a CUDA device."""
    module = cupy_module()
    return module is not None and bool(module.cuda.is_available())


class DeviceSource(Protocol):
    """Replaces the GPU of this machine as the device that plans are made for."""

    @property
    def device(self) -> Device:
        """The device to plan for."""


_source: DeviceSource | None = None


def set_device_source(source: DeviceSource | None) -> None:
    """Makes `current_device` return `source.device`; None restores CuPy's current device.

    Called by :func:`cukit.core.backend.activate` only.
    """
    global _source
    _source = source


def current_device() -> Device:
    """Properties of CuPy's current device, or of the active backend's device.

    Raises UnsupportedDeviceError if there is no GPU.
    """
    if _source is not None:
        return _source.device
    if not gpu_available():
        raise UnsupportedDeviceError(
            "no CUDA device found; run `cukit doctor` to see what is missing"
        )
    cupy = require_cupy("a GPU")
    return _device_facts(int(cupy.cuda.runtime.getDevice()))


@functools.cache
def _device_facts(device_id: int) -> Device:
    cupy = require_cupy("a GPU")
    properties = cupy.cuda.runtime.getDeviceProperties(device_id)
    return Device(
        name=properties["name"].decode(),
        compute_capability=(properties["major"], properties["minor"]),
        num_sms=properties["multiProcessorCount"],
        shared_bytes_per_block=properties["sharedMemPerBlockOptin"],
        shared_bytes_per_sm=properties["sharedMemPerMultiprocessor"],
        max_threads_per_sm=properties["maxThreadsPerMultiProcessor"],
        registers_per_sm=properties["regsPerMultiprocessor"],
        l2_bytes=properties["l2CacheSize"],
        memory_bytes=properties["totalGlobalMem"],
    )
