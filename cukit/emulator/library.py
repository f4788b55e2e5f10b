"""The C interface of the emulator's runtime (runtime/launch.cpp)."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from cukit.emulator.builder import build_runtime

_MESSAGE_BYTES = 1 << 16
_INTERRUPTED = 2

Extent = ctypes.c_uint32 * 3


class Entry(ctypes.Structure):
    """emulator::Entry of kernels_cu/common/emulator/entry.h."""

    _fields_ = [
        ("run", ctypes.c_void_p),
        ("parameter_bytes", ctypes.POINTER(ctypes.c_uint32)),
        ("parameter_types", ctypes.POINTER(ctypes.c_char_p)),
        ("num_parameters", ctypes.c_uint32),
        ("max_threads", ctypes.c_uint32),
    ]


class Range(ctypes.Structure):
    """Memory that a kernel may access, and the argument that it belongs to."""

    _fields_ = [
        ("low", ctypes.c_size_t),
        ("high", ctypes.c_size_t),
        ("argument", ctypes.c_uint32),
        ("writeable", ctypes.c_uint32),
        ("element_bytes", ctypes.c_uint64),
    ]


class LaunchRecord(ctypes.Structure):
    """emulator::Launch of runtime/block.h."""

    _fields_ = [
        ("entry", ctypes.POINTER(Entry)),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("ranges", ctypes.POINTER(Range)),
        ("num_ranges", ctypes.c_uint32),
        ("num_shared", ctypes.c_uint32),
        ("shared", ctypes.POINTER(ctypes.c_uint32)),
        ("grid", Extent),
        ("block", Extent),
        ("cluster", Extent),
        ("dynamic_bytes", ctypes.c_uint32),
        ("max_workers", ctypes.c_uint32),
        ("checked", ctypes.c_uint32),
        ("late", ctypes.c_uint32),
        ("global_races", ctypes.c_uint32),
        ("same_value_writes", ctypes.c_uint32),
        ("cas_guesses", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("interruptible", ctypes.c_uint32),
        ("arch", ctypes.c_uint32),
        ("patience", ctypes.c_double),
        ("message", ctypes.c_char_p),
        ("message_bytes", ctypes.c_uint32),
    ]


@functools.cache
def runtime() -> Any:
    """The runtime, loaded with global symbols so that kernels find it."""
    library = ctypes.CDLL(str(build_runtime()), mode=ctypes.RTLD_GLOBAL)
    library.cukit_emulator_launch.argtypes = [ctypes.POINTER(LaunchRecord)]
    assert library.cukit_emulator_launch_bytes() == ctypes.sizeof(LaunchRecord)
    return library


def load_entry(path: Path) -> Entry:
    """The kernel of a library made by build_kernel."""
    runtime()
    return Entry.in_dll(ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL), "cukit_entry")


def launch(record: LaunchRecord) -> str | None:
    """Runs the launch to completion. Returns the report if an error was found."""
    buffer = ctypes.create_string_buffer(_MESSAGE_BYTES)
    record.message = ctypes.cast(buffer, ctypes.c_char_p)
    record.message_bytes = _MESSAGE_BYTES
    outcome = runtime().cukit_emulator_launch(ctypes.byref(record))
    if outcome == _INTERRUPTED:
        # Python's main thread raises KeyboardInterrupt before this is returned.
        return "interrupted"
    return buffer.value.decode(errors="replace") if outcome else None
