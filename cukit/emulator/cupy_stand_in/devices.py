"""`cupy.cuda`: one device, and streams on which every call is synchronous."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cukit.core.device import typical_device
from cukit.emulator.settings import Settings

settings = Settings()
"""The emulator's settings, as passed to `emulate_cupy`."""


def choose(chosen: Settings) -> Settings:
    """Makes `chosen` the settings of all launches; returns the previous ones."""
    global settings
    before, settings = settings, chosen
    return before


def current_settings() -> Settings:
    return settings


def architecture() -> str:
    """The emulated architecture, e.g. `"sm_90"`."""
    return settings.arch


class _Context:
    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def use(self) -> Any:
        return self

    def synchronize(self) -> None:
        return None


class Device(_Context):
    """The emulated GPU, number 0."""

    def __init__(self, device: int | Device | None = None) -> None:
        self.id = int(0 if device is None else getattr(device, "id", device))
        if self.id != 0:
            raise ValueError(f"the emulator has one device, number 0; got {self.id}")

    @property
    def compute_capability(self) -> str:
        return architecture().removeprefix("sm_").rstrip("af")

    @property
    def attributes(self) -> dict[str, int]:
        facts = typical_device(architecture())
        major, minor = facts.compute_capability
        return {
            "MultiProcessorCount": facts.num_sms,
            "MaxThreadsPerBlock": 1024,
            "WarpSize": 32,
            "ComputeCapabilityMajor": major,
            "ComputeCapabilityMinor": minor,
            "MaxSharedMemoryPerBlock": 48 * 1024,
        }

    @property
    def mem_info(self) -> tuple[int, int]:
        return 1 << 36, 1 << 36

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return self.id

    def __int__(self) -> int:
        return self.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}, emulated>"


class Stream(_Context):
    """A stream without asynchronous work: calls are synchronous, so waits return at once."""

    null: Stream
    ptr = 0
    done = True

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device_id = 0

    def record(self, event: Event | None = None) -> Event:
        return (event or Event()).record()

    def wait_event(self, event: Event) -> None:
        return None

    def launch_host_func(self, callback: Callable[[Any], Any], argument: Any) -> None:
        callback(argument)

    def add_callback(self, callback: Callable[..., Any], argument: Any) -> None:
        callback(self, 0, argument)


Stream.null = Stream()


class Event(_Context):
    """The host's time at recording; differences measure the emulator, not a GPU."""

    done = True

    def __init__(self, *_: Any, **__: Any) -> None:
        self.time = time.perf_counter()

    def record(self, stream: Stream | None = None) -> Event:
        self.time = time.perf_counter()
        return self


class MemoryPool:
    """An allocator without a cache."""

    def malloc(self, size: int) -> Any:
        raise NotImplementedError("cupy.cuda.MemoryPool.malloc is not emulated: allocate arrays")

    def free_all_blocks(self, *_: Any, **__: Any) -> None:
        return None

    free_all_free = free_all_blocks

    def used_bytes(self) -> int:
        return 0

    total_bytes = free_bytes = n_free_blocks = get_limit = used_bytes

    def set_limit(self, *_: Any, **__: Any) -> None:
        return None


def runtime_functions() -> dict[str, Any]:
    """The functions of `cupy.cuda.runtime` that describe the machine."""
    major, minor = typical_device(architecture()).compute_capability
    properties = {
        "name": b"cukit emulator",
        "major": major,
        "minor": minor,
        "multiProcessorCount": typical_device(architecture()).num_sms,
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerMultiProcessor": 2048,
        "maxThreadsDim": (1024, 1024, 64),
        "maxGridSize": (2**31 - 1, 65535, 65535),
        "sharedMemPerBlock": 48 * 1024,
        "regsPerBlock": 65536,
        "warpSize": 32,
        "totalGlobalMem": 1 << 36,
        "totalConstMem": 65536,
    }
    return {
        "is_hip": False,
        "getDeviceCount": lambda: 1,
        "getDevice": lambda: 0,
        "setDevice": Device,
        "deviceSynchronize": lambda: None,
        "streamSynchronize": lambda stream: None,
        "runtimeGetVersion": lambda: 12090,
        "driverGetVersion": lambda: 12090,
        "memGetInfo": lambda: (1 << 36, 1 << 36),
        "getDeviceProperties": lambda device: dict(properties),
        "deviceGetAttribute": lambda attribute, device: 0,
        "profilerStart": lambda: None,
        "profilerStop": lambda: None,
    }
