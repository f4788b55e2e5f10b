"""Every error that cukit raises on purpose.

CukitError
├── ArrayError                 an argument does not fit the op (also a ValueError)
│   ├── ArrayShapeError
│   ├── ArrayDtypeError        (also a TypeError)
│   └── ArrayLayoutError       strides, device or alignment
├── ConfigError                an option outside its legal values (also a ValueError)
├── DataError                  a text, checkpoint or output folder that cannot be used
├── UnsupportedDeviceError     this GPU, or its absence, rules the request out
├── MissingDependencyError     a package or library is not installed; the message names the command
├── CompileError               NVRTC's log, with the offending source line
├── LaunchError                an argument list that does not fit the compiled kernel
├── EmulatorError              the emulator caught a kernel at a mistake: what, where, which thread
├── OutOfMemoryError           (also a MemoryError)
├── CommunicationError         processes that train together lost touch, or disagree
├── PointerError               freed twice, foreign, or of another pool (also a ValueError)
└── CacheError                 the kernel cache cannot be written or read

A GPU failure raises; nothing falls back silently.
"""

from __future__ import annotations


class CukitError(Exception):
    """Base of every error raised by cukit."""


class ArrayError(CukitError, ValueError):
    """An array argument does not fit the op. The message names op, argument and expectation."""


class ArrayShapeError(ArrayError):
    """Wrong number of axes, or an axis of the wrong size."""


class ArrayDtypeError(ArrayError, TypeError):
    """A dtype outside the op's list."""


class ArrayLayoutError(ArrayError):
    """Strides, memory space or device that the op cannot take."""


class ConfigError(CukitError, ValueError):
    """An option outside its legal values."""


class DataError(CukitError, ValueError):
    """A text, checkpoint or output folder cannot be used. The message names the path."""


class UnsupportedDeviceError(CukitError):
    """The request needs a GPU, or an architecture, that is not here."""


class MissingDependencyError(CukitError, ImportError):
    """A package or shared library is missing. The message carries the command that installs it."""


class CompileError(CukitError):
    """NVRTC rejected a kernel. The message holds its log, which quotes the source line."""


class LaunchError(CukitError):
    """The arguments of a launch do not match the parameters of the compiled kernel."""


class EmulatorError(CukitError):
    """The emulator caught a kernel at a mistake. The message names it, the thread and the line."""


class OutOfMemoryError(CukitError, MemoryError):
    """The GPU has not enough memory for the request. The message says what holds it."""

    report: object = None
    """From a memory pool: its facts as a cukit.memory.OutOfMemoryReport."""


class CommunicationError(CukitError):
    """Processes that work together lost touch, or disagree about what comes next."""


class PointerError(CukitError, ValueError):
    """An address that the pool cannot free: freed twice, foreign, or of another pool."""


class CacheError(CukitError):
    """The kernel cache folder cannot be used."""
