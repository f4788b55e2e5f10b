"""Compiled once, arguments checked, launched on CuPy's current stream."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from cukit.core import backend
from cukit.core.arrays import check_current_device, describe
from cukit.core.compiler import CompiledKernel, KernelSpec, compile_visibly
from cukit.core.dependent_launch import DependentFunction
from cukit.core.device import current_device, require_cupy
from cukit.errors import LaunchError

__all__ = [
    "NULL",
    "Kernel",
    "KernelSpec",
    "Launch",
    "Launches",
    "by_value",
    "launch_plan",
    "load_kernel",
]

NULL = None
"""Pass it where a kernel takes an optional pointer that this call does not have."""

Argument = Any
"""A CuPy array, NULL, a NumPy scalar or a structured array of one element, or what `by_value` makes
of the last two."""

_POINTER_BYTES = 8
_MOST_SCALARS = 4096


class Kernel:
    """One entry of one cubin, loaded on the current device.

    Call it with a grid and the kernel's arguments: CuPy arrays become pointers, NumPy scalars go by
    value with their own size. Python numbers are refused, since their width would be a guess.
    """

    __slots__ = ("block", "compiled", "function", "shared_bytes")

    def __init__(self, compiled: CompiledKernel) -> None:
        cupy = require_cupy("launching kernels")
        spec = compiled.spec
        raw = cupy.RawModule(path=str(compiled.path)).get_function(spec.entry)
        # CuPy loads a cubin once: specs that differ in their shared memory alone have one function,
        # whose limit must hold for all of them.
        if spec.shared_bytes > raw.max_dynamic_shared_size_bytes:
            raw.max_dynamic_shared_size_bytes = spec.shared_bytes
        self.compiled = compiled
        self.function = raw.kernel
        self.block = (spec.threads, 1, 1)
        self.shared_bytes = spec.shared_bytes

    def __call__(
        self,
        grid: tuple[int, ...],
        args: tuple[Argument, ...],
        reachable: Sequence[Argument] = (),
    ) -> None:
        """Launches `grid` blocks on the current stream. An empty grid launches nothing.

        reachable: arrays that the kernel finds through addresses in the memory of `args`. The
        emulator lets it touch them; on the GPU nobody asks.
        """
        self.check(args)
        if 0 not in grid:
            self.function(grid, self.block, args, self.shared_bytes)

    def check(self, args: tuple[Argument, ...]) -> None:
        """Raises LaunchError where `args` do not fit the kernel's parameters."""
        check_arguments(self.compiled, args)


def check_arguments(compiled: CompiledKernel, args: tuple[Argument, ...]) -> None:
    """Compares sizes with the cubin's parameters: a wrong list would be silent corruption."""
    expected = compiled.info.parameter_bytes
    wrapper = _by_value_type()
    got = tuple(
        [
            argument.nbytes if type(argument) is wrapper else _bytes_of(compiled.spec, i, argument)
            for i, argument in enumerate(args)
        ]
    )
    if got != expected:
        raise LaunchError(
            f"{compiled.spec}: the kernel takes {len(expected)} parameters of {expected} bytes, "
            f"the launch passes {len(got)} of {got}"
        )


def _bytes_of(spec: KernelSpec, index: int, argument: Argument) -> int:
    kind = type(argument)
    # Of the class: an array makes its interface anew for every question.
    if argument is NULL or hasattr(kind, "__cuda_array_interface__"):
        return _POINTER_BYTES
    if issubclass(kind, (np.generic, np.ndarray)):
        return int(argument.nbytes)  # an array by value is a structure, a tensor map say
    raise LaunchError(
        f"{spec}: argument {index} is a {kind.__name__}; expected a CuPy array or a NumPy scalar"
    )


def load_kernel(spec: KernelSpec) -> Kernel:
    """The kernel for the current device: from memory, from disk, or compiled on first use."""
    if backend.active is not None:
        kernel: Kernel = backend.active.load_kernel(spec)
        return kernel
    device_id = int(require_cupy("launching kernels").cuda.runtime.getDevice())
    return _load_on(spec, device_id)


@functools.cache
def _load_on(spec: KernelSpec, device_id: int) -> Kernel:
    return Kernel(compile_visibly(spec, current_device().compile_arch))


def by_value(value: Argument) -> Argument:
    """`value`, a NumPy scalar or an array of one element, in the form that costs a launch least.

    For what is passed again and again. CuPy makes an object of its own of every argument at every
    launch, for a structure at the price of the whole launch; what it made once it takes as it is.
    An active backend takes values as they are.
    """
    wrapper = None if backend.active is not None else _by_value_type()
    if wrapper is None or type(value) is wrapper:
        return value
    if isinstance(value, np.integer):
        return _integer_by_value(value)
    storage = _bytes_type(value.nbytes).from_buffer_copy(value.tobytes())
    return wrapper(storage, ctypes.addressof(storage), value.nbytes)


@functools.lru_cache(maxsize=_MOST_SCALARS, typed=True)
def _integer_by_value(value: np.integer[Any]) -> Argument:
    """The same ones come again: lengths, heads, blocks."""
    storage = _bytes_type(value.nbytes).from_buffer_copy(value.tobytes())
    return _by_value_type()(storage, ctypes.addressof(storage), value.nbytes)


def bytes_by_value(storage: Any, address: int, nbytes: int) -> Argument | None:
    """What lies at `address` as an argument in the form that costs a launch least; `storage` owns
    it. None where CuPy does not take that form."""
    wrapper = _by_value_type()
    return None if wrapper is None else wrapper(storage, address, nbytes)


@functools.cache
def _bytes_type(nbytes: int) -> Any:
    return ctypes.c_char * nbytes


@functools.cache
def _by_value_type() -> Any:
    """A kind of CuPy's own `CPointer`, the address of an argument.

    None where CuPy has no such class any more: values then go the slow way.
    """
    try:
        from cupy.cuda.function import CPointer
    except ImportError:
        return None

    class ByValue(CPointer):  # type: ignore[misc]
        __slots__ = ("nbytes", "storage")

        def __init__(self, storage: Any, address: int, nbytes: int) -> None:
            self.nbytes = nbytes
            self.storage = storage
            super().__init__(address)

    return ByValue


class Launch:
    """Everything of a launch that depends only on the description of its arguments.

    Call it with the arrays; `scalars` follow them, then what `then` adds for this call. The
    argument list is checked the first time: a launcher passes the same kinds for every set of
    arrays with the same description.

    dependent: on GPUs that can, start while the launch before it still runs; the kernel waits for
    that by itself (:class:`~cukit.core.dependent_launch.DependentFunction`).
    """

    __slots__ = ("_checked", "_function", "_idle", "grid", "kernel", "scalars")

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        scalars: tuple[Argument, ...] = (),
        *,
        dependent: bool = False,
    ) -> None:
        self.kernel = kernel
        self._function = kernel.function
        if dependent and backend.active is None and current_device().compute_capability >= (9, 0):
            self._function = DependentFunction(kernel.function)
        self.grid = grid
        self.scalars = tuple(map(by_value, scalars))
        self._idle = 0 in grid
        self._checked = False

    def __call__(self, *arrays: Argument, then: tuple[Argument, ...] = ()) -> None:
        """Launches on the current stream. An empty grid launches nothing."""
        kernel = self.kernel
        args = arrays + self.scalars + then
        if not self._checked:
            kernel.check(args)
            self._checked = True
        if not self._idle:
            self._function(self.grid, kernel.block, args, kernel.shared_bytes)


class Launches:
    """Makes launches of one kernel that pass arguments of the same kinds: after the first has been
    called, the next need no check."""

    __slots__ = ("_last", "kernel")

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._last: Launch | None = None

    def __call__(self, grid: tuple[int, ...], scalars: tuple[Argument, ...]) -> Launch:
        """A launch of `grid` blocks with these scalars behind its arrays."""
        launch = Launch(self.kernel, grid, scalars)
        launch._checked = self._last is not None and self._last._checked
        self._last = launch
        return launch


_MOST_DESCRIPTIONS = 4096
_UNPLANNED = object()  # None is a plan too: that of a call which no kernel serves


def launch_plan(
    prepare: Callable[..., Any], describe: Callable[..., Hashable] = describe
) -> Callable[..., Any]:
    """Memoises `prepare(*args)` by device and description (shape, strides, dtype) of its arrays.

    Checks, plan, kernel look-up and scalars of an op run once per description; a repeated call
    costs one dictionary look-up. `prepare` must not keep or read the contents of the arrays.
    `.forget()` of the result drops what is remembered.

    describe: from the device and the arguments to what decides about the result.
    """
    memory: dict[Hashable, Any] = {}
    current_device_id: Callable[[], int] | None = None

    @functools.wraps(prepare)
    def recall(*args: Any) -> Any:
        nonlocal current_device_id
        if backend.active is not None:
            device: Hashable = backend.active.key
        else:
            if current_device_id is None:
                current_device_id = _device_getter()
            device = current_device_id()
        key = describe(device, *args)
        try:
            launch = memory.get(key, _UNPLANNED)
        except TypeError:  # an option that cannot be hashed: the checks name it
            return prepare(*args)
        if launch is _UNPLANNED:
            check_current_device(args)
            launch = prepare(*args)
            if len(memory) >= _MOST_DESCRIPTIONS:
                memory.clear()
            memory[key] = launch
        return launch

    recall.forget = memory.clear  # type: ignore[attr-defined]
    return recall


def _device_getter() -> Callable[[], int]:
    cupy = require_cupy("launching kernels")
    return cupy.cuda.runtime.getDevice  # type: ignore[no-any-return]
