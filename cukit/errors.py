"""The exceptions that cukit raises.

CukitError
├── ArrayError                 an array argument is invalid for the op (also a ValueError)
│   ├── ArrayShapeError
│   ├── ArrayDtypeError        (also a TypeError)
│   └── ArrayLayoutError       strides, device or alignment
├── ConfigError                an option outside its legal values (also a ValueError)
├── DataError                  a text, checkpoint or output folder that cannot be used
├── UnsupportedDeviceError     there is no GPU, or it does not support the request
├── MissingDependencyError     a package or library is missing (also an ImportError)
├── CompileError               a kernel does not compile; holds the compiler's log
├── LaunchError                a launch is invalid, e.g. arguments do not match the kernel
├── EmulatorError              the emulator found an error in a kernel: kind, thread, source line
├── OutOfMemoryError           (also a MemoryError)
├── CommunicationError         a connection fails, or processes call different collectives
├── PointerError               an address that a pool cannot free (also a ValueError)
└── CacheError                 the kernel cache cannot be used

A GPU failure raises an exception; nothing falls back to the CPU silently.
"""

from __future__ import annotations


class CukitError(Exception):
    """Base of every error raised by cukit."""


class ArrayError(CukitError, ValueError):
    """An array argument is invalid. The message names the op, the argument and the requirement."""


class ArrayShapeError(ArrayError):
    """Wrong number of axes, or an axis of the wrong size."""


class ArrayDtypeError(ArrayError, TypeError):
    """A dtype that the op does not support."""


class ArrayLayoutError(ArrayError):
    """Strides, alignment, memory space or device that the op does not support."""


class ConfigError(CukitError, ValueError):
    """An option outside its legal values."""


class DataError(CukitError, ValueError):
    """A text, checkpoint or output folder cannot be used. The message names the path."""


class UnsupportedDeviceError(CukitError):
    """The request needs a GPU, or an architecture, that is not available."""


class MissingDependencyError(CukitError, ImportError):
    """A package or shared library is missing. The message says how to install it."""


class CompileError(CukitError):
    """A kernel does not compile. The message contains the log of NVRTC or, in the emulator, of the
    C++ compiler."""


class LaunchError(CukitError):
    """A launch is invalid: arguments that do not match the kernel's parameters, or a launch
    configuration that the driver or the emulator rejects."""


class EmulatorError(CukitError):
    """The emulator found an error in a kernel. The message names the error, the thread and the
    source line."""


class OutOfMemoryError(CukitError, MemoryError):
    """An allocation failed for lack of memory. The message lists the largest consumers."""

    report: object = None
    """A cukit.memory.OutOfMemoryReport if a memory pool raised the error."""


class CommunicationError(CukitError):
    """A connection between processes of a distributed run fails, NCCL fails, or the processes call
    different collectives."""


class PointerError(CukitError, ValueError):
    """An address that the pool cannot free: already freed, unknown, or of another pool."""


class CacheError(CukitError):
    """The kernel cache cannot be used."""
