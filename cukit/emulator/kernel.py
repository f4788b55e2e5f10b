"""A kernel compiled for the CPU, with the interface of `core.kernel.Kernel`."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np

from cukit.core import backend
from cukit.core.device import typical_device
from cukit.core.kernel import NULL, Argument, Kernel
from cukit.emulator.builder import Build, arch_number
from cukit.emulator.library import Entry, Extent, LaunchRecord, Range, launch, load_entry
from cukit.emulator.limits import reason_against_launch
from cukit.emulator.report import describe_fault
from cukit.emulator.settings import Settings
from cukit.emulator.signature import mismatch, parameter_name
from cukit.errors import EmulatorError, LaunchError

_BY_VALUE_ALIGNMENT = 64


class EmulatedKernel(Kernel):
    """A kernel that runs on the CPU, and reads and writes the caller's arrays in place."""

    __slots__ = ("_build", "_entry", "_settings")

    def __init__(self, build: Build, settings: Settings, entry: Entry | None = None) -> None:
        """entry: the kernel, if the library has several; `build`'s own otherwise."""
        self._build = build
        self._settings = settings
        self._entry = load_entry(build.library) if entry is None else entry
        self.block = (build.spec.threads, 1, 1)
        self.shared_bytes = build.spec.shared_bytes
        self.function = self._run

    def __call__(
        self,
        grid: tuple[int, ...],
        args: tuple[Argument, ...],
        reachable: Sequence[Argument] = (),
        *,
        stream: Any = None,
    ) -> None:
        """Launches the kernel. It may access the arrays in `args` and `reachable`, nothing else."""
        self.check(args)
        if 0 not in grid:
            self._run(grid, self.block, args, self.shared_bytes, reachable)

    @property
    def parameter_bytes(self) -> tuple[int, ...]:
        """The sizes of the kernel's parameters."""
        entry = self._entry
        return tuple(entry.parameter_bytes[i] for i in range(entry.num_parameters))

    def launch(
        self,
        grid: tuple[int, ...],
        args: tuple[Argument, ...],
        settings: Settings,
        reachable: Sequence[Argument] = (),
    ) -> None:
        """Like a call, but with these settings instead of the active backend's."""
        self.check(args)
        self._run(grid, self.block, args, self.shared_bytes, reachable, settings)

    def check(self, args: tuple[Argument, ...]) -> None:
        """Raises LaunchError if `args` do not fit the kernel's parameters."""
        expected = self.parameter_bytes
        got = tuple(self._bytes(i, argument) for i, argument in enumerate(args))
        if got != expected:
            raise LaunchError(
                f"{self._build.spec}: the kernel takes {len(expected)} parameters of {expected} "
                f"bytes, the launch passes {len(got)} of {got}"
            )
        for index, argument in enumerate(args):
            name = parameter_name(self._entry.parameter_types[index].decode())
            mismatched = mismatch(name, argument)
            if mismatched is not None:
                raise LaunchError(
                    f"{self._build.spec}: argument {index} is {mismatched}, "
                    f"the kernel takes `{name}`"
                )

    def _bytes(self, index: int, argument: Argument) -> int:
        if isinstance(argument, np.generic) or _goes_by_value(argument):
            return int(argument.nbytes)
        if argument is NULL or isinstance(argument, np.ndarray):
            return 8
        raise LaunchError(
            f"{self._build.spec}: argument {index} is a {type(argument).__name__}; "
            "expected a NumPy array or a NumPy scalar"
        )

    def _run(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Argument, ...],
        shared_bytes: int,
        reachable: Sequence[Argument] = (),
        settings: Settings | None = None,
    ) -> None:
        if settings is None:  # run-time options: seed, late, threads, patience, ...
            settings = getattr(backend.active, "settings", self._settings)
        cluster = self._build.cluster
        extents = (*grid, 1, 1)[:3]
        reason = reason_against_launch(
            typical_device(self._settings.arch),
            extents,
            block,
            (1, 1, 1) if self._build.cooperative else cluster,
            self._build.static_shared_bytes,
            shared_bytes,
            self._entry.max_threads,
        )
        if reason is not None:
            raise LaunchError(f"{self._build.spec}: {reason}")
        if self._settings.checked and self._build.uninitialised:
            raise EmulatorError(f"{self._build.spec}: {self._build.uninitialised[0]}")
        values = [_parameter(argument) for argument in args]
        pointers = (ctypes.c_void_p * max(1, len(values)))(*(v.ctypes.data for v in values))
        ranges = sorted(
            ((*np.lib.array_utils.byte_bounds(argument), i, argument.flags.writeable,
              argument.itemsize)
             for i, argument in enumerate((*args, *reachable))
             if isinstance(argument, np.ndarray) and not _goes_by_value(argument)),
        )  # fmt: skip
        shared = [number for variable in self._build.shared for number in variable]
        record = LaunchRecord(
            entry=ctypes.pointer(self._entry),
            arguments=ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p)),
            ranges=(Range * max(1, len(ranges)))(*(Range(*each) for each in ranges)),
            num_ranges=len(ranges),
            num_shared=len(shared) // 2,
            shared=(ctypes.c_uint32 * max(1, len(shared)))(*shared),
            grid=Extent(*extents),
            block=Extent(*block),
            cluster=Extent(*cluster),
            dynamic_bytes=shared_bytes,
            max_workers=settings.threads or len(os.sched_getaffinity(0)),
            checked=self._settings.checked,
            late=settings.late,
            global_races=settings.global_races,
            same_value_writes=settings.same_value_writes,
            cas_guesses=settings.cas_guesses,
            seed=settings.seed,
            interruptible=signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            arch=arch_number(self._settings.arch),
            patience=settings.patience,
        )
        report = launch(record)
        if report is not None:
            raise EmulatorError(
                f"{self._build.spec}: {describe_fault(report, self._build, (*args, *reachable))}"
            )


def _goes_by_value(argument: Argument) -> bool:
    """True for structures and tensor maps: arrays of one element of a void dtype."""
    return (
        isinstance(argument, np.ndarray) and argument.dtype.type is np.void and argument.size == 1
    )


def _parameter(argument: Argument) -> np.ndarray[Any, Any]:
    """The bytes passed for the parameter, aligned for any type."""
    if argument is NULL:
        value = np.zeros(1, np.uint64)
    elif isinstance(argument, np.ndarray) and not _goes_by_value(argument):
        value = np.array([argument.ctypes.data], np.uint64)
    else:
        value = np.atleast_1d(np.asarray(argument))
    raw = value.view(np.uint8)
    room = np.empty(raw.nbytes + _BY_VALUE_ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _BY_VALUE_ALIGNMENT
    aligned = room[start : start + raw.nbytes]
    aligned[:] = raw.reshape(-1)
    return aligned
