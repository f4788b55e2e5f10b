"""Compiles a kernel once, checks its arguments and launches it on CuPy's current stream."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from cukit.core import backend
from cukit.core.arrays import check_current_device, describe
from cukit.core.compiler import CompiledKernel, KernelSpec, compile_with_message
from cukit.core.dependent_launch import DependentFunction
from cukit.core.device import current_device, require_cupy
from cukit.core.parameters import ParameterStruct
from cukit.errors import LaunchError

__all__ = [
    "NULL",
    "Kernel",
    "KernelSpec",
    "Launch",
    "Launches",
    "by_value",
    "changed_by_value",
    "int32s",
    "launch_plan",
    "load_kernel",
]

NULL = None
"""Argument for an optional pointer that a call does not pass."""

Argument = Any
"""A CuPy array, NULL, a NumPy scalar, a structured array of one element, or a result of
`by_value`."""

_POINTER_BYTES = 8
_INT32_BYTES = 4
_PORTABLE_CLUSTER = 8
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14  # CUfunction_attribute
_MAX_SCALARS = 4096


class Kernel:
    """One entry of one cubin, loaded on the current device.

    Call it with a grid and the kernel's arguments: CuPy arrays are passed as pointers, NumPy
    scalars by value. Python numbers are rejected, because their width is ambiguous.
    """

    __slots__ = ("_accepted", "block", "compiled", "function", "shared_bytes")

    def __init__(self, compiled: CompiledKernel) -> None:
        cupy = require_cupy("launching kernels")
        spec = compiled.spec
        raw = cupy.RawModule(path=str(compiled.path)).get_function(spec.entry)
        # CuPy loads a cubin once: specs that differ only in shared memory share one function, so
        # the function's limit must be the maximum over these specs.
        if spec.shared_bytes > raw.max_dynamic_shared_size_bytes:
            raw.max_dynamic_shared_size_bytes = spec.shared_bytes
        self._accepted: set[tuple[Any, ...]] = set()
        self.compiled = compiled
        self.function = raw.kernel
        if int(dict(spec.defines).get("CLUSTER", 1)) > _PORTABLE_CLUSTER:
            _allow_large_clusters(self.function)
        self.block = (spec.threads, 1, 1)
        self.shared_bytes = spec.shared_bytes

    def __call__(
        self,
        grid: tuple[int, ...],
        args: tuple[Argument, ...],
        reachable: Sequence[Argument] = (),
        *,
        stream: Any = None,
    ) -> None:
        """Launches `grid` blocks. An empty grid launches nothing.

        reachable: arrays that the kernel accesses through addresses stored in `args`. The emulator
        permits accesses to them; ignored on the GPU. stream: a CuPy stream, by default the current
        one; ignored by the emulator.
        """
        self.check(args)
        if 0 not in grid:
            self.function(grid, self.block, args, self.shared_bytes, stream)

    def check(self, args: tuple[Argument, ...]) -> None:
        """Raises LaunchError if `args` do not match the kernel's parameters."""
        wrapper = _by_value_type()
        kinds = tuple(
            [argument.nbytes if (kind := type(argument)) is wrapper else kind for argument in args]
        )
        if kinds not in self._accepted:
            check_arguments(self.compiled, args)
            if np.ndarray not in kinds:  # a struct whose size is not part of its type
                self._accepted.add(kinds)


def _allow_large_clusters(function: Any) -> None:
    """Permits clusters of more than 8 blocks, the portable limit; CuPy has no call for this."""
    set_attribute = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute
    status = set_attribute(ctypes.c_void_p(function.ptr), _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    if status:
        raise LaunchError(f"cuFuncSetAttribute: CUDA error {status}")


def check_arguments(compiled: CompiledKernel, args: tuple[Argument, ...]) -> None:
    """Raises LaunchError unless `args` match the parameters in the cubin in number and sizes.

    The driver does not check them: a mismatch would corrupt memory silently.
    """
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
    # hasattr on the class, because the instance property builds a new dictionary.
    if argument is NULL or hasattr(kind, "__cuda_array_interface__"):
        return _POINTER_BYTES
    if issubclass(kind, (np.generic, np.ndarray)):
        return int(argument.nbytes)  # an array passed by value is a struct, e.g. a tensor map
    raise LaunchError(
        f"{spec}: argument {index} is a {kind.__name__}; expected a CuPy array or a NumPy scalar"
    )


def load_kernel(spec: KernelSpec) -> Kernel:
    """The kernel for the current device: from memory, from the disk cache, or newly compiled."""
    if backend.active is not None:
        kernel: Kernel = backend.active.load_kernel(spec)
        return kernel
    device_id = int(require_cupy("launching kernels").cuda.runtime.getDevice())
    return _load_on(spec, device_id)


@functools.cache
def _load_on(spec: KernelSpec, device_id: int) -> Kernel:
    return Kernel(compile_with_message(spec, current_device().compile_arch))


def by_value(value: Argument) -> Argument:
    """`value`, a NumPy scalar or an array of one element, as a reusable launch argument.

    CuPy wraps every argument of every launch in a separate object, which for a struct takes as
    long as the launch itself; the object returned here is passed without wrapping. With an active
    backend, `value` is returned unchanged.
    """
    wrapper = None if backend.active is not None else _by_value_type()
    if wrapper is None or type(value) is wrapper:
        return value
    if isinstance(value, np.integer):
        return _integer_by_value(value)
    return _wrapped(wrapper, value)


@functools.lru_cache(maxsize=_MAX_SCALARS, typed=True)
def _integer_by_value(value: np.integer[Any]) -> Argument:
    """Cached, because launches repeat a few values: lengths, head counts, block counts."""
    return _wrapped(_by_value_type(), value)


def int32s(*values: int) -> tuple[Argument, ...]:
    """The values as launch arguments of type int; faster than `by_value` of each."""
    try:
        packed = _ints(len(values)).pack(*values)
    except struct.error as error:
        raise LaunchError(f"{error}, got {values}") from None
    wrapper = None if backend.active is not None else _by_value_type()
    if wrapper is None:
        return tuple(np.frombuffer(packed, np.int32))
    storage = _bytes_type(len(packed)).from_buffer_copy(packed)
    address = ctypes.addressof(storage)
    arguments = []
    for place in range(address, address + len(packed), _INT32_BYTES):
        argument = wrapper(place)
        argument.nbytes = _INT32_BYTES
        argument.storage = storage
        arguments.append(argument)
    return tuple(arguments)


@functools.cache
def _ints(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}i")


def changed_by_value(
    layout: ParameterStruct, packed: np.ndarray[Any, Any], values: Mapping[str, Any]
) -> Argument:
    """`by_value(layout.changed(packed, **values))`, but faster.

    For calls whose lengths change: a plan packs the struct once, and each call sets a few fields.
    """
    wrapper = None if backend.active is not None else _by_value_type()
    if wrapper is None:
        return layout.changed(packed, **values)
    argument = _wrapped(wrapper, packed)
    layout.write(argument.storage, values)
    return argument


def _wrapped(wrapper: Any, value: Any) -> Argument:
    nbytes = value.nbytes
    storage = _bytes_type(nbytes).from_buffer_copy(value)
    argument = wrapper(ctypes.addressof(storage))
    argument.nbytes = nbytes
    argument.storage = storage
    return argument


def bytes_by_value(storage: Any, address: int, nbytes: int) -> Argument | None:
    """The `nbytes` at `address`, owned by `storage`, as a reusable launch argument like the
    results of `by_value`. None if CuPy has no `CPointer` class."""
    wrapper = _by_value_type()
    if wrapper is None:
        return None
    argument = wrapper(address)
    argument.nbytes = nbytes
    argument.storage = storage
    return argument


@functools.cache
def _bytes_type(nbytes: int) -> Any:
    return ctypes.c_char * nbytes


@functools.cache
def _by_value_type() -> Any:
    """A subclass of CuPy's `CPointer`, the address of an argument.

    None if CuPy has no such class; CuPy then wraps the values on every launch.
    """
    try:
        from cupy.cuda.function import CPointer
    except ImportError:
        return None

    class ByValue(CPointer):  # type: ignore[misc]
        __slots__ = ("nbytes", "storage")  # set after construction: faster than an __init__

    return ByValue


class Launch:
    """A prepared launch: everything that depends only on the description of the arguments.

    Call it with the arrays; the kernel's arguments are the arrays, `scalars` and the call's
    `trailing_args`, in this order. The argument list is checked on the first call only: every call
    passes arguments of the same types.

    dependent: use programmatic dependent launch on GPUs that support it; the kernel itself waits
    for the previous launch (:class:`~cukit.core.dependent_launch.DependentFunction`).
    """

    __slots__ = ("_checked", "_function", "_idle", "dependent", "grid", "kernel", "scalars")

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
        self.dependent = dependent
        self.grid = grid
        wrapper = _by_value_type()
        self.scalars = tuple(
            [value if type(value) is wrapper else by_value(value) for value in scalars]
        )
        self._idle = 0 in grid
        self._checked = False

    def __call__(self, *arrays: Argument, trailing_args: tuple[Argument, ...] = ()) -> None:
        """Launches on the current stream. An empty grid launches nothing."""
        kernel = self.kernel
        args = arrays + self.scalars + trailing_args
        if not self._checked:
            kernel.check(args)
            self._checked = True
        if not self._idle:
            self._function(self.grid, kernel.block, args, kernel.shared_bytes)


class Launches:
    """Makes launches of one kernel with arguments of the same types: once the first has been
    checked, later ones skip the check."""

    __slots__ = ("_dependent", "_last", "kernel")

    def __init__(self, kernel: Kernel, *, dependent: bool = False) -> None:
        """dependent: as in :class:`Launch`."""
        self.kernel = kernel
        self._dependent = dependent
        self._last: Launch | None = None

    def __call__(self, grid: tuple[int, ...], scalars: tuple[Argument, ...]) -> Launch:
        """A launch of `grid` blocks whose arguments are the arrays followed by `scalars`."""
        launch = Launch(self.kernel, grid, scalars, dependent=self._dependent)
        launch._checked = self._last is not None and self._last._checked
        self._last = launch
        return launch


_MAX_DESCRIPTIONS = 4096
_UNPLANNED = object()  # not None, which `prepare` may return


def launch_plan(
    prepare: Callable[..., Any],
    *,
    plan: Callable[..., Any] | None = None,
    shorten: Callable[[tuple[Any, ...]], Hashable] | None = None,
) -> Callable[..., Any]:
    """Memoises `prepare(*args)` by device, the description of each array (shape, strides, dtype,
    address modulo 16, device; see `describe`) and the other arguments.

    An op's checks, plan, kernel look-up and packing of scalars run once per description; a repeated
    call costs one dictionary look-up. `prepare` must neither keep the arrays nor read their
    contents. `.forget()` of the result clears the memo; `.__wrapped__` is the unmemoised function.

    plan, shorten: for ops whose lengths vary between calls. `plan(*args)` checks a call and
    computes what does not depend on lengths; its result is the first argument of `prepare`, before
    `args`, and is memoised by `shorten(key)`: the key of the call (the device, then `describe` of
    the arguments) without lengths. Calls with the same shortened key must pass the same checks.
    """
    memory: dict[Hashable, Any] = {}
    plans: dict[Hashable, Any] = {}
    current_device_id: Callable[[], int] | None = None

    def planned(key: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        assert plan is not None
        assert shorten is not None
        short = shorten(key)
        found = plans.get(short, _UNPLANNED)
        if found is _UNPLANNED:
            check_current_device(args)
            found = plan(*args)
            _remember(plans, short, found)
        return found

    def uncached(*args: Any) -> Any:
        return prepare(*args) if plan is None else prepare(plan(*args), *args)

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
        except TypeError:  # an unhashable option: the checks report it
            return uncached(*args)
        if launch is _UNPLANNED:
            if plan is None:
                check_current_device(args)
                launch = prepare(*args)
            else:
                launch = prepare(planned(key, args), *args)
            _remember(memory, key, launch)
        return launch

    def forget() -> None:
        memory.clear()
        plans.clear()

    recall.forget = forget  # type: ignore[attr-defined]
    recall.__wrapped__ = uncached
    return recall


def _remember(memory: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    if len(memory) >= _MAX_DESCRIPTIONS:
        memory.clear()
    memory[key] = value


def _device_getter() -> Callable[[], int]:
    cupy = require_cupy("launching kernels")
    return cupy.cuda.runtime.getDevice  # type: ignore[no-any-return]
